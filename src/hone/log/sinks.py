"""Where metrics go: a JSON-lines file that survives crashes and resumes, and TensorBoard."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hone.errors import HoneError

RESERVED = frozenset({"step", "nonfinite"})


class Sink(Protocol):
    """Takes one set of metrics a step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def truncate_after(self, step: int) -> None: ...


class JsonlSink:
    """One JSON object a step; the file is complete after every write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self.path)
        self._begun = False

    @property
    def lost(self) -> bool:
        """Whether the file was removed after a write."""
        return self._begun and not self.path.exists()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics; NaN and infinity become null and are named in "nonfinite"."""
        if clash := RESERVED & metrics.keys():
            raise ValueError(f"metrics may not be called {sorted(clash)}")
        row: dict[str, Any] = {"step": step}
        row |= {name: finite(value) for name, value in metrics.items()}
        if lost := [name for name in metrics if row[name] is None]:
            row["nonfinite"] = lost
        append(self.path, row)
        self._begun = True

    def truncate_after(self, step: int) -> None:
        truncate_after(self.path, step)


class TensorBoardSink:
    """Scalars for TensorBoard; needs the extra `hone[tensorboard]`."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = str(directory)
        self._writer = _summary_writer(self._directory)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Event files are append-only: a purge mark makes TensorBoard hide the later steps."""
        self._writer.close()
        self._writer = _summary_writer(self._directory, purge_step=step + 1)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Adds one line in a single write. A pipe in the file's place is an error; it would block."""
    with open(path, "ab", opener=_at_once) as file:
        file.write(line(row))


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line torn by a crash is left out."""
    return [row for _, row in _rows(Path(path))]


def _rows(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each line with its row."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    rows: list[tuple[bytes, dict[str, Any]]] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            if number < len(lines):
                raise HoneError(f"{path} line {number} is not JSON: repair or delete that line") from None
            continue
        if not isinstance(row, dict) or type(row.get("step", 0)) is not int:
            raise HoneError(f"{path} line {number} tells of no step: repair or delete that line")
        rows.append((text, row))
    return rows


def truncate_after(path: str | Path, step: int) -> None:
    """Drops the rows of later steps, and a torn last line, so that a resumed log has no step twice."""
    path = Path(path)
    if path.exists():
        _replace(path, [text + b"\n" for text, row in _rows(path) if row.get("step", 0) <= step])


def drop_torn_line(path: Path) -> None:
    """Drops a torn last line, which would otherwise swallow the next one appended."""
    if path.exists() and not path.is_file():
        raise HoneError(f"{path} is no file, but a pipe, a device or a folder: remove it")
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        whole = file.read() == b"\n"
    if not whole:
        _replace(path, [text + b"\n" for text, _ in _rows(path)])


def finite(value: float) -> float | None:
    """The number as JSON can hold it: None for NaN and infinity."""
    number = value if type(value) is int else float(value)
    return number if math.isfinite(number) else None


def rewrite(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the file anew beside itself and swaps it in, so that a crash leaves the old or the new one."""
    _replace(path, list(map(line, rows)))


def _replace(path: Path, lines: Sequence[bytes]) -> None:
    fresh = path.with_name(path.name + ".part")
    with fresh.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def line(row: Mapping[str, Any]) -> bytes:
    """The row as JSON on a line of its own."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    # A lone surrogate cannot be UTF-8; inside a JSON string its backslash form is the same character.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _summary_writer(directory: str, **options: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HoneError("tensorboard is not installed: run `pip install hone[tensorboard]`") from None
    return SummaryWriter(directory, **options)
