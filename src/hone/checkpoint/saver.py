"""Checkpoints that a thread writes from copies while the loop goes on, one at a time.

By default a clock says when: `Timer`.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hone.rollout.overlap import BackgroundTask, Cancelled

SHARE = 0.01  # of the time is the most that saving by the clock may cost


class Timer:
    """When to save by the clock: soon, then ever more seldom up to once in `seconds` (0: never).

    The first save is due when its guessed cost is 1 % of the time so far, and after `seconds` at the latest. Each
    further one is due when the run is twice as old as it was at the last one, or `seconds` after that, but not before
    its cost is 0.5 % of the time since: other work on the machine may double the cost. So a kill costs half of the
    work so far, or a few minutes of it. age: seconds that passed before, as in imports.
    """

    def __init__(self, seconds: float, *, age: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._age, self._clock = seconds, age, clock
        self._begin = clock()
        self._last: float | None = None

    def due(self, cost: float) -> bool:
        """Whether it is time for a save that takes so many seconds from the loop."""
        now = self._clock()
        if not self._seconds:
            return False
        if self._last is None:
            return self._age + now - self._begin >= min(cost / SHARE, self._seconds)
        return now - self._last >= max(2 * cost / SHARE, min(self._seconds, self._last - self._begin))

    def saved(self) -> None:
        """Note that a save begins, whoever asked for it."""
        self._last = self._clock()


def process_age() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Saver:
    """Runs one writing at a time beside the loop. If one fails, `failed` says so, and the loop waits for the next one.

    shares_cores: the loop computes on the cores that also write, so that the writing's processor time is the loop's.
    """

    def __init__(self, *, shares_cores: bool = True) -> None:
        self._work: BackgroundTask[None] | None = None
        self._stop = threading.Event()
        self._shares_cores = shares_cores
        self.events: list[str] = []  # failures that a later save made good, to be printed
        self.held_seconds = 0.0  # seconds that the latest save stopped the loop for; before the first, a guess
        self.write_seconds = 0.0  # in which the latest writing used a processor, or waited for one

    @property
    def cost(self) -> float:
        """Seconds that a save takes from the loop."""
        return self.held_seconds + (self.write_seconds if self._shares_cores else 0.0)

    def guess(self, seconds: float) -> None:
        """Set the cost until a first save has one: processor seconds of reading or writing as much."""
        self.held_seconds = seconds if self._shares_cores else 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._work is not None and not self._work.ended()

    @property
    def failed(self) -> bool:
        """Whether the latest writing has ended with an error."""
        return self._work is not None and self._work.ended() and self._work.error is not None

    def go_on(self) -> None:
        """The writing calls this between two files. It raises Cancelled if `close` has given up waiting."""
        if self._stop.is_set():
            raise Cancelled

    def start(self, write: Callable[[], object]) -> None:
        """Write beside the loop once the last writing has ended. If that one failed, wait for this one."""
        before = self._settle()
        if before is not None:
            self.events.append(f"{before}; the run is saved anew")
        box = [write]  # emptied, so that the copies are freed as soon as they are written
        self._work = BackgroundTask(lambda: self._write(box.pop()), stream=_transfer_stream())
        if before is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until all is written; raises the error of the writing."""
        error = self._settle()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, and so the run's tensors

    def close(self, *, patience: float | None = None) -> BaseException | None:
        """Wait for the writing, and give it up after `patience` seconds. Returns its error."""
        if self._work is not None and patience is not None and not self._work.ended(patience):
            self._stop.set()
            if not self._work.ended(patience):  # in the middle of a large file; the next run removes it
                return None
        return self._settle()

    def drain(self) -> list[str]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def _write(self, write: Callable[[], object]) -> None:
        begin, start = time.thread_time(), time.monotonic()
        try:
            write()
        finally:  # others may use the cores too; time that a slow disk takes is no cost
            self.write_seconds = min(time.monotonic() - start, 2 * (time.thread_time() - begin))

    def _settle(self) -> BaseException | None:
        """Wait for the writing in progress; returns its error."""
        if self._work is None:
            return None
        self._work.join()  # before `_work` is cleared: a signal may end the wait
        work, self._work = self._work, None
        return work.error


def _transfer_stream() -> "torch.cuda.Stream | None":
    """A stream behind the copies, so that the learner's kernels do not wait for the transfer; None without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream
