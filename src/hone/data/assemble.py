"""From what a recipe calls its data to a feed: found, read, converted, streamed or held, mixed."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from hone.data import gym, named
from hone.data.chat import Turns
from hone.data.convert import Grouper, Overlong, Tally, Tasker
from hone.data.files import JSON_COLUMNS, READERS, File, Read
from hone.data.mix import Mixed
from hone.data.parse import shown
from hone.data.shapes import Row, Shape, plainly, renamed
from hone.data.shelf import First, Hub, Memory, Shelf
from hone.data.source import Feed, Source
from hone.data.stream import BUFFER, Stream
from hone.errors import HoneError
from hone.types import Task

HELD = 256 * 2**20  # bytes of files that are read into memory whole, unless told otherwise
PREVIEW = 100  # rows of a stream that are looked at before the run
WEIGHT = re.compile(r"^(.+?)\*(\d+(?:\.\d+)?(?:e-?\d+)?)$")
SLICE = re.compile(r"^(.+)\[(?::(\d+)|[^\[\]]*:[^\[\]]*)\]$")  # the number of a [:N]; none in any other slice
Data = str | Sequence[Any]
Converter = Grouper | Tasker


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How data is read; `chat`: questions of instruction datasets become messages."""

    skip_bad: bool = False
    overlong: Overlong = "error"
    stream: Literal["auto", "always", "never"] = "auto"
    buffer: int = BUFFER
    chunk: int = 0
    chat: bool = False
    turns: Turns = "joined"
    shares: bool = False  # scores are from 0 to 1
    shapes: tuple[Shape, ...] = ()  # that `reader`, an algorithm, can use; none: any
    reader: str = "training"
    columns: Mapping[str, str] = field(default_factory=dict[str, str])  # Hone's names to those of files and rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One dataset of a mix, or the only one."""

    name: str
    shelves: tuple[Shelf, ...]
    weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A feed, what was converted into it, and what is worth saying about it."""

    feed: Feed[Any]
    converters: Mapping[str, Converter]
    notes: tuple[str, ...] = ()  # before the run

    def news(self) -> tuple[str, ...]:
        """What there is to say by now that the notes did not: rows of a stream are met as the run goes on."""
        return tuple(text for text in _notes(self.converters) if text not in self.notes)


# --- where it is ---


def locate(data: Data, how: Reading) -> list[Part]:
    """The datasets that `data` names: "a.jsonl", "part-*.parquet", "gsm8k:train", "gym:chain_sum",
    "hf:owner/name:split", several joined with + or mixed as "a.jsonl*0.7+b.jsonl*0.3", each with [:N] for its first N
    rows; in Python rows, or a list of (data, weight)."""
    if not isinstance(data, str):
        return _mixture(data, how) if _is_mixture(data) else [Part(name="data", shelves=(_memory(data, how),))]
    if "+" not in data or Path(data).is_file():
        return [_part(data, how)]
    parts = [_part(text.strip(), how) for text in data.split("+")]
    if len({part.weight is None for part in parts}) > 1:
        raise HoneError(f"data={data}: some parts have a weight and some have none: write FILE*WEIGHT for each")
    if parts[0].weight is not None:
        return parts
    return [Part(name=data, shelves=tuple(shelf for part in parts for shelf in part.shelves))]


def _is_mixture(data: Sequence[Any]) -> bool:
    return bool(data) and all(
        isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], int | float) for item in data
    )


def _mixture(data: Sequence[Any], how: Reading) -> list[Part]:
    """A list of (data, weight)."""
    parts = list[Part]()
    for n, (inner, weight) in enumerate(data, start=1):
        shelves = [shelf for part in locate(inner, how) for shelf in part.shelves]
        parts.append(Part(name=inner if isinstance(inner, str) else f"data {n}", shelves=tuple(shelves), weight=weight))
    return parts


def _part(text: str, how: Reading) -> Part:
    found = None if Path(text).is_file() else WEIGHT.match(text)
    name, weight = (found[1], float(found[2])) if found else (text, None)
    return Part(name=name, shelves=tuple(_sliced(name, how)), weight=weight)


def _sliced(name: str, how: Reading) -> list[Shelf]:
    """The shelves of `name`, or of "name[:N]" the first N rows; the Hub cuts its splits itself."""
    found = None if name.startswith("hf:") or Path(name).is_file() else SLICE.match(name)
    if found is None:
        return _shelves(name, how)
    whole, most = found[1], int(found[2]) if found[2] else 0
    if not most:
        raise HoneError(f"{name}: only the first rows can be taken: write {whole}[:N], with N of 1 or more")
    shelves, whole_shelves = list[Shelf](), _shelves(whole, how)
    for shelf in whole_shelves:
        part = First(place=shelf.place, most=most)
        shelves.append(replace(shelf, place=part))
        most -= part.count() if len(whole_shelves) > 1 else 0
        if not most:
            break
    return shelves


def _shelves(name: str, how: Reading) -> list[Shelf]:
    if name.startswith("hf:"):
        return [Shelf(place=_hub(name), translate=partial(_plainly, how=how))]
    for shelf in (gym.find(name, chat=how.chat), named.find(name, chat=how.chat, chunk=how.chunk)):
        if shelf is not None:
            return [shelf]
    paths = [Path(name)]
    if has_magic(name) and not paths[0].is_file():
        paths = [Path(found) for found in sorted(glob(name, recursive=True))]
        if not paths:
            raise HoneError(f"no file matches {name}: check the pattern")
    elif File(path=paths[0]).form not in READERS and not paths[0].exists():
        known = ", ".join(named.NAMED)
        raise HoneError(f"{name} is no file, and no dataset of that name is known ({known}): check the path")
    values = JSON_COLUMNS | {theirs for name, theirs in how.columns.items() if name in JSON_COLUMNS}
    files = [File(path=path, chunk=how.chunk, values=values) for path in paths]
    return [Shelf(place=file, translate=partial(_plainly, how=how)) for file in files]


def _hub(name: str) -> Hub:
    """hf:owner/name[/config][:split]; a local folder may stand for owner/name."""
    path, _, split = name.removeprefix("hf:").partition(":")
    config = None
    if not Path(path).is_dir() and path.count("/") == 2:
        path, _, config = path.rpartition("/")
    return Hub(path=path, config=config, split=split or "train")


def _memory(data: Sequence[Any], how: Reading) -> Shelf:
    for n, row in enumerate(data, start=1):
        if not isinstance(row, Mapping | Task):
            raise HoneError(f"data row {n} is {type(row).__name__}: write each row as {{column: value}} or a hone.Task")
    rows = [_row(row) if isinstance(row, Task) else row for row in data]
    if any(isinstance(row, Task) for row in data):
        how = replace(how, columns={})  # a Task says what is what
    return Shelf(place=Memory(rows=rows), translate=partial(_plainly, how=how))


def _row(task: Task) -> dict[str, Any]:
    """A Task written in Python passes the same checks as a row of a file."""
    given = {"prompt": task.prompt, "answer": task.answer, "id": task.id or None}
    return {**task.extra, **{name: value for name, value in given.items() if value is not None}}


def _plainly(row: Row, *, how: Reading) -> tuple[list[Row], str]:
    made, written = plainly(renamed(row, how.columns) if how.columns else row, chat=how.chat)
    return [made], written


# --- what is in it ---


def plain_rows(part: Part, how: Reading, tally: Tally) -> Iterator[tuple[Row, str]]:
    """Each row in Hone's columns with its address; bad ones are refused, or skipped and counted."""
    for shelf in part.shelves:
        for read in shelf.place.read():
            yield from _translated(read, shelf, how, tally)


