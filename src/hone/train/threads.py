"""How many threads torch's operators on the host have."""

import torch


def threads(device: torch.device, *, asked: int = 0, offloaded: bool = False) -> int:
    """As many as were asked for; else torch's own number, but one where a GPU computes.

    What the host does beside a GPU is small, and 16 threads take milliseconds to wake for a few thousand numbers.
    offloaded: the optimiser steps on the host.
    """
    beside_gpu = device.type == "cuda" and not offloaded
    return asked or (1 if beside_gpu else torch.get_num_threads())
