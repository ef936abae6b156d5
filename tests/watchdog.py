"""Ends a test that hangs, on a busy machine too: by what it has computed, not by the clock on the wall.

pytest-timeout has a hook for the timer. A test is ended when it and its processes have computed for its limit, or when
none of them has computed anything for as long. Waiting for a core is neither.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout

EVERY = 2.0  # seconds between two looks
STILL = 0.05  # a process that waits wakes up now and then
TICK = os.sysconf("SC_CLK_TCK")


def computed() -> float:
    """Processor seconds of this process and all below it, those that have ended included."""
    spent, children = dict[int, float](), dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(stat.parent.name)
        spent[pid] = sum(map(int, fields[11:15])) / TICK
        children.setdefault(int(fields[1]), []).append(pid)
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        total += spent.get(pid, 0.0)
        waiting += children.get(pid, [])
    return total


class Watch:
    """One thread for all tests of a process; `test` is what it looks at."""

    def __init__(self) -> None:
        self.test: tuple[pytest.Item, Any] | None = None
        self.thread: threading.Thread | None = None
        self.changed = threading.Condition()

    def begin(self, item: pytest.Item, settings: Any) -> None:
        signal.signal(signal.SIGALRM, lambda *_: pytest_timeout.timeout_sigalrm(item, settings))
        with self.changed:
            self.test = item, settings
            if self.thread is None or not self.thread.is_alive():  # a fork has no threads
                self.thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
                self.thread.start()

    def end(self) -> None:
        with self.changed:
            self.test = None

    def _look(self) -> None:
        test, start, before, idle = None, 0.0, 0.0, 0.0
        while True:
            threading.Event().wait(EVERY)
            with self.changed:
                now = self.test
            if now is None:
                test = None
                continue
            spent = computed()
            if now is not test:
                test, start, before, idle = now, spent, spent, 0.0
                continue
            idle = idle + EVERY if spent - before < STILL else 0.0
            before = spent
            limit = float(now[1].timeout)
            if spent - start > limit or idle > limit:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                start, idle = spent, 0.0  # once; a test that goes on in spite of it is asked again later


WATCH = Watch()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    if threading.current_thread() is not threading.main_thread() or not Path("/proc/self/stat").exists():
        return False
    WATCH.begin(item, settings)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    WATCH.end()
    return True
