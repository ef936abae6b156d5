"""The tensors of a model folder as they lie in its files: shapes and dtypes without reading, values one at a time."""

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hone.errors import HoneError
from hone.model.weight_files import weight_files

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
KINDS = {  # the first that a name matches
    "embedding": r"(^|\.)(embed_tokens|wte|wpe|embed_in)\.",
    "head": r"(^|\.)(lm_head|embed_out)\.",
    "score": r"^score\.",
    "norm": r"(^|\.)(ln_\w+|\w*norm\w*)\.",
    "attention": r"(^|\.)\w*att\w*\.",
    "mlp": r"(^|\.)mlp\.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of a file."""

    path: Path
    key: str  # its name there
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        """The values, in the file's dtype."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.key)


def stored(folder: Path, files: list[str] | None = None) -> dict[str, Stored]:
    """What a model folder holds, by name, layer 2 before layer 10; files: others than the model's."""
    found = dict[str, Stored]()
    for name in weight_files(folder) if files is None else files:
        path = folder / name
        if not path.is_file():
            raise HoneError(f"{folder} has no {name}: give a model folder or an adapter's, with safetensors")
        try:
            found |= _tensors_of(path)
        except SafetensorError as error:
            raise HoneError(f"{path} is damaged ({error}): copy it again") from error
    return {key: found[key] for key in sorted(found, key=in_order)}


def _tensors_of(path: Path) -> dict[str, Stored]:
    with safe_open(path, framework="pt") as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        kinds = {key: str(part.get_dtype()) for key, part in parts.items()}
        return {
            key: Stored(path=path, key=key, shape=tuple(part.get_shape()), dtype=DTYPES.get(kinds[key], kinds[key]))
            for key, part in parts.items()
        }


def in_order(name: str) -> list[tuple[int, str]]:
    """Sorts names by their numbers: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def kind_of(name: str) -> str:
    """Which part of a model a tensor belongs to, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
