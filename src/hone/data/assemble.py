"""From the places of the data to a feed: read, converted, streamed or held, mixed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from hone.data.convert import LONGER, SKIP, Grouper, Tally, Tasker
from hone.data.files import Read
from hone.data.locate import Data, Part, Reading, locate
from hone.data.mix import Mixed
from hone.data.pairs import used
from hone.data.parse import shown
from hone.data.rendering import AT_ONCE
from hone.data.shapes import Row, WrongColumns
from hone.data.shelf import Shelf
from hone.data.source import Feed, Source
from hone.data.stream import Stream
from hone.errors import HoneError

HELD = 256 * 2**20  # bytes of files that are read into memory whole, unless told otherwise
PREVIEW = 100  # rows of a stream that are looked at before the run
Converter = Grouper | Tasker


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A feed, what was converted into it, and what is worth saying about it."""

    feed: Feed[Any]
    converters: Mapping[str, Converter]
    notes: tuple[str, ...] = ()  # before the run

    @property
    def separator(self) -> str:
        """What ends the rows' steps, where all that is known of it agrees; else nothing."""
        ends = {end for converter in self.converters.values() for end in converter.tally.step_ends if end}
        return ends.pop() if len(ends) == 1 else ""

    def news(self) -> tuple[str, ...]:
        """What there is to say by now that the notes did not: rows of a stream are met as the run goes on."""
        return tuple(text for text in _notes(self.converters) if text not in self.notes)


def plain_rows(part: Part, how: Reading, tally: Tally) -> Iterator[tuple[Row, str]]:
    """Each row in Hone's columns with its address; bad ones are refused, or skipped and counted."""
    for shelf in part.shelves:
        for read in shelf.place.read():
            yield from _translated(read, shelf, how, tally)


def _translated(read: Read, shelf: Shelf, how: Reading, tally: Tally) -> list[tuple[Row, str]]:
    where = shelf.where(read.number)
    way = SKIP if how.settings and not how.skip_bad else ""
    try:
        if read.problem:
            raise HoneError(f"{where} {read.problem}{way}")
        try:
            rows, note = shelf.translate(read.row)
            made = [used(row, how.pairs) for row in rows]
        except HoneError as error:
            other = "" if isinstance(error, WrongColumns) and not tally.rows else way  # then all rows may be like it
            raise HoneError(f"{where}: {error}{other} (the row: {shown(read.row)})") from error
    except HoneError as error:
        if not how.skip_bad:
            raise
        tally.skip(str(error))
        return []
    if note:
        (tally.written if rows else tally.left_out)[note] += 1
    tally.used.update(what for _, what in made if what)
    return [(row, where) for several, _ in made for row in several]


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
    for some in _batches(plain_rows(part, how, convert.tally)):
        convert.ahead([row for row, _ in some])
        for row, where in some:
            numbered += 1
            made = convert(row, where, id=str(numbered)) if isinstance(convert, Tasker) else convert(row, where)
            items += [made] if made else []
    if not items:
        raise HoneError(_nothing(part, convert, found=numbered))
    return items


def _batches(rows: Iterator[tuple[Row, str]]) -> Iterator[list[tuple[Row, str]]]:
    """Some rows at a time; where one is refused, those before it have their say first."""
    some = list[tuple[Row, str]]()
    try:
        for row in rows:
            some.append(row)
            if len(some) == AT_ONCE:
                yield some
                some = list[tuple[Row, str]]()
    except HoneError:
        if some:
            yield some
        raise
    if some:
        yield some


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
        return f"{part.name}: all {found} {what} exceed {convert.max_tokens} tokens: {LONGER}"
    return f"{part.name} is empty: it needs at least one row"
