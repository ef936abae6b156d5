"""Statistics as sums and counts, so that no cut into micro-batches or ranks can change a mean; and seconds by stage.

Tensors stay on their device until `means` or `plain` is asked for: adding never waits for an accelerator.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor


class Stats:
    """Named sums with their counts, and named maxima. Merging two gives the same as adding everything to one."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._maxima: dict[str, Number] = {}

    def add(self, name: str, total: Number, count: Number = 1) -> None:
        """Adds `total`, the sum of `count` numbers, to the mean called `name`."""
        if name in self._maxima:
            raise ValueError(f"{name} is a maximum, it cannot also be a mean")
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + _detached(total), old_count + _detached(count))

    def add_all(self, **sums: tuple[Number, Number]) -> None:
        """Adds several means at once, each as (total, count)."""
        for name, (total, count) in sums.items():
            self.add(name, total, count)

    def peak(self, name: str, value: Number) -> None:
        """Keeps the largest value seen; NaN stays NaN."""
        if name in self._sums:
            raise ValueError(f"{name} is a mean, it cannot also be a maximum")
        new = _detached(value)
        self._maxima[name] = _larger(self._maxima[name], new) if name in self._maxima else new

    def merge(self, other: "Stats") -> None:
        """Adds everything of `other` to this one."""
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)
        for name, value in other._maxima.items():
            self.peak(name, value)

    def means(self) -> dict[str, float]:
        """sum / count of each name, and the maxima; a name with count 0 is absent, never NaN."""
        plain = self.plain()
        means = {name: total / count for name, (total, count) in plain["sums"].items() if count != 0}
        return means | plain["maxima"]

    def plain(self) -> dict[str, Any]:
        """The sums and maxima as Python floats, to send to another rank; `Stats.of` reads them back."""
        numbers = [x for pair in self._sums.values() for x in pair] + list(self._maxima.values())
        floats = iter(_floats(numbers))
        sums = {name: (next(floats), next(floats)) for name in self._sums}
        return {"sums": sums, "maxima": {name: next(floats) for name in self._maxima}}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Stats":
        """The inverse of `plain`."""
        stats = cls()
        for name, (total, count) in plain["sums"].items():
            stats.add(name, total, count)
        for name, value in plain["maxima"].items():
            stats.peak(name, value)
        return stats

    def over_ranks(self, gather: Callable[[object], list[Any]]) -> "Stats":
        """The statistics of all ranks, which may hold different names; gather: gives every rank's plain object."""
        whole = Stats()
        for plain in gather(self.plain()):
            whole.merge(Stats.of(plain))
        return whole


def _detached(x: Number) -> Number:
    """A copy without a graph, wide enough that many small sums do not lose digits."""
    if not isinstance(x, Tensor):
        return float(x)
    if x.numel() != 1:
        raise ValueError(f"a statistic is one number, got shape {tuple(x.shape)}: sum it first")
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    return x.detach().reshape(()).to(wide, copy=True)


def _larger(a: Number, b: Number) -> Number:
    if isinstance(a, Tensor):
        return torch.maximum(a, torch.as_tensor(b).to(a))
    if isinstance(b, Tensor):
        return _larger(b, a)
    return b if b > a or b != b else a


def _floats(numbers: list[Number]) -> list[float]:
    """All numbers as floats, with one transfer for each device they live on."""
    floats = [0.0] * len(numbers)
    tensors: dict[torch.device, list[int]] = {}
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):
            tensors.setdefault(x.device, []).append(i)
        else:
            floats[i] = x
    for places in tensors.values():
        for i, value in zip(places, torch.stack([torch.as_tensor(numbers[i]) for i in places]).tolist(), strict=True):
            floats[i] = value
    return floats


# --- where the time goes ---


class StageTimer:
    """Seconds of each stage, read at its end. A GPU's work counts in the stage that waits for its result."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds = dict[str, float]()

    def __call__(self, stage: str, *, at: float | None = None) -> None:
        """End a stage: it took the time since the last call. at: when it ended, if not now."""
        now = time.perf_counter() if at is None else max(at, self._last)
        self.add(stage, now - self._last)
        self._last = now

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that passed in parallel to the stages."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def total(self) -> float:
        """Seconds since the timer was made."""
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """seconds_<stage> for every stage so far."""
        return {f"seconds_{stage}": seconds for stage, seconds in self.seconds.items()}
