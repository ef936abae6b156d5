"""What each request has written, in arrays with a line a request: a launch is added in a few operations, whatever the
number of rows."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.rollout.runner import Written

WIDTH = 64  # tokens a line has room for at first


class Record:
    """Lines that are opened, added to and closed. A closed one is used again when no launch begun before is unread."""

    def __init__(self, lines: int) -> None:
        self.token = np.zeros((lines, WIDTH), dtype=np.int64)
        self.logp = np.zeros((lines, WIDTH))
        self.raw = np.zeros((lines, WIDTH))
        self.count = np.zeros(lines, dtype=np.int64)
        self.is_open = np.zeros(lines, dtype=np.bool_)
        self.top: dict[int, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}  # of lines that asked for it
        self._free = list(range(lines))[::-1]
        self._closed: deque[tuple[int, int]] = deque()

    def open(self, *, top: bool = False) -> int:
        """A line for a request."""
        if not self._free:
            self._free = list(range(len(self.count), 2 * len(self.count)))[::-1]
            self.token, self.logp, self.raw = (_grown(x, axis=0) for x in (self.token, self.logp, self.raw))
            self.count, self.is_open = _grown(self.count, axis=0), _grown(self.is_open, axis=0)
        line = self._free.pop()
        self.count[line], self.is_open[line] = 0, True
        if top:
            self.top[line] = []
        return line

    def close(self, line: int, launch: int) -> None:
        """Nothing more is added; launches up to this one may still speak of it."""
        self.is_open[line] = False
        self.top.pop(line, None)
        self._closed.append((launch, line))

    def recycle(self, read: int) -> None:
        """So many launches were read."""
        while self._closed and self._closed[0][0] <= read:
            self._free.append(self._closed.popleft()[1])

    def add(self, lines: NDArray[np.int64], written: Written) -> None:
        """The n entries of a launch, whose lines are open and no two the same."""
        at = self.count[lines]
        if len(at) and at.max() >= self.token.shape[1]:
            self.token, self.logp, self.raw = (_grown(x, axis=1) for x in (self.token, self.logp, self.raw))
        self.token[lines, at] = written.token
        self.logp[lines, at] = written.logp
        self.raw[lines, at] = written.raw
        self.count[lines] = at + 1
        if self.top and written.top_token is not None and written.top_logp is not None:
            for line, token, logp in zip(lines.tolist(), written.top_token, written.top_logp, strict=True):
                if line in self.top:
                    self.top[line].append((token, logp))

    def since(self, line: int, first: int, last: int) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """Tokens, log-probs and raw log-probs from `first` on."""
        return (
            tuple(self.token[line, first:last].tolist()),
            tuple(self.logp[line, first:last].tolist()),
            tuple(self.raw[line, first:last].tolist()),
        )

    def most_probable(self, line: int, first: int, last: int, k: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Of each token from `first` on the k most probable in its stead."""
        return tuple(
            tuple(zip(token[:k].tolist(), logp[:k].tolist(), strict=True))
            for token, logp in self.top.get(line, [])[first:last]
        )


def _grown(x: NDArray[Any], *, axis: int) -> NDArray[Any]:
    """Twice as long."""
    return np.concatenate([x, np.zeros_like(x)], axis=axis)
