"""Dataset files row by row, from any place in them: a reader yields each row with the cursor of the next one.

A row that cannot be read is yielded with the reason, so that the caller may refuse or skip it.
"""

import csv
import gzip
import hashlib
import io
import math
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from hone.data.feed import columnar
from hone.data.rows.parse import LIMIT, Unreadable, fault_in, kind_of, object_of, over, parse, too_long
from hone.errors import HoneError, made_by

EDGE = 64 * 1024  # bytes at each end of a file that identify it, with its length
LONGEST_LINE = 32 * LIMIT  # bytes after which a line has no end: the file is no text
WHOLE = 2**30  # bytes of a .json file, which is read whole
DENSEST = 200  # times its size, to which a .gz file may unpack: text unpacks to 3 to 20 times
BOM = b"\xef\xbb\xbf"
Cursor = tuple[int, int]  # the byte (or row) where the next row begins, and how many lines (or rows) lie before it
START: Cursor = (0, 0)
JSON_COLUMNS = frozenset(
    {"label", "margin", "labels", "completions", "steps", "step_labels", "messages", "conversations"}
)
KINDS = {
    stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device",
}  # fmt: skip
SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}


class RowRead(NamedTuple):
    """A row as it was read, or the reason why it could not be."""

    row: dict[str, Any]
    number: int  # of its line or row, from 1
    after: Cursor
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One dataset file. `kind` is its suffix without .gz unless given; `chunk`: characters of a .txt document;
    `values`: columns of a table that hold numbers, lists or truth."""

    path: Path
    kind: str = ""
    chunk: int = 0
    values: frozenset[str] = JSON_COLUMNS

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def form(self) -> str:
        """The reader's name in READERS."""
        return self.kind or (Path(self.path.stem) if self.path.suffix == ".gz" else self.path).suffix

    @property
    def unit(self) -> str:
        """What the rows are called in an error."""
        return {".json": "item", ".txt": "document"}.get(self.form, "row" if self.form in columnar.FORMS else "line")

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self._checked(lambda: self.path.stat().st_size)

    def read(self, start: Cursor = START) -> Iterator[RowRead]:
        """The rows from `start` on."""
        if self.form not in READERS:
            known = ", ".join(READERS)
            raise HoneError(f"{self.path} is not a kind of file Hone reads ({known}): convert it to JSON lines")
        try:
            self._check_regular()
            most = DENSEST * self.path.stat().st_size + LIMIT if self.path.suffix == ".gz" else math.inf
            for read in READERS[self.form](self, start):
                if read.after[0] > most:
                    raise self._too_dense()
                yield read
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise HoneError(f"{self.path} is a damaged gzip file ({error}): copy it again") from error
        except OSError as error:
            raise self._unreadable(error) from error

    def count(self) -> int:
        """How many rows there are, where the file says so or is read whole anyway; 0: only reading it would tell."""
        if self.form == ".json":
            return sum(1 for _ in self.read())
        if self.form not in columnar.FORMS:
            return 0
        return self._checked(lambda: columnar.count(self.path, self.form))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the length, both ends of the content and how it is cut; never of a date."""

        def digest() -> str:
            with self.path.open("rb") as file:
                head, size = file.read(EDGE), file.seek(0, io.SEEK_END)
                file.seek(max(0, size - EDGE))
                about = f"{size} {self.form} {self.chunk}".encode()
                return hashlib.sha256(about + b"\0" + head + file.read()).hexdigest()

        return self._checked(digest)

    def open(self) -> IO[bytes]:
        """The content, unpacked."""
        if self.path.suffix != ".gz":
            return self.path.open("rb")
        with self.path.open("rb") as file:
            unpacked = zlib.decompressobj(wbits=31).decompress(file.read(EDGE), DENSEST * EDGE)
        if len(unpacked) == DENSEST * EDGE:
            raise self._too_dense()
        return gzip.open(self.path, "rb")  # type: ignore

    def _too_dense(self) -> HoneError:
        return HoneError(
            f"{self.path} unpacks to more than {DENSEST} times its size, which no text does: "
            "see what is in it, and give the file unpacked"
        )

    def _check_regular(self) -> None:
        """HoneError if something lies there that is not a file. Reading it might wait for ever, or never end."""
        mode = self.path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise HoneError(
                f"{self.path} is a folder: name its files, as in '{self.path}/*.jsonl', or write hf:{self.path}"
            )
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in KINDS.items() if test(mode)), "no file")
            raise HoneError(f"{self.path} is {kind}: save the rows in a file, and give its path")

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            self._check_regular()
            return call()
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> HoneError:
        maker = made_by(self.path) if isinstance(error, FileNotFoundError) else ""
        remedy = maker or "give the path of a dataset file"
        return HoneError(f"cannot read {self.path}: {error.strerror or error}: {remedy}")


def _lines(file: IO[bytes], start: Cursor) -> Iterator[tuple[bytes, int, int]]:
    """(line, its number, offset after it). A line over the limit is cut just behind it, so that its length tells."""
    offset, number = start
    file.seek(offset)
    while line := file.readline(LIMIT + 1):
        number, offset = number + 1, offset + len(line)
        if len(line) > LIMIT and not line.endswith(b"\n"):
            offset += _pass_over(file, number)
        yield line, number, offset


def _pass_over(file: IO[bytes], number: int) -> int:
    """The bytes up to the end of the line, read and dropped."""
    passed, part = 0, b""
    while not part.endswith(b"\n") and (part := file.readline(LIMIT)):
        passed += len(part)
        if passed > LONGEST_LINE:
            size = LONGEST_LINE // 2**20
            raise HoneError(f"{file.name} line {number} does not end within {size} MiB: give a file of text lines")
    return passed


def _jsonl(file: File, start: Cursor) -> Iterator[RowRead]:
    """One object a line; only b"\\n" ends a line, for U+2028 may stand inside a JSON string."""
    with file.open() as content:
        for line, number, offset in _lines(content, start):
            if number == 1:
                line = line.removeprefix(BOM)
            if not line.strip():
                continue
            try:
                row, problem = object_of(parse(line)), ""
            except Unreadable as error:
                row, problem = {}, str(error)
            yield RowRead(row, number, (offset, number), problem)


def _json(file: File, start: Cursor) -> Iterator[RowRead]:
    """A list of objects, read whole."""
    with file.open() as content:
        data = content.read(WHOLE + 1)
    if len(data) > WHOLE:
        raise HoneError(f"{file.path} is over {WHOLE // 2**20} MiB and would be read whole: write it as .jsonl")
    try:
        value = parse(data.removeprefix(BOM), limit=0)
    except Unreadable as error:
        raise HoneError(f"{file.path} {error}") from error
    if not isinstance(value, list):
        raise HoneError(f"{file.path} holds {kind_of(value)}, not a list: write a list of objects, or use .jsonl")
    for number, item in enumerate(value[start[1] :], start=start[1] + 1):
        try:
            row, problem = object_of(item), too_long(item)
        except Unreadable as error:
            row, problem = {}, str(error)
        yield RowRead(row, number, (number, number), problem)


def _text(file: File, start: Cursor) -> Iterator[RowRead]:
    """Documents of a text: what lies between blank lines, or with `chunk` about so many characters, whole lines."""
    held, length, before, number = list[str](), 0, start[0], start[1]
    with file.open() as content:
        for line, _, offset in _lines(content, start):
            text, problem = _decoded(line.removeprefix(BOM) if offset == len(line) else line)
            if not problem and not file.chunk and length > LIMIT:
                problem = (
                    f"has no blank line in {LIMIT // 2**20} MiB: put one between documents, or set read.chunk=2000"
                )
            if problem:
                number, held, length, before = number + 1, [], 0, offset
                yield RowRead({}, number, (offset, number), problem)
                continue
            full = file.chunk and held and length + len(text) > file.chunk
            ends = full or (not file.chunk and not text.strip())
            if ends and "".join(held).strip():
                number += 1
                yield RowRead({"text": "".join(held).strip("\r\n")}, number, (before, number))
            held, length = ([], 0) if ends else (held, length)
            if file.chunk or text.strip():
                held.append(text)
                length += len(text)
            before = offset
        if "".join(held).strip():
            yield RowRead({"text": "".join(held).strip("\r\n")}, number + 1, (before, number + 1))


def _plain_lines(file: File, start: Cursor) -> Iterator[RowRead]:
    """Each line a row {"line": ...}, for the formats of named datasets."""
    with file.open() as content:
        for line, number, offset in _lines(content, start):
            text, problem = _decoded(line)
            if problem or text.strip():
                yield RowRead({} if problem else {"line": text.rstrip("\r\n")}, number, (offset, number), problem)


def _decoded(line: bytes) -> tuple[str, str]:
    """The text, or what is wrong with it."""
    if len(line) > LIMIT:
        return "", over(LIMIT)
    try:
        return line.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"is not UTF-8 (byte {error.start}): save the file as UTF-8"


class _Table:
    """The lines of a CSV file as its parser asks for them, with the offset after the last one given out."""

    def __init__(self, content: IO[bytes], start: Cursor) -> None:
        self.offset, self.number, self._lines = *start, _lines(content, start)
        self.over = False  # a line was cut short

    def __iter__(self) -> Iterator[str]:
        for line, number, offset in self._lines:
            self.number, self.offset = number, offset
            if len(line) > LIMIT:  # a part of it could end inside quotes and swallow what follows
                self.over, line = True, b"\n"
            # bytes that are no UTF-8 become surrogates, so that the row they are in can be named
            yield (line.removeprefix(BOM) if number == 1 else line).decode("utf-8", "surrogateescape")


def _csv(file: File, start: Cursor) -> Iterator[RowRead]:
    """A header, then a row a record; columns that hold numbers, lists or truth are read as JSON."""
    csv.field_size_limit(max(csv.field_size_limit(), LIMIT))
    mark = "\t" if file.form == ".tsv" else ","
    with file.open() as content:
        head = _Table(content, START)
        names = next(csv.reader(iter(head), delimiter=mark), [])
        _check_header(file, names, mark)
        table = _Table(content, (max(start[0], head.offset), max(start[1], head.number)))
        reader = csv.reader(iter(table), delimiter=mark, strict=True)
        while True:
            number, table.over = table.number + 1, False
            try:
                cells = next(reader, None)
                row, problem = _cells(names, cells or [], file.values)
            except csv.Error as error:
                cells, row, problem = [""], {}, f"is not valid CSV ({error}): correct its quotes"
            problem = over(LIMIT) if table.over else problem
            if cells is None:
                return
            if cells or table.over:
                yield RowRead(row, number, (table.offset, table.number), problem)


def _check_header(file: File, names: list[str], mark: str) -> None:
    if len(set(names)) < len(names):
        raise HoneError(f"{file.path} names a column twice in its first line: rename one")
    others = [other for other in SEPARATORS if other != mark and len(names) == 1 and other in names[0]]
    if others:
        suffix = {",": ".csv", "\t": ".tsv"}.get(others[0], "")
        remedy = f"rename the file to {suffix}" if suffix else f"save it with {SEPARATORS[mark]} between fields"
        raise HoneError(
            f"{file.path} has a single column, {names[0]!r}: its fields look separated by "
            f"{SEPARATORS[others[0]]}, a {file.form} file's are by {SEPARATORS[mark]}: {remedy}"
        )


def _cells(names: list[str], cells: list[str], values: frozenset[str]) -> tuple[dict[str, Any], str]:
    if len(cells) != len(names):
        return {}, f"has {len(cells)} fields, the first line names {len(names)}: correct it"
    row: dict[str, Any] = dict(zip(names, cells, strict=True))
    if any("\udc80" <= c <= "\udcff" for cell in cells if not cell.isascii() for c in cell):
        return {}, "is not UTF-8: save the file as UTF-8"
    for name in row.keys() & values:
        text = row[name].strip()
        try:
            row[name] = parse((text.lower() if text in ("True", "False") else text).encode()) if text else None
        except Unreadable:
            continue  # it stays text, and whoever needs a number there says so
    return row, too_long(row)


def _columns(file: File, start: Cursor) -> Iterator[RowRead]:
    for number, row in columnar.rows(file.path, file.form, start[1]):
        yield RowRead(row, number, (number, number), fault_in(row) or too_long(row))


READERS: dict[str, Callable[[File, Cursor], Iterator[RowRead]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _columns,
    ".arrow": _columns,
    ".feather": _columns,
    ".txt": _text,
    "lines": _plain_lines,
}
