"""How long a test may wait for something that takes so long on a quiet machine."""

import os
import time
from collections.abc import Callable
from pathlib import Path

LOAD = Path("/proc/loadavg")


def patience(seconds: float) -> float:
    """As many seconds on a quiet machine; more on a busy one, by what else wants its cores now and did of late."""
    now = int(LOAD.read_text().split()[3].partition("/")[0]) if LOAD.exists() else 0
    return seconds * (1 + max(os.getloadavg()[0], now) / (os.cpu_count() or 1))


def eventually(holds: Callable[[], bool], *, seconds: float = 20.0) -> bool:
    """Whether it comes to hold in that time."""
    end = time.monotonic() + patience(seconds)
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def running(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the two
        return False
