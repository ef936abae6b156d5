"""What the host gives to a run: threads for torch's operators, and no pause for a look at all its objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def threads(device: torch.device, *, asked: int = 0, offloaded: bool = False) -> int:
    """The number of threads that was asked for. Otherwise torch's own number, but one beside a GPU.

    What the host does beside a GPU is small, and 16 threads take milliseconds to wake for a few thousand numbers.
    offloaded: the optimiser steps on the host.
    """
    beside_gpu = device.type == "cuda" and not offloaded
    return asked or (1 if beside_gpu else torch.get_num_threads())


@contextmanager
def freeze_objects() -> Iterator[None]:
    """What exists now is left out of garbage collection: a look at half a million objects takes a fifth of a second,
    and comes in the middle of a step.

    The young ones are looked at before; all of them where garbage may hold a GPU's memory.
    """
    gc.collect(2 if torch.cuda.is_initialized() else 1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
