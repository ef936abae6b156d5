"""Makes one feed of the datasets: rows are read and converted, streamed or held in memory, and mixed in proportion."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from hone.data.feed.files import RowRead
from hone.data.feed.locate import Data, Dataset, Reading, locate
from hone.data.feed.row_store import RowStore
from hone.data.feed.source import Feed, Source
from hone.data.feed.stream import Stream
from hone.data.rows.columns import Row, WrongColumns
from hone.data.rows.convert import LONGER, SKIP, Grouper, RowCounts, Tasker
from hone.data.rows.pairs import rows_for_reader
from hone.data.rows.parse import short_text
from hone.data.text.rendering import AT_ONCE
from hone.errors import HoneError

T = TypeVar("T")


def next_part(shares: Sequence[Fraction], taken: Sequence[int]) -> int:
    """The part that gives the next row: of those that may, the one whose deadline comes first.

    Tijdeman's rule for the chairman assignment problem: after any number n of rows, part i has given n * share_i
    rows to within 1 - 1 / (2 k - 2) of a row, for k parts.
    """
    if len(shares) == 1:
        return 0
    n, least = sum(taken) + 1, Fraction(1, 2 * len(shares) - 2)
    owed = [n * share - t for share, t in zip(shares, taken, strict=True)]
    waits = [((1 - least - o) / share, i) for i, (o, share) in enumerate(zip(owed, shares, strict=True)) if o >= least]
    return min(waits)[1]


class Mixture(Generic[T]):
    """Rows of several feeds by weight. No draw is random, so the proportions hold at every row, and exactly."""

    def __init__(self, parts: Mapping[str, Source[T] | Stream[T]], weights: Sequence[float]) -> None:
        if len(parts) != len(weights) or not parts:
            raise ValueError(f"{len(parts)} parts but {len(weights)} weights")
        if wrong := [w for w in weights if not 0 < w < math.inf]:
            raise HoneError(f"a weight of {wrong[0]}: every part of a mix needs a weight above 0")
        exact = [Fraction(str(+w)) for w in weights]
        self._names, self._parts = list(parts), list(parts.values())
        self._shares = [w / sum(exact) for w in exact]
        self._taken = [0] * len(exact)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __copy__(self) -> "Mixture[T]":
        twin = Mixture.__new__(Mixture)
        twin._names, twin._shares = self._names, self._shares
        twin._parts, twin._taken = [copy(part) for part in self._parts], list(self._taken)
        return twin

    def progress(self) -> dict[str, float]:
        """How often each part has been read, for the log."""
        return {f"epoch/{name}": part.epoch for name, part in zip(self._names, self._parts, strict=True)}

    def take(self, n: int) -> list[T]:
        """The next n rows."""
        taken = list[T]()
        for _ in range(n):
            i = next_part(self._shares, self._taken)
            taken += self._parts[i].take(1)
            self._taken[i] += 1
        return taken

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on exactly here; JSON can hold it."""
        return {
            "names": self._names,
            "shares": [str(share) for share in self._shares],
            "taken": list(self._taken),
            "parts": [dict(part.state()) for part in self._parts],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; refused for other parts or weights."""
        here = self.state()
        for name in ("names", "shares"):
            if state.get(name) != here[name]:
                raise HoneError(
                    f"cannot resume: the mix's {name} were {state.get(name)!r} when saved and are {here[name]!r} now: "
                    "resume with the same data, or start a new run"
                )
        taken, parts = list[int](state.get("taken") or ()), list[Any](state.get("parts") or ())
        counts = all(type(t) is int and 0 <= t < 2**63 for t in taken)
        if not counts or not len(taken) == len(parts) == len(self._parts):
            raise HoneError("cannot resume: the state of the mix is damaged: resume from another checkpoint")
        for part, saved in zip(self._parts, parts, strict=True):
            part.load(saved)
        self._taken = taken


IN_MEMORY = 256 * 2**20  # bytes of files that are read into memory whole, unless told otherwise
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
        """Notes that are new since the start: the rows of a stream are read as the run goes on."""
        return tuple(text for text in _notes(self.converters) if text not in self.notes)


def plain_rows(part: Dataset, how: Reading, tally: RowCounts) -> Iterator[tuple[Row, str]]:
    """Each row in Hone's columns with its address; bad ones are refused, or skipped and counted."""
    for store in part.stores:
        for read in store.place.read():
            yield from _translated(read, store, how, tally)


def _translated(read: RowRead, store: RowStore, how: Reading, tally: RowCounts) -> list[tuple[Row, str]]:
    where = store.where(read.number)
    way = SKIP if how.settings and not how.skip_bad else ""
    try:
        if read.problem:
            raise HoneError(f"{where} {read.problem}{way}")
        try:
            rows, note = store.translate(read.row)
            made = [rows_for_reader(row, how.pairs) for row in rows]
        except HoneError as error:
            other = "" if isinstance(error, WrongColumns) and not tally.rows else way  # then all rows may be like it
            raise HoneError(f"{where}: {error}{other} (the row: {short_text(read.row)})") from error
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
    """The feed of the data; `make` gives each part a converter of its own, for parts may differ in kind."""
    parts = locate(data, how)
    feeds, converters = dict[str, Source[Any] | Stream[Any]](), dict[str, Converter]()
    for n, part in enumerate(parts):
        name = part.name if part.name not in feeds else f"{part.name} ({n + 1})"
        converters[name] = make()
        own = seed if len(parts) == 1 else seed * 1_000_003 + n + 1  # parts of one file must not go in step
        feeds[name] = _feed(part, how, converters[name], seed=own)
    weights = [part.weight for part in parts if part.weight is not None]
    feed = Mixture(feeds, weights) if weights else next(iter(feeds.values()))
    return Loaded(feed=feed, converters=converters, notes=_notes(converters))


def _notes(converters: Mapping[str, Converter]) -> tuple[str, ...]:
    said = [(name, c.tally.words(c.max_tokens)) for name, c in converters.items()]
    return tuple(f"{name}: {words}" for name, words in said if words)


def is_streamed(part: Dataset, how: Reading) -> bool:
    """Whether the rows stay on the disk."""
    if how.stream != "auto":
        return how.stream == "always"
    return sum(store.place.size for store in part.stores) > IN_MEMORY


def _feed(part: Dataset, how: Reading, convert: Converter, *, seed: int) -> Source[Any] | Stream[Any]:
    if is_streamed(part, how):
        convert_once = partial(_items, how=how, convert=convert, furthest={})
        stream = Stream(part.stores, convert_once, seed=seed, buffer=how.buffer)
        _check_first_rows(part, how, convert)
        return stream
    return Source(convert_rows(part, how, convert), seed=seed)


def convert_rows(part: Dataset, how: Reading, convert: Converter) -> list[Any]:
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
    """Some rows at a time. Where one is refused, those before it are yielded first, for their own errors."""
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


def _items(read: RowRead, store: RowStore, *, how: Reading, convert: Converter, furthest: dict[str, int]) -> list[Any]:
    """A row of a stream; counted when it is first met, for every epoch meets it again."""
    tally, name = convert.tally, store.place.name
    convert.tally = tally if read.number > furthest.get(name, 0) else RowCounts()
    furthest[name] = max(read.number, furthest.get(name, 0))
    try:
        made = [convert(row, where) for row, where in _translated(read, store, how, convert.tally)]
    finally:
        convert.tally = tally
    return [item for item in made if item]


def _check_first_rows(part: Dataset, how: Reading, convert: Converter) -> None:
    """The first rows of a stream, so that what is wrong with all of them is said before the run."""
    first = list(islice(plain_rows(part, how, convert.tally), PREVIEW))
    for row, where in first:
        convert(row, where)
    if not convert.tally.rows:
        raise HoneError(_nothing(part, convert, found=len(first)))
    convert.tally = RowCounts()


def _nothing(part: Dataset, convert: Converter, *, found: int) -> str:
    tally = convert.tally
    if tally.skipped:
        return f"{part.name} has no good row: {tally.reasons[0]}"
    if found:
        what = "prompts" if isinstance(convert, Tasker) else "rows"
        return f"{part.name}: all {found} {what} exceed {convert.max_tokens} tokens: {LONGER}"
    return f"{part.name} is empty: it needs at least one row"
