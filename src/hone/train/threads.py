"""Threads for torch's operators, and no garbage collection of old objects in the middle of a step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def threads(device: torch.device, *, asked: int = 0, offloaded: bool = False) -> int:
    """The number of threads that was asked for, else torch's own number, but one beside a GPU.

    The host has little work beside a GPU, and waking 16 threads for a few thousand numbers takes milliseconds.
    offloaded: the optimiser steps on the host.
    """
    beside_gpu = device.type == "cuda" and not offloaded
    return asked or (1 if beside_gpu else torch.get_num_threads())


@contextmanager
def freeze_objects() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collection.

    To scan half a million of them takes a fifth of a second in the middle of a step. Before that the young ones are
    collected, or all if garbage may hold a GPU's memory.
    """
    gc.collect(2 if torch.cuda.is_initialized() else 1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
