"""Checkpoints: a folder is complete or absent. Files are written aside, hashed, synced, and renamed into place.

Nothing is pickled: weights and optimiser moments are safetensors, everything else is JSON.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hone.errors import HoneError

MANIFEST = "manifest.json"
LATEST = "latest"


# --- folders ---


def save_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Call `write` on a folder aside, then rename it to `folder`; on any failure nothing is left behind."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        files = sorted(p for p in aside.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(aside)): digest(p) for p in files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*files, aside / MANIFEST, aside):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
        _sync(folder.parent)
    except OSError as error:
        raise HoneError(
            f"could not save {folder}: {error.strerror or error}; free some space or set out= to another disk, "
            "what was saved before is untouched"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def verify(folder: Path) -> None:
    """Every file of the manifest is there and has its hash, or HoneError."""
    try:
        manifest: dict[str, str] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise HoneError(f"{folder} is not a complete checkpoint: no readable {MANIFEST}; use an earlier one") from error
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file() or digest(path) != expected:
            raise HoneError(f"{path} is missing or damaged: use an earlier checkpoint")


def digest(path: Path) -> str:
    """SHA-256 of the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(text)
    _sync(aside)
    os.replace(aside, path)


# --- which checkpoint ---


def name_of(step: int) -> str:
    """Names sort by step."""
    return f"step-{step:06d}"


def save(root: Path, step: int, write: Callable[[Path], None], *, keep: int = 2) -> Path:
    """A new checkpoint; `latest` names it, then all but the newest `keep` are removed."""
    folder = save_folder(root / name_of(step), write)
    write_atomically(root / LATEST, folder.name)
    for old in sorted(root.glob("step-*"))[: -max(keep, 1)]:
        shutil.rmtree(old)
    return folder


def latest(root: Path) -> Path | None:
    """The newest checkpoint that is whole, or None where there is none; a damaged one is passed over."""
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            verify(folder)
        except HoneError:
            continue
        return folder
    return None


# --- tensors ---


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Safetensors, contiguous and without shared storage."""
    save_file({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """What `save_tensors` wrote, or HoneError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise HoneError(f"{path} cannot be read ({error}): use an earlier checkpoint") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, named by the parameter's place in it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{key}": torch.as_tensor(x)
        for i, p in enumerate(parameters)
        for key, x in optimizer.state.get(p, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put the state back where `optimizer_tensors` found it."""
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    for name, x in tensors.items():
        index, _, key = name.partition(".")
        if int(index) >= len(parameters):
            raise HoneError(f"the checkpoint's optimiser has parameter {index}, this model has {len(parameters)}")
        parameter = parameters[int(index)]
        device = parameter.device if x.ndim else x.device  # AdamW keeps its step count on the CPU
        optimizer.state[parameter][key] = x.to(device)


def read_json(path: Path) -> Any:
    """The file's content, or HoneError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise HoneError(f"{path} cannot be read ({error}): use an earlier checkpoint") from error
