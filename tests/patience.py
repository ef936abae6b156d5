"""How long a test may wait for something that takes so long on a quiet machine."""

import os
from pathlib import Path

LOAD = Path("/proc/loadavg")


def patience(seconds: float) -> float:
    """As many seconds on a quiet machine; more on a busy one, by what else wants its cores now and did of late."""
    now = int(LOAD.read_text().split()[3].partition("/")[0]) if LOAD.exists() else 0
    return seconds * (1 + max(os.getloadavg()[0], now) / (os.cpu_count() or 1))
