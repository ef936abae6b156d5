"""The stopwatch of every comparison: each side does the same work, as often, after the same warm-up, in turns."""

import statistics
import time
from collections.abc import Callable, Mapping


def nothing() -> None:
    """A side that has ended its work when it returns."""


def in_turns(
    sides: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warm: int = 1,
    settle: Callable[[], object] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each side's call.

    warm: turns of the whole work that do not count. settle: waits until a device has done what it was given.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm + repeats):
        for name, call in sides.items():
            settle()
            start = clock()
            call()
            settle()
            if turn >= warm:
                seconds[name].append(clock() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}
