"""Files that are whole or absent: written under another name, then renamed. A lock lets one run work in a folder."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hone.errors import HoneError
from hone.storage.textfile import read_text

PART, LOCK = ".part", ".lock"


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends without an error. Two processes write to different files."""
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    with open(part, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whose keys keep their order."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The object that `write_json` wrote, or HoneError."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise HoneError(f"{path} is damaged ({error}): start it anew with --restart") from error
    if not isinstance(content, dict):
        raise HoneError(f"{path} is damaged (it holds no table): start it anew with --restart")
    return content


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, or refuse it if another process works in it. Removes half-written files of a killed process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HoneError(f"another process is working in {folder}: wait for it or choose another folder") from error
        for part in folder.rglob(f"*{PART}"):
            part.unlink(missing_ok=True)
        yield
