"""A piece of GPU work recorded as a CUDA graph, to be replayed on what its inputs hold by then.

It has run once before, so that every kernel is compiled. Other threads may use the GPU meanwhile, but not record.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

RECORDING = threading.Lock()  # whoever records first waits for the GPU, which is an error while another records
Results = Sequence[Tensor] | None


class Recording:
    """`replay` runs the work again and gives its results, which stand where they stood before."""

    def __init__(self, run: Callable[[], Results], pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with RECORDING, own_workspace():
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.out = run()

    def replay(self) -> Results:
        self.graph.replay()
        return self.out


@contextmanager
def own_workspace() -> Iterator[None]:
    """cuBLAS takes its scratch memory from the graph's own pool, and forgets it afterwards.

    It would go on using memory of an earlier graph, which other code may free: `torch.compile` does so when it records.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Rehearsal(Recording):
    """The same interface where there is nothing to record with."""

    def __init__(self, run: Callable[[], Results], out: Results) -> None:
        self.run, self.out = run, out

    def replay(self) -> Results:
        for old, new in zip(self.out or (), self.run() or (), strict=True):
            old.copy_(new)
        return self.out


def recorded(run: Callable[[], Results], out: Results, pool: Any) -> Recording:
    """pool: the memory it may use, None on a CPU; out: tensors like its results"""
    return Recording(run, pool) if pool is not None else Rehearsal(run, out)
