"""Where an iteration's time goes: seconds by stage."""

import time


class Laps:
    """A watch that is read at the end of each stage. A GPU's work counts where its result is waited for."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds = dict[str, float]()

    def __call__(self, stage: str, *, at: float | None = None) -> None:
        """The time since the stage before this one is this one's; at: when it ended, if not now."""
        now = time.perf_counter() if at is None else max(at, self._last)
        self.beside(stage, now - self._last)
        self._last = now

    def beside(self, name: str, seconds: float) -> None:
        """Time that passed while stages did."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def total(self) -> float:
        """Seconds since the watch was started."""
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """seconds_<stage> for every stage there was."""
        return {f"seconds_{stage}": seconds for stage, seconds in self.seconds.items()}
