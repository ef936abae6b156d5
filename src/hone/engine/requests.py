"""What goes into the engine, what each request has written, and what comes out.

Neither a Request nor News is changed once it is made; frozen dataclasses would take twice as long to make, and a
thousand requests begin and end at once. What was written is in arrays with a line a request: a launch is added in a few
operations, whatever the number of rows.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone.engine.params import SampleParams
from hone.engine.runner import LaunchResult
from hone.types import Stop

WIDTH = 64  # tokens a line of the record holds at first
NOBODY = 0  # a line that is never open


@dataclass(slots=True, kw_only=True)
class Request:
    """One completion to write. Its tokens depend on (params.seed, noise, prompt), not on what else is in the batch."""

    id: int  # unique among those in the engine
    prompt: tuple[int, ...]
    params: SampleParams
    adapter: str | None = None
    stream: bool = False  # report tokens as they come, not only the end
    every: int = 1  # so many of a stream's tokens at a time
    noise: int | None = None  # with the seed, names the stream of random numbers; None: the id
    keep: bool = False  # a later prompt may begin with prompt and completion: keep both in memory while there is room


@dataclass(slots=True, eq=False)
class Tops:
    """At each of T places the k most probable tokens. A thousand places with 20 each are too many Python objects."""

    token: NDArray[np.int64]  # [T, k]
    raw: NDArray[np.float64]  # [T, k]

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, i: int) -> list[tuple[int, float]]:
        return list(zip(self.token[i].tolist(), self.raw[i].tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tops):
            return NotImplemented
        return np.array_equal(self.token, other.token) and np.array_equal(self.raw, other.raw)


NO_TOPS = Tops(np.empty((0, 0), dtype=np.int64), np.empty((0, 0)))


@dataclass(slots=True, kw_only=True)
class News:
    """Tokens a request wrote since the last news of it; `stop` says why it ended, None while it goes on.

    Without `stream` there is one News a request, with everything. A request with stop strings reports a token only
    once no stop string can begin in it; tokens after the one that completed the stop string are never reported.
    Numbers are in arrays: as Python objects they would take longer to make than a step of a small model.
    """

    id: int
    tokens: "array[int]"
    logp: "array[float]"  # under the distribution drawn from
    raw: "array[float]"  # under softmax(logits)
    top: Tops = field(default_factory=lambda: NO_TOPS)  # per token the params.top_logprobs most probable (token, raw)
    support_size: "array[int]" = field(default_factory=lambda: array("i"))  # as in types.Rollout, if asked for
    support: "array[int]" = field(default_factory=lambda: array("i"))
    stop: Stop | None = None
    text: str = ""  # set at the end when stop strings were given: the completion before the stop string


class Record:
    """Lines that are opened, added to and closed. A closed one is used again when no launch begun before is unread.

    The arrays are flat: line i has the entries from i * width on.
    """

    def __init__(self, lines: int) -> None:
        self.width, self.lines = WIDTH, lines + 1
        self.token, self.logp, self.raw = self._blank()
        self.end = np.arange(self.lines) * WIDTH  # where each line's next token goes
        self.is_open = np.zeros(self.lines, dtype=np.bool_)
        self.top: dict[int, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}  # of lines that asked for it
        self.support: dict[int, list[NDArray[np.int32]]] = {}  # likewise
        self._free = list(range(1, self.lines))[::-1]
        self._closed: deque[tuple[int, int]] = deque()

    def open(self, limit: int, *, top: bool = False, support: bool = False) -> int:
        """A line for a request that writes at most `limit` tokens."""
        if limit > self.width or not self._free:
            self._grow(self.lines if self._free else 2 * self.lines, max(self.width, 1 << (limit - 1).bit_length()))
        line = self._free.pop()
        self.end[line], self.is_open[line] = line * self.width, True
        if top:
            self.top[line] = []
        if support:
            self.support[line] = []
        return line

    def close(self, lines: Sequence[int], launch: int) -> None:
        """Nothing more is added; launches up to this one may still speak of them."""
        self.is_open[lines] = False
        for line in lines if self.top else ():
            self.top.pop(line, None)
        for line in lines if self.support else ():
            self.support.pop(line, None)
        self._closed += [(launch, line) for line in lines]

    def recycle(self, read: int) -> None:
        """Free what the launches used that have been read; read: how many those are."""
        while self._closed and self._closed[0][0] <= read:
            self._free.append(self._closed.popleft()[1])

    def add(self, lines: NDArray[np.int64], written: LaunchResult) -> None:
        """The n entries of a launch, whose lines are open and no two the same."""
        at = self.end[lines]
        self.token[at] = written.token
        self.logp[at] = written.logp
        self.raw[at] = written.raw
        self.end[lines] = at + 1
        if self.top and written.top_token is not None and written.top_logp is not None:
            for line, token, logp in zip(lines.tolist(), written.top_token, written.top_logp, strict=True):
                if line in self.top:
                    self.top[line].append((token, logp))
        if self.support and written.support is not None:
            for line, ids in zip(lines.tolist(), written.support, strict=True):
                if line in self.support:
                    self.support[line].append(ids)

    def count(self, line: int) -> int:
        """Tokens in it."""
        return int(self.end[line]) - line * self.width

    def since(self, line: int, first: int, last: int) -> "tuple[array[int], array[float], array[float]]":
        """Tokens, log-probs and raw log-probs from `first` on."""
        begin, end = 8 * (line * self.width + first), 8 * (line * self.width + last)
        token, logp, raw = array("q"), array("d"), array("d")
        tokens, logps, raws = self._bytes
        token.frombytes(tokens[begin:end])
        logp.frombytes(logps[begin:end])
        raw.frombytes(raws[begin:end])
        return token, logp, raw

    def most_probable(self, line: int, first: int, last: int, k: int) -> Tops:
        """For each token from `first` on, the k most probable tokens at its place."""
        found = self.top.get(line, [])[first:last]
        if not found:
            return NO_TOPS
        return Tops(np.stack([token[:k] for token, _ in found]), np.stack([raw[:k] for _, raw in found]))

    def could_draw(self, line: int, first: int, last: int) -> "tuple[array[int], array[int]]":
        """From `first` on how many tokens could have been drawn in each one's stead, and their ids end to end."""
        found = self.support.get(line, [])[first:last]
        ids = array("i")
        for each in found:
            ids.frombytes(each.tobytes())
        return array("i", map(len, found)), ids

    def _blank(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Zeros, whose pages take memory only once they are written."""
        size = self.lines * self.width
        made = np.zeros(size, dtype=np.int64), np.zeros(size), np.zeros(size)
        self._bytes = [x.data.cast("B") for x in made]
        return made

    def _grow(self, lines: int, width: int) -> None:
        """More lines, longer ones, or both; what was written stays."""
        before, old, narrow = self.lines, (self.token, self.logp, self.raw), self.width
        count = self.end - np.arange(before) * narrow
        self.lines, self.width = lines, width
        self.token, self.logp, self.raw = self._blank()
        for x, y in zip(old, (self.token, self.logp, self.raw), strict=True):
            for line in np.flatnonzero(self.is_open).tolist():
                y[line * width : line * width + count[line]] = x[line * narrow : line * narrow + count[line]]
        self.end = np.arange(lines) * width
        self.end[:before] += count
        self.is_open = np.concatenate([self.is_open, np.zeros(lines - before, dtype=np.bool_)])
        self._free += range(before, lines)[::-1]
