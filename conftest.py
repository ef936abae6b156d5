"""Reports what was run and what was left out, and why."""

import os
from collections import Counter

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning threads are slow on shared cores

LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marks = [name for name in ("slow", "gpu") if item.get_closest_marker(name)]
        item.config.stash[LEFT_OUT][" and ".join(marks) or "not chosen"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = {kind: len(terminalreporter.getreports(kind)) for kind in ("passed", "failed", "skipped")}
    left_out = ", ".join(f"{n} {why}" for why, n in sorted(config.stash[LEFT_OUT].items()))
    line = f"ran {counts['passed'] + counts['failed']}, skipped {counts['skipped']}, left out {left_out or 'none'}"
    terminalreporter.write_line(line)
