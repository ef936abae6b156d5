"""GPU work that is recorded as a CUDA graph. A replay runs it on the present content of its inputs.

The work must have run once before, so that every kernel is compiled. Other threads may use the GPU during a recording,
but cannot record.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

RECORDING = threading.Lock()  # a recording begins with a wait for the GPU, which fails while another thread records
Results = Sequence[Tensor] | None


class Recording:
    """`replay` runs the work again and returns its results, always in the same memory."""

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
    """Inside, cuBLAS takes its workspace from the graph's own pool.

    Otherwise it would use that of an earlier graph, which other code may free, as `torch.compile` does when it records.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class EagerReplay(Recording):
    """The same interface without a graph, for a CPU: each replay runs the work."""

    def __init__(self, run: Callable[[], Results], out: Results) -> None:
        self.run, self.out = run, out

    def replay(self) -> Results:
        for old, new in zip(self.out or (), self.run() or (), strict=True):
            old.copy_(new)
        return self.out


def record(run: Callable[[], Results], out: Results, pool: Any) -> Recording:
    """pool: the memory it may use, None on a CPU; out: tensors like its results"""
    return Recording(run, pool) if pool is not None else EagerReplay(run, out)
