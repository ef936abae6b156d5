"""Rows of files that need not fit into memory, in a shuffled order that is resumed exactly.

An epoch reads the files in an order set by (seed, epoch), and their rows in windows: each window is read in order,
then handed out in an order set by (seed, epoch, window). The first window of an epoch has a random length, so that
rows that were in different windows meet in another epoch. All that is remembered is where the window begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hone.data.feed.files import START, Cursor, RowRead
from hone.data.feed.row_store import RowStore
from hone.data.feed.source import bits, permutation
from hone.errors import HoneError

T = TypeVar("T")
Convert = Callable[[RowRead, RowStore], list[T]]  # a row to what is trained on; [] where it is skipped
BUFFER = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """A place in an epoch: the file (in the epoch's order), and the row in it."""

    file: int = 0
    cursor: Cursor = START


class Stream(Generic[T]):
    """An endless, resumable feed of the rows of files; at most `buffer` rows are in memory."""

    def __init__(self, stores: Sequence[RowStore], convert: Convert[T], *, seed: int, buffer: int = BUFFER) -> None:
        if not stores or buffer < 1:
            raise ValueError("a stream needs a file, and a buffer of at least one row")
        self._stores, self._convert = list(stores), convert
        self._seed, self._buffer = seed, buffer
        self._prints = [store.place.fingerprint for store in stores]
        self._rows = self._guess = 0  # of a whole epoch, known or estimated; 0: not yet
        self._go(epoch=0, window=0, start=StreamPosition(), before=0, position=0)

    def _go(self, *, epoch: int, window: int, start: StreamPosition, before: int, position: int) -> None:
        """Move to a place; `before` counts the rows of the epoch's earlier windows."""
        self._epoch, self._window, self._start = epoch, window, start
        self._before, self._position = before, position
        self._items: list[T] | None = None  # the window, once it is read
        self._end: StreamPosition | None = None  # where the next one begins; None: the epoch ends here
        self._reader: Iterator[RowRead] | None = None  # of the file that is open
        key = (self._seed, epoch)
        self._order = permutation(len(self._stores), *key)
        self._first = int(bits(1, *key, 0)[0] % self._buffer) + 1

    def __len__(self) -> int:
        """Rows an epoch: estimated until one has been read."""
        if not self._rows and not self._guess:
            self._guess = max(1, sum(store.estimate() for store in self._stores))
        return self._rows or self._guess

    def __copy__(self) -> "Stream[T]":
        twin = Stream.__new__(Stream)
        for name, value in vars(self).items():
            setattr(twin, name, value)
        twin._reader = None  # an open file has one place
        twin._items = None if self._items is None else list(self._items)
        return twin

    @property
    def epoch(self) -> float:
        """Epochs taken so far; the fraction of the first one is an estimate."""
        return self._epoch + min(1.0, (self._before + self._position) / len(self))

    def progress(self) -> dict[str, float]:
        """For the log."""
        return {"epoch": self.epoch}

    def _read(self, size: int) -> tuple[list[T], StreamPosition | None]:
        """The next `size` items from `_start` on, and where what follows begins."""
        items, at = list[T](), self._start
        while at.file < len(self._order):
            store = self._stores[self._order[at.file]]
            self._reader = self._reader or store.place.read(at.cursor)
            for read in self._reader:
                items += self._convert(read, store)
                at = StreamPosition(file=at.file, cursor=read.after)
                if len(items) >= size:
                    return items, at
            at, self._reader = StreamPosition(file=at.file + 1), None
        return items, None

    def _window_items(self) -> list[T]:
        """The window's items in the order they are handed out; they are read when first asked for."""
        if self._items is None:
            items, self._end = self._read(self._first if self._window == 0 else self._buffer)
            if not items and not self._before:
                names = ", ".join(store.place.name for store in self._stores[:3])
                raise HoneError(f"{names}: there is no row to train on: mend the rows that were skipped")
            order = permutation(len(items), self._seed, self._epoch, self._window + 1)
            self._items = [items[i] for i in order]
        return self._items

    def take(self, n: int) -> list[T]:
        """The next n rows; a batch may straddle windows, files and epochs."""
        taken = list[T]()
        while len(taken) < n:
            items = self._window_items()
            part = items[self._position : self._position + n - len(taken)]
            taken += part
            self._position += len(part)
            if self._position == len(items):
                self._turn(self._before + len(items))
        return taken

    def _turn(self, before: int) -> None:
        """Move to the next window, or the next epoch."""
        reader, end = self._reader, self._end
        if end is None:
            self._rows = before
            self._go(epoch=self._epoch + 1, window=0, start=StreamPosition(), before=0, position=0)
        else:
            self._go(epoch=self._epoch, window=self._window + 1, start=end, before=before, position=0)
            self._reader = reader  # goes on without opening the file again

    def _identity(self) -> dict[str, Any]:
        return {"files": list(self._prints), "seed": self._seed, "buffer": self._buffer}

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on exactly here; JSON can hold it."""
        place = [self._start.file, *self._start.cursor]
        counts = {"epoch": self._epoch, "window": self._window, "before": self._before, "position": self._position}
        return {**counts, "place": place, "rows": self._rows, **self._identity()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; refused where a file has changed, by its length and both its ends."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                what = "content" if name == "files" else name
                raise HoneError(
                    f"cannot resume: the data's {what} has changed since the run was saved: "
                    "resume with the same files and settings, or start a new run"
                )
        names = ("epoch", "window", "before", "position", "rows")
        numbers = [state.get(name) for name in names] + list(state.get("place") or ())
        whole = [x for x in numbers if type(x) is int and 0 <= x < 2**63]
        if len(whole) != len(names) + 3:
            raise HoneError("cannot resume: the state of the data is damaged: resume from another checkpoint")
        epoch, window, before, position, self._rows, file, *cursor = whole
        start = StreamPosition(file=file, cursor=(cursor[0], cursor[1]))
        self._go(epoch=epoch, window=window, start=start, before=before, position=position)
        if position and position >= len(self._window_items()):
            raise HoneError(f"cannot resume: row {position} is no place in the data: start a new run")