def _translated(read: Read, shelf: Shelf, how: Reading, tally: Tally) -> list[tuple[Row, str]]:
    where = shelf.where(read.number)
    try:
        if read.problem:
            raise HoneError(f"{where} {read.problem}")
        try:
            rows, note = shelf.translate(read.row)
        except HoneError as error:
            raise HoneError(f"{where}: {error} (the row: {shown(read.row)})") from error
    except HoneError as error:
        if not how.skip_bad:
            raise
        tally.skip(str(error))
        return []
    if note:
        (tally.written if rows else tally.left_out)[note] += 1
    return [(row, where) for row in rows]


def load(data: Data, how: Reading, make: Callable[[], Converter], *, seed: int) -> Loaded:
    """The feed of the data; `make` gives each part a converter of its own, for parts may differ in shape."""
    parts = locate(data, how)
    feeds, converters = dict[str, Feed[Any]](), dict[str, Converter]()
    for n, part in enumerate(parts):
        name = part.name if part.name not in feeds else f"{part.name} ({n + 1})"
        converters[name] = make()
        own = seed if len(parts) == 1 else seed * 1_000_003 + n + 1  # parts of one file must not go in step
        feeds[name] = _feed(part, how, converters[name], seed=own)
    weights = [part.weight for part in parts if part.weight is not None]
    feed = Mixed(feeds, weights) if weights else next(iter(feeds.values()))
    return Loaded(feed=feed, converters=converters, notes=_notes(converters))


