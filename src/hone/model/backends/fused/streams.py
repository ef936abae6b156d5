"""Passes without gradients on two CUDA streams: while one waits for memory, the other computes products.

A recorded pass (cuda_graphs.py) belongs to one stream: two recordings that share memory cannot run at the same time.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from hone.model.layout import Streams

T = TypeVar("T")
STREAMS = 2  # a third one made nothing faster
_number = ContextVar("stream", default=0)


def stream_number() -> int:
    """The number of the stream that this thread computes on; 0: the device's current one."""
    return _number.get()


class CudaStreams(Streams):
    """Two streams on a GPU."""

    name = "fused"

    def covers(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"no streams on {device}"

    def run(
        self, passes: Iterable[Callable[[], T]], device: torch.device, tensors: Callable[[T], Iterable[Tensor]]
    ) -> list[T]:
        return run_on_streams(passes, device, tensors)


def run_on_streams(
    passes: Iterable[Callable[[], T]], device: torch.device, tensors: Callable[[T], Iterable[Tensor]]
) -> list[T]:
    """The results of the passes, in their order; tensors: those of a result, which the caller's stream reads later."""
    found = list[T]()
    try:
        for i, one in enumerate(passes):
            found.append(_run_numbered(one, device, i % STREAMS, tensors))
    finally:  # also after a failure: memory that the others read must not be freed before
        for i in range(STREAMS if device.type == "cuda" else 0):
            torch.cuda.current_stream(device).wait_stream(_stream(device, i))
    return found


def _run_numbered(
    one: Callable[[], T], device: torch.device, number: int, tensors: Callable[[T], Iterable[Tensor]]
) -> T:
    before = _number.set(1 + number)
    try:
        return one() if device.type != "cuda" else _on_stream(one, device, number, tensors)
    finally:
        _number.reset(before)


def _on_stream(one: Callable[[], T], device: torch.device, number: int, tensors: Callable[[T], Iterable[Tensor]]) -> T:
    main, stream = torch.cuda.current_stream(device), _stream(device, number)
    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        result = one()
    for x in tensors(result):
        x.record_stream(main)  # or its memory would be free as soon as the stream is done with it
    return result


@cache
def _stream(device: torch.device, number: int) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)
