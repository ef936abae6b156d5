"""Batches by their number of tokens instead of their number of rows, made of rows of about one length."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from hone.data.feed.source import Feed, permutation
from hone.errors import HoneError
from hone.types import Group

WINDOW = 1024  # groups that are sorted by length at a time


def area(group: Group) -> tuple[int, int]:
    """A group's longest row, and how many rows it has."""
    return max(len(r.tokens) for r in group), len(group)


def check_fits(groups: Sequence[Group], *, tokens: int) -> None:
    """HoneError where a group alone is over the budget."""
    most, rows = max(((longest * rows, rows) for longest, rows in map(area, groups)), default=(0, 0))
    if most > tokens:
        what = "a row has" if rows == 1 else f"a pair of {rows} rows takes"
        raise HoneError(f"{what} {most} tokens: raise train.tokens ({tokens}), or shorten it")


def by_length(groups: Sequence[Group], *, tokens: int) -> list[list[Group]]:
    """Cut, shortest first, where the next group would make rows x longest row exceed `tokens`."""
    check_fits(groups, tokens=tokens)
    batches, rows = list[list[Group]](), 0
    for group in sorted(groups, key=lambda g: area(g)[0]):  # stable: equal lengths keep their shuffled order
        longest, more = area(group)
        if not batches or (rows + more) * longest > tokens:
            batches.append([])
            rows = 0
        batches[-1].append(group)
        rows += more
    return batches


class TokenBatches:
    """A feed of groups in batches of at most `tokens` tokens, padding included.

    Windows of groups are taken from the feed, sorted by length and cut; the batches of a window come in an order set
    by (seed, window). Each group appears as often as the feed gives it.
    """

    def __init__(self, feed: Feed[Group], *, tokens: int, seed: int, window: int = WINDOW) -> None:
        self._feed, self._tokens, self._seed, self._size = feed, tokens, seed, window
        self._window, self._position = 0, 0  # the window's number, and groups of it given out
        self._start = dict(feed.state())  # the feed before the window
        self._batches: list[list[Group]] | None = None

    def __len__(self) -> int:
        return len(self._feed)

    def __copy__(self) -> "TokenBatches":
        twin = TokenBatches.__new__(TokenBatches)
        for name, value in vars(self).items():
            setattr(twin, name, value)
        twin._feed = copy(self._feed)
        return twin

    def progress(self) -> dict[str, float]:
        """The feed's."""
        return self._feed.progress()

    def _window_batches(self) -> list[list[Group]]:
        if self._batches is None:
            batches = by_length(self._feed.take(self._size), tokens=self._tokens)
            self._batches = [batches[i] for i in permutation(len(batches), self._seed, self._window)]
        return self._batches

    def step(self) -> list[Group]:
        """The next batch, or what is left of the present one."""
        before = 0
        for batch in self._window_batches():
            before += len(batch)
            if self._position < before:
                return self.take(before - self._position)
        raise AssertionError("a window always has a batch left")

    def take(self, n: int) -> list[Group]:
        """The next n groups, whatever the batches."""
        taken = list[Group]()
        while len(taken) < n:
            flat = [group for batch in self._window_batches() for group in batch]
            part = flat[self._position : self._position + n - len(taken)]
            taken += part
            self._position += len(part)
            if self._position == len(flat):
                self._window, self._position, self._batches = self._window + 1, 0, None
                self._start = dict(self._feed.state())
        return taken

    def _identity(self) -> dict[str, Any]:
        return {"tokens": self._tokens, "seed": self._seed, "size": self._size}

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on exactly here; JSON can hold it."""
        return {"window": self._window, "position": self._position, "feed": self._start, **self._identity()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise HoneError(
                    f"cannot resume: the batches' {name} was {state.get(name)!r} when saved and is {here!r} now: "
                    "resume with the same settings, or start a new run"
                )
        window, position = state.get("window"), state.get("position")
        if type(window) is not int or type(position) is not int or window < 0 or not 0 <= position < self._size:
            raise HoneError(
                f"cannot resume: window {window!r}, group {position!r} is no place in the data: "
                "resume from another checkpoint"
            )
        self._feed.load(state.get("feed") or {})
        self._start = dict(self._feed.state())
        self._window, self._position, self._batches = window, position, None
