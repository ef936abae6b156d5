"""Where an iteration's time goes: seconds by stage."""

import time


class Laps:
    """A watch that is read at the end of each stage. A GPU's work counts where its result is waited for."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._seconds = dict[str, float]()

    def __call__(self, stage: str) -> None:
        """The time since the stage before this one is this one's."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the watch was started."""
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """seconds_<stage> for every stage there was."""
        return {f"seconds_{stage}": seconds for stage, seconds in self._seconds.items()}
