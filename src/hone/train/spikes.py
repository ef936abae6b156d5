"""Losses that leap: told by how far one lies above the median of those before it, in units of their usual deviation."""

import math
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any, cast

from hone.errors import HoneError

WINDOW, LEAST = 50, 10  # losses that are remembered, and that are needed to judge another


class Spikes:
    """Remembers the losses that were as usual, and where the run went back to.

    factor: how many usual deviations above the median a spike lies.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._usual: list[float] = []
        self.tried: list[str] = []  # checkpoints it went back to: one may have been saved when harm was done already

    def saw(self, loss: float) -> bool:
        """Whether the loss leaps; one that does is not remembered.

        >>> spikes, usual = Spikes(8.0), (2.0, 2.1, 1.9, 2.0, 2.2, 1.8, 2.1, 1.9, 2.0, 2.1)
        >>> [spikes.saw(x) for x in (*usual, 2.4, 9.0, 2.0, math.nan)][len(usual) :]
        [False, True, False, True]
        """
        if len(self._usual) >= LEAST:
            middle = median(self._usual)
            # 1.4826 makes the median deviation of a normal distribution its standard deviation
            deviation = max(1.4826 * median(abs(x - middle) for x in self._usual), 0.01 * abs(middle), 1e-8)
            if not loss - middle <= self.factor * deviation:
                return True
        if math.isfinite(loss):
            self._usual = [*self._usual, loss][-WINDOW:]
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"usual": self._usual, "tried": self.tried}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        usual, tried = (state.get(name) if isinstance(state, Mapping) else None for name in ("usual", "tried"))
        numbers = isinstance(usual, list) and all(
            type(x) in (int, float) and abs(x) <= sys.float_info.max for x in usual
        )
        if not numbers or not isinstance(tried, list) or not all(isinstance(name, str) for name in tried):
            raise HoneError("cannot resume: the losses so far are damaged: resume from another checkpoint")
        self._usual, self.tried = list(cast(list[float], usual)), list(tried)
