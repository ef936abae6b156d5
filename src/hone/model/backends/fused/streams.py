"""Passes without gradients side by side: what waits for memory in one runs beside the products of another.

On a GPU each lane is a queue of its own. What is recorded of a pass (model/backends/fused/cuda_graphs.py) belongs to a lane, for two
recordings that share memory cannot run at the same time.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LANES = 2  # a third found nothing left to fill
_lane = ContextVar("lane", default=0)


def lane() -> int:
    """The number of the lane that this thread computes in; 0: in none."""
    return _lane.get()


def side_by_side(
    calls: Iterable[Callable[[], T]], device: torch.device, tensors: Callable[[T], Iterable[Tensor]]
) -> list[T]:
    """What the calls give, in their order; tensors: those of a result, which the caller's queue goes on to read."""
    found = list[T]()
    try:
        for i, call in enumerate(calls):
            found.append(_in_lane(call, device, i % LANES, tensors))
    finally:  # also where one failed: what the others read must not be given away before they have
        for i in range(LANES if device.type == "cuda" else 0):
            torch.cuda.current_stream(device).wait_stream(_stream(device, i))
    return found


def _in_lane(call: Callable[[], T], device: torch.device, number: int, tensors: Callable[[T], Iterable[Tensor]]) -> T:
    before = _lane.set(1 + number)
    try:
        return call() if device.type != "cuda" else _queued(call, device, number, tensors)
    finally:
        _lane.reset(before)


def _queued(call: Callable[[], T], device: torch.device, number: int, tensors: Callable[[T], Iterable[Tensor]]) -> T:
    main, stream = torch.cuda.current_stream(device), _stream(device, number)
    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        result = call()
    for x in tensors(result):
        x.record_stream(main)  # or its memory would be given away when the lane is done with it
    return result


@cache
def _stream(device: torch.device, number: int) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)
