"""Several feeds as one, in fixed proportions."""

from collections.abc import Mapping, Sequence
from copy import copy
from fractions import Fraction
from typing import Any, Generic, TypeVar

from hone.data.source import Feed
from hone.errors import HoneError

T = TypeVar("T")


def next_part(shares: Sequence[Fraction], taken: Sequence[int]) -> int:
    """Whose turn it is: of the parts that are owed a row, the one that must have it soonest.

    Tijdeman's rule for the chairman assignment problem: after any number n of rows, part i has given n * share_i
    rows to within 1 - 1 / (2 k - 2) of a row, for k parts.
    """
    if len(shares) == 1:
        return 0
    n, least = sum(taken) + 1, Fraction(1, 2 * len(shares) - 2)
    owed = [n * share - t for share, t in zip(shares, taken, strict=True)]
    waits = [((1 - least - o) / share, i) for i, (o, share) in enumerate(zip(owed, shares, strict=True)) if o >= least]
    return min(waits)[1]


class Mixed(Generic[T]):
    """Rows of several feeds by weight. No draw is random, so the proportions hold at every row, and exactly."""

    def __init__(self, parts: Mapping[str, Feed[T]], weights: Sequence[float]) -> None:
        if len(parts) != len(weights) or not parts:
            raise ValueError(f"{len(parts)} parts but {len(weights)} weights")
        exact = [Fraction(str(w)) for w in weights]
        if wrong := [w for w in weights if not w > 0]:
            raise HoneError(f"a weight of {wrong[0]}: every part of a mix needs a weight above 0")
        self._names, self._parts = list(parts), list(parts.values())
        self._shares = [w / sum(exact) for w in exact]
        self._taken = [0] * len(exact)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __copy__(self) -> "Mixed[T]":
        twin = Mixed.__new__(Mixed)
        twin._names, twin._shares = self._names, self._shares
        twin._parts, twin._taken = [copy(part) for part in self._parts], list(self._taken)
        return twin

    @property
    def epoch(self) -> float:
        """Of the part that is furthest behind."""
        return min(part.epoch for part in self._parts)

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
