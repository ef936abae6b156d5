"""Reads the tensors of a model folder from its safetensors files. An error names what is damaged or missing.

Shapes and dtypes can be read without the values, and values one tensor at a time.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hone.data.text.json_object import read_object
from hone.errors import HoneError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAPPED = 2**26  # bytes copied before a file is mapped again: pages read through one mapping count as memory
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DERIVED = "rotary_emb.inv_freq"  # a table in old checkpoints


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's safetensors files: one, or those that its index names."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    try:
        files = sorted(set(read_object(folder / INDEX)["weight_map"].values()))
    except (HoneError, KeyError, TypeError, AttributeError) as error:
        raise HoneError(f"{folder / INDEX} is no index of weights ({error}): copy it again") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in files):
        raise HoneError(f"{folder / INDEX} names files outside the folder: copy it again")
    return files


def _weight_paths(folder: Path, files: list[str] | None = None) -> list[Path]:
    paths = [folder / name for name in (weight_files(folder) if files is None else files)]
    for path in paths:
        if not path.is_file():
            raise HoneError(
                f"{folder} has no {path.name}: "
                "convert the weights to safetensors, or give a model's or adapter's folder"
            )
    return paths


def read_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a folder, by name."""
    tensors = dict[str, Tensor]()
    for path in _weight_paths(folder):
        tensors |= read_file(path, dtype)
    return {key: x for key, x in tensors.items() if not key.endswith(DERIVED)}


def read_file(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors, copied: a view of the mapped file would change when the file is written again."""
    tensors, before = dict[str, Tensor](), path.stat()
    try:
        with safe_open(path, framework="pt") as file:
            left = list(file.keys())
        while left:
            tensors |= _read_part(path, left, dtype)
            left = [key for key in left if key not in tensors]
    except SafetensorError as error:
        raise HoneError(f"{path} is damaged ({error}): copy it again") from error
    if (path.stat().st_ino, path.stat().st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
        raise HoneError(f"{path} was written while it was read: load it again")
    return tensors


def _read_part(path: Path, keys: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The first of the tensors, up to MAPPED bytes, by one mapping of the file."""
    tensors, held = dict[str, Tensor](), 0
    with safe_open(path, framework="pt") as file:
        for key in keys:
            tensors[key] = _float(file.get_tensor(key), key).to(dtype, copy=True)
            held += tensors[key].nbytes
            if held >= MAPPED:
                break
    return tensors


def _float(x: Tensor, name: str) -> Tensor:
    if x.dtype not in FLOATS:
        raise HoneError(f"tensor {name} is {x.dtype}: quantised models cannot be trained, use the full weights")
    return x


DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
KINDS = {  # the first pattern that matches a name counts
    "embedding": r"(^|\.)(embed_tokens|wte|wpe|embed_in)\.",
    "head": r"(^|\.)(lm_head|embed_out)\.",
    "score": r"^score\.",
    "norm": r"(^|\.)(ln_\w+|\w*norm\w*)\.",
    "attention": r"(^|\.)\w*att\w*\.",
    "mlp": r"(^|\.)mlp\.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOnDisk:
    """One tensor of a file."""

    path: Path
    key: str  # its name there
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        """The values, in the file's dtype."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.key)


def tensor_index(folder: Path, files: list[str] | None = None) -> dict[str, TensorOnDisk]:
    """The tensors of a model folder, by name, layer 2 before layer 10. Only the headers are read.

    files: read these instead of the model's.
    """
    found = dict[str, TensorOnDisk]()
    for path in _weight_paths(folder, files):
        try:
            found |= _tensors_of(path)
        except SafetensorError as error:
            raise HoneError(f"{path} is damaged ({error}): copy it again") from error
    return {key: found[key] for key in sorted(found, key=in_order)}


def _tensors_of(path: Path) -> dict[str, TensorOnDisk]:
    with safe_open(path, framework="pt") as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        kinds = {key: str(part.get_dtype()) for key, part in parts.items()}
        return {
            key: TensorOnDisk(
                path=path, key=key, shape=tuple(part.get_shape()), dtype=DTYPES.get(kinds[key], kinds[key])
            )
            for key, part in parts.items()
        }


def in_order(name: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers in names as numbers: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def kind_of(name: str) -> str:
    """Which part of a model a tensor belongs to, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
