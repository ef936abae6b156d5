"""What goes into the engine, what each request has written, and what comes out.

Nobody changes a Request or a RequestOutput. They are not frozen, because frozen dataclasses take twice as long to make,
and a thousand requests begin and end at once. The Record keeps what was written in arrays with a line for each request:
a launch is added in a few operations, whatever the number of rows.
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

WIDTH = 64  # tokens that a line of the record holds at first
NO_LINE = 0  # a line that is never open


@dataclass(slots=True, kw_only=True)
class Request:
    """One completion to write. Its tokens depend on params, random_id and prompt, not on the rest of the batch."""

    id: int  # unique among those in the engine
    prompt: tuple[int, ...]
    params: SampleParams
    adapter: str | None = None
    stream: bool = False  # report tokens as they are written, not only at the end
    every: int = 1  # a stream reports so many tokens at a time
    random_id: int | None = None  # it draws the random numbers of (params.seed, random_id); None: the id
    keep: bool = False  # index the completion too, for a later prompt that begins with prompt and completion


@dataclass(slots=True, eq=False)
class TopLogprobs:
    """The k most probable tokens at each of T positions, in arrays: as Python objects they would be too many."""

    token: NDArray[np.int64]  # [T, k]
    raw: NDArray[np.float64]  # [T, k]

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, i: int) -> list[tuple[int, float]]:
        return list(zip(self.token[i].tolist(), self.raw[i].tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopLogprobs):
            return NotImplemented
        return np.array_equal(self.token, other.token) and np.array_equal(self.raw, other.raw)


NO_TOP_LOGPROBS = TopLogprobs(np.empty((0, 0), dtype=np.int64), np.empty((0, 0)))


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """Tokens that a request wrote since its last output. `stop` says why it ended; None: it goes on.

    Without `stream` a request has one output, with all its tokens. With stop strings it reports a token once no stop
    string can begin in it, and never the tokens after the one that completed the stop string.
    Numbers are in arrays: as Python objects they would take longer to make than a step of a small model.
    """

    id: int
    tokens: "array[int]"
    logp: "array[float]"  # under the distribution that the token was drawn from
    raw: "array[float]"  # under softmax(logits)
    top: TopLogprobs = field(default_factory=lambda: NO_TOP_LOGPROBS)  # as many a token as params.top_logprobs
    support_size: "array[int]" = field(default_factory=lambda: array("i"))  # as in types.Rollout, if asked for
    support: "array[int]" = field(default_factory=lambda: array("i"))
    stop: Stop | None = None
    text: str = ""  # at the end of a request with stop strings: the completion before the stop string


class Record:
    """What active requests have written, a line for each.

    A closed line is used again once every launch that had begun before is read. The arrays are flat: the entries of
    line i begin at i * width.
    """

    def __init__(self, lines: int) -> None:
        self.width, self.lines = WIDTH, lines + 1
        self.token, self.logp, self.raw = self._blank()
        self.end = np.arange(self.lines) * WIDTH  # where each line's next token goes
        self.is_open = np.zeros(self.lines, dtype=np.bool_)
        # only of lines whose requests asked for it
        self.top: dict[int, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        self.support: dict[int, list[NDArray[np.int32]]] = {}
        self._free = list(range(1, self.lines))[::-1]
        self._closed: deque[tuple[int, int]] = deque()

    def open(self, limit: int, *, top: bool = False, support: bool = False) -> int:
        """Give a line to a request that writes at most `limit` tokens."""
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
        """Add nothing more to these lines. Launches up to this one may still have entries for them."""
        self.is_open[lines] = False
        for line in lines if self.top else ():
            self.top.pop(line, None)
        for line in lines if self.support else ():
            self.support.pop(line, None)
        self._closed += [(launch, line) for line in lines]

    def recycle(self, read: int) -> None:
        """Free the lines closed before the first `read` launches were read."""
        while self._closed and self._closed[0][0] <= read:
            self._free.append(self._closed.popleft()[1])

    def add(self, lines: NDArray[np.int64], written: LaunchResult) -> None:
        """Add the n entries of a launch. Their lines are open, and all different."""
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
        """How many tokens the line has."""
        return int(self.end[line]) - line * self.width

    def read(self, line: int, first: int, last: int) -> "tuple[array[int], array[float], array[float]]":
        """Tokens, log-probs and raw log-probs from `first` to `last`."""
        begin, end = 8 * (line * self.width + first), 8 * (line * self.width + last)
        token, logp, raw = array("q"), array("d"), array("d")
        tokens, logps, raws = self._bytes
        token.frombytes(tokens[begin:end])
        logp.frombytes(logps[begin:end])
        raw.frombytes(raws[begin:end])
        return token, logp, raw

    def most_probable(self, line: int, first: int, last: int, k: int) -> TopLogprobs:
        """The k most probable tokens at each position from `first` to `last`."""
        found = self.top.get(line, [])[first:last]
        if not found:
            return NO_TOP_LOGPROBS
        return TopLogprobs(np.stack([token[:k] for token, _ in found]), np.stack([raw[:k] for _, raw in found]))

    def support_of(self, line: int, first: int, last: int) -> "tuple[array[int], array[int]]":
        """How many tokens could have been drawn at each position from `first` to `last`, and their ids end to end."""
        found = self.support.get(line, [])[first:last]
        ids = array("i")
        for each in found:
            ids.frombytes(each.tobytes())
        return array("i", map(len, found)), ids

    def _blank(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Zeros. A page of them takes memory once it is written."""
        size = self.lines * self.width
        arrays = np.zeros(size, dtype=np.int64), np.zeros(size), np.zeros(size)
        self._bytes = [x.data.cast("B") for x in arrays]
        return arrays

    def _grow(self, lines: int, width: int) -> None:
        """Make more lines, longer ones, or both, and copy what was written."""
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
