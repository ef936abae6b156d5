"""Gradients of weights beside the chain of those of activations: nothing before the end of a backward pass reads them.

While a pass is recorded on a GPU they are a branch of their own in the graph, so that products fill the multiprocessors
that a norm, a gate or the end of another product leaves idle. Elsewhere they are computed in place.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
BEHIND = 2  # products that may lag; more would keep more activations alive


class Branch:
    """Work on a stream of its own, and what it still reads."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.held = deque[tuple[torch.cuda.Event, Sequence[Tensor]]]()

    def run(self, work: Callable[[], T], reads: Sequence[Tensor]) -> T:
        main, done = torch.cuda.current_stream(), torch.cuda.Event()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            found = work()
            done.record()
        self.held.append((done, reads))
        if len(self.held) > BEHIND:
            main.wait_event(self.held.popleft()[0])
        return found

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()


_branch: Branch | None = None  # recordings are made one at a time


@contextmanager
def branched(on: bool) -> Iterator[None]:
    """Inside, `beside` works on a branch, which has ended afterwards."""
    global _branch
    if not on:
        yield
        return
    branch = _branch = Branch()
    try:
        yield
        branch.join()
    finally:
        _branch = None


def beside(work: Callable[[], T], *reads: Tensor) -> T:
    """What the work gives, to be read when the branch has ended; reads: all it reads."""
    return work() if _branch is None else _branch.run(work, reads)
