"""Memory that a pass takes over from the one before it: a page that is touched for the first time has to be cleared."""

import ctypes

import numpy as np
import torch

KEPT = 5  # pieces that wait for the next pass: what backward passes read, weights in panels, words, parts of gradients
SPARE = 8  # one part in so many is room for a pass of a few more tokens


class Room:
    """Numbers of no value yet, until nobody refers to it."""

    _free: list[np.ndarray] = []  # noqa: RUF012  those of all passes, the last given back at the end

    def __init__(self, numbers: int, dtype: torch.dtype) -> None:
        size = numbers * dtype.itemsize
        fits = [i for i, memory in enumerate(self._free) if size <= memory.nbytes <= 2 * size]
        best = min(fits, key=lambda i: self._free[i].nbytes, default=None)
        self._memory = np.empty(size + size // SPARE, dtype=np.uint8) if best is None else self._free.pop(best)

    @property
    def place(self) -> ctypes.c_void_p:
        """Where it begins."""
        return ctypes.c_void_p(self._memory.ctypes.data)

    def __del__(self) -> None:
        self._free.append(self._memory)
        del self._free[:-KEPT]
