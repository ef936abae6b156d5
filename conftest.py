"""Reports what was run and what was left out, and why; the longest files go first."""

import gc
import os
import signal
from collections import Counter
from functools import cache
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning threads are slow on shared cores
os.environ.pop("COLUMNS", None)  # tables and lines are as wide as in CI, whatever the terminal's width
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A worker takes a file at a time: where a long one comes last, the others wait for it.
FIRST = (
    "test_trajectories.py", "test_kernels.py", "test_ranks.py", "test_torchrun.py", "test_shards.py",
    "test_real_recipes.py", "test_corpus_pipeline.py", "test_resume.py", "test_engine.py", "test_spread.py",
)  # fmt: skip
pytest_plugins = ("tests.watchdog",)
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    for item in [item for item in items if item.get_closest_marker("gpu") and not _has_gpu()]:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no garbage collection has to walk it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Hypothesis times the garbage collector by a callback that stays. A Ctrl-C that comes in a callback is lost."""
    gc.callbacks[:] = [found for found in gc.callbacks if not found.__module__.startswith("hypothesis")]


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marks = [name for name in ("slow", "gpu") if item.get_closest_marker(name)]
        item.config.stash[LEFT_OUT][" and ".join(marks) or "not chosen"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has chosen from all tests, so that what one of them left out is what all did."""
    node.config.stash[LEFT_OUT] |= Counter(getattr(node, "workeroutput", {}).get("left out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = {kind: len(terminalreporter.getreports(kind)) for kind in ("passed", "failed", "skipped")}
    left_out = ", ".join(f"{n} {why}" for why, n in sorted(config.stash[LEFT_OUT].items()))
    line = f"ran {counts['passed'] + counts['failed']}, skipped {counts['skipped']}, left out {left_out or 'none'}"
    terminalreporter.write_line(line)
