"""Endless, resumable orders over rows, the same with every version of numpy; and all rows of a dataset file."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hone.data.feed.files import File
from hone.errors import HoneError

T = TypeVar("T")


class Feed(Protocol[T]):
    """An endless, resumable order over rows: from memory, from files, or mixed of several."""

    def __len__(self) -> int: ...

    def take(self, n: int) -> list[T]: ...

    def progress(self) -> dict[str, float]: ...

    def state(self) -> Mapping[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a dataset file, all of them; a bad one is an error that names its line."""
    file = File(path=Path(path))
    rows = list[dict[str, Any]]()
    for read in file.read():
        if read.problem:
            raise HoneError(f"{file.name} {file.unit} {read.number} {read.problem}")
        rows.append(read.row)
    if not rows:
        raise HoneError(f"{path} is empty: it needs at least one row")
    return rows


class Source(Generic[T]):
    """Endless epochs over rows: each epoch a fresh permutation of all of them, set by (seed, epoch) alone.

    `repr(row)` must show the row's content: it identifies the dataset when a run is resumed.
    """

    def __init__(self, rows: Sequence[T], *, seed: int) -> None:
        if not rows:
            raise ValueError("the dataset has no rows")
        self._rows, self._seed = rows, seed
        self._epoch = self._position = 0
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        """The order of the present epoch."""
        return permutation(len(self._rows), self._seed, self._epoch)

    @property
    def epoch(self) -> float:
        """Epochs taken so far, with the fraction of the present one."""
        return self._epoch + self._position / len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def progress(self) -> dict[str, float]:
        """Nothing: what the log says of one dataset follows from its steps."""
        return {}

    def take(self, n: int) -> list[T]:
        """The next n rows; a batch may straddle epochs."""
        if n < 0:
            raise ValueError(f"cannot take {n} rows")
        taken = list[T]()
        while len(taken) < n:
            if self._position == len(self._rows):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            index = self._order[self._position : self._position + n - len(taken)]
            taken += [self._rows[i] for i in index]
            self._position += len(index)
        return taken

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the rows' content in order, each with its length so that no two lists look alike."""
        digest = hashlib.sha256()
        for row in self._rows:
            data = repr(row).encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self._rows), "seed": self._seed, "fingerprint": self.fingerprint}

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on exactly here; JSON can hold it."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; refused for another dataset or seed."""
        for name, here in self._identity().items():
            saved = state.get(name)
            if saved != here or type(saved) is not type(here):
                raise HoneError(
                    f"cannot resume: the data's {name} was {saved!r} when saved and is {here!r} now: "
                    "resume with the same dataset and seed, or start a new run"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if (
            type(epoch) is not int
            or type(position) is not int
            or not (0 <= epoch < 2**63 and 0 <= position <= len(self))
        ):
            raise HoneError(
                f"cannot resume: epoch {epoch!r}, row {position!r} is no place in {len(self)} rows: "
                "resume from another checkpoint"
            )
        self._epoch, self._position = epoch, position
        self._order = self._permutation()


def bits(n: int, *key: int) -> np.ndarray:
    """n random 64-bit numbers of a key; numpy promises raw bits for every version, but not its permutations."""
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)


def permutation(n: int, *key: int) -> list[int]:
    """0..n-1 in the order of the key's random bits.

    >>> sorted(permutation(5, 1, 2)) == [0, 1, 2, 3, 4]
    True
    """
    return np.argsort(bits(n, *key), kind="stable").tolist()
