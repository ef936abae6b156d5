"""Files to documents. A file is cut into shards by bytes. A record belongs to the shard of its first byte, so that the
size of shards changes nothing. Only one record is in memory at a time."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hone.errors import HoneError

KINDS = (".jsonl", ".txt", ".jsonl.gz", ".txt.gz")
Record = tuple[int, int, bytes | None]  # first byte, bytes, content (None: too long to hold)
HALF = re.compile("[\ud800-\udfff]")
BOM = b"\xef\xbb\xbf"
NO_END = 1 << 62  # beyond any file: the length of a compressed one is not known before it is read


@dataclass(frozen=True, slots=True)
class Shard:
    """The records of `path` that begin in bytes start <= b < end."""

    source: str
    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Document:
    at: int  # its record's first byte in the (uncompressed) file
    size: int  # bytes of the record
    text: str
    problem: str = ""  # why it could not be read


def files_of(source: str) -> list[Path]:
    """The file itself, or the files of a folder and the folders in it, sorted."""
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(KINDS))
        if not files:
            raise HoneError(f"{path} holds no {', '.join(KINDS)} file: convert the data to JSON lines")
        return files
    if not path.is_file():
        there = "is a pipe or a device" if path.exists() else "is not there"
        raise HoneError(f"{path} {there}: give the path of a file or folder of texts")
    if not path.name.endswith(KINDS):
        raise HoneError(f"{path} is none of {', '.join(KINDS)}: convert it to JSON lines, one document a line")
    return [path]


def plan(sources: Sequence[str], *, shard_bytes: int, split: str) -> list[Shard]:
    """The shards of all sources, in order; a compressed file and a whole-file document cannot be cut."""
    shards: list[Shard] = []
    seen: set[Path] = set()
    for source in sources:
        for path in files_of(source):
            if path.resolve() in seen:
                raise HoneError(f"{path} is given twice: every file belongs to one source")
            seen.add(path.resolve())
            size = path.stat().st_size
            whole = path.suffix == ".gz" or (split == "file" and path.suffix == ".txt")
            starts = range(0, max(size, 1), shard_bytes)
            cut = [(0, NO_END)] if whole else [(start, min(start + shard_bytes, size)) for start in starts]
            shards += [Shard(source, str(path), start, end) for start, end in cut]
    return shards


def read(shard: Shard, *, column: str, split: str, limit: int) -> Iterator[Document]:
    """The documents of a shard; one that cannot be read has a `problem` instead of a text."""
    try:
        yield from _read(shard, column=column, split=split, limit=limit)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise HoneError(f"{shard.path} is a damaged gzip file ({error}): copy it again") from error


def _read(shard: Shard, *, column: str, split: str, limit: int) -> Iterator[Document]:
    name = shard.path.removesuffix(".gz")
    with _open(shard.path) as file:
        if name.endswith(".txt") and split == "file":
            records = _whole(file, limit)
        elif name.endswith(".txt") and split == "blank":
            records = _paragraphs(file, shard, limit)
        else:
            records = (
                (at, size, data) for at, size, data in _lines(file, shard, limit) if data is None or data.strip()
            )
        for at, size, data in records:
            yield _document(at, size, data, column=column if name.endswith(".jsonl") else None)


def _open(path: str) -> BinaryIO:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _document(at: int, size: int, data: bytes | None, *, column: str | None) -> Document:
    if data is None:
        return Document(at, size, "", "too_long")
    try:
        text = (data.removeprefix(BOM) if at == 0 else data).decode("utf-8")
    except UnicodeDecodeError:
        return Document(at, size, data[:200].decode("utf-8", "replace"), "not_utf8")
    if column is not None:
        return _row(at, size, text, column)
    text = text.strip("\r\n")
    return Document(at, size, text, "" if text.strip() else "empty")


def _row(at: int, size: int, line: str, column: str) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return Document(at, size, line, "not_json")
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        return Document(at, size, line, "no_text")
    if not text.strip():
        return Document(at, size, line, "empty")
    if not text.isascii() and HALF.search(text):
        return Document(at, size, line, "half_surrogate")
    return Document(at, size, text)


def _lines(file: BinaryIO, shard: Shard, limit: int) -> Iterator[Record]:
    at = shard.start
    if at:  # the line of the byte before the shard belongs to the previous shard
        file.seek(at - 1)
        at += _skip_line(file) - 1
    while at < shard.end:
        data = file.readline(limit + 1)
        if not data:
            return
        size = len(data)
        if size > limit and not data.endswith(b"\n"):
            yield at, size + _skip_line(file), None
            at = file.tell()
            continue
        yield at, size, data
        at += size


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line; the number of bytes."""
    skipped = 0
    while data := file.readline(1 << 20):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped


def _paragraphs(file: BinaryIO, shard: Shard, limit: int) -> Iterator[Record]:
    """Runs of lines that are not blank. The last one is read to its end, even beyond the shard."""
    inside = shard.start > 0 and not _after_blank(file, shard.start)
    first, size, parts = 0, 0, list[bytes]()
    for at, length, data in _lines(file, Shard(shard.source, shard.path, shard.start, NO_END), limit):
        blank = data is not None and not data.strip()
        if blank or (not size and at >= shard.end):
            if size:
                yield first, size, b"".join(parts) if size <= limit else None
            inside, size, parts = False, 0, []
            if at >= shard.end:
                return
        elif not inside:
            first = first if size else at
            size += length
            parts = parts if size <= limit else []
            parts += [data] if data is not None and size <= limit else []
    if size:
        yield first, size, b"".join(parts) if size <= limit else None


def _after_blank(file: BinaryIO, start: int) -> bool:
    """Is the line before the first line that begins at or after `start` blank?"""
    file.seek(start - 1)
    at = start - 1 + _skip_line(file)
    newlines = 0
    while at > 0:  # only back over white space, which is short
        at -= 1
        file.seek(at)
        byte = file.read(1)
        newlines += byte == b"\n"
        if newlines == 2 or byte.strip():
            return newlines == 2
    return True


def _whole(file: BinaryIO, limit: int) -> Iterator[Record]:
    data = file.read(limit + 1)
    size = len(data)
    while more := file.read(1 << 20):
        size += len(more)
    yield 0, size, data if size <= limit else None