def _notes(converters: Mapping[str, Converter]) -> tuple[str, ...]:
    said = [(name, c.tally.words(c.max_tokens)) for name, c in converters.items()]
    return tuple(f"{name}: {words}" for name, words in said if words)


def is_streamed(part: Part, how: Reading) -> bool:
    """Whether the rows stay on the disk."""
    if how.stream != "auto":
        return how.stream == "always"
    return sum(shelf.place.size for shelf in part.shelves) > HELD


def _feed(part: Part, how: Reading, convert: Converter, *, seed: int) -> Feed[Any]:
    if is_streamed(part, how):
        convert_once = partial(_items, how=how, convert=convert, furthest={})
        stream = Stream(part.shelves, convert_once, seed=seed, buffer=how.buffer)
        _look(part, how, convert)
        return stream
    return Source(held(part, how, convert), seed=seed)


def held(part: Part, how: Reading, convert: Converter) -> list[Any]:
    """Every row converted, in order."""
    items, numbered = list[Any](), 0
    for row, where in plain_rows(part, how, convert.tally):
        numbered += 1
        made = convert(row, where, id=str(numbered)) if isinstance(convert, Tasker) else convert(row, where)
        items += [made] if made else []
    if not items:
        raise HoneError(_nothing(part, convert, found=numbered))
    return items


def _items(read: Read, shelf: Shelf, *, how: Reading, convert: Converter, furthest: dict[str, int]) -> list[Any]:
    """A row of a stream; counted when it is first met, for every epoch meets it again."""
    tally, name = convert.tally, shelf.place.name
    convert.tally = tally if read.number > furthest.get(name, 0) else Tally()
    furthest[name] = max(read.number, furthest.get(name, 0))
    try:
        made = [convert(row, where) for row, where in _translated(read, shelf, how, convert.tally)]
    finally:
        convert.tally = tally
    return [item for item in made if item]


def _look(part: Part, how: Reading, convert: Converter) -> None:
    """The first rows of a stream, so that what is wrong with all of them is said before the run."""
    first = list(islice(plain_rows(part, how, convert.tally), PREVIEW))
    for row, where in first:
        convert(row, where)
    if not convert.tally.rows:
        raise HoneError(_nothing(part, convert, found=len(first)))
    convert.tally = Tally()


def _nothing(part: Part, convert: Converter, *, found: int) -> str:
    tally = convert.tally
    if tally.skipped:
        return f"{part.name} has no good row: {tally.reasons[0]}"
    if found:
        what = "prompts" if isinstance(convert, Tasker) else "rows"
        return f"{part.name}: all {found} {what} exceed {convert.max_tokens} tokens: shorten them or raise the context"
    return f"{part.name} is empty: it needs at least one row"
