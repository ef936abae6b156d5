"""One thing that was tried, and the class of faults it stands for."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """fails() returns what went wrong in one line, or None. An exception is a failure too."""

    group: str  # a line of the class's table: "closing sentences", "slow readers"
    name: str
    fails: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a group's cases."""

    group: str
    tried: int
    failed: Sequence[str]  # "name: why", each in one line


def play(cases: Iterable[Case]) -> list[Found]:
    """Try every case; groups come in the order in which they are met."""
    tried, failed = dict[str, int](), dict[str, list[str]]()
    for case in cases:
        tried[case.group] = tried.get(case.group, 0) + 1
        why = outcome(case)
        failed.setdefault(case.group, []).extend([f"{case.name}: {why}"] if why else [])
    return [Found(group, count, failed[group]) for group, count in tried.items()]


def outcome(case: Case) -> str | None:
    """What went wrong, in one line, if anything did."""
    try:
        why = case.fails()
    except Exception as error:  # the code before may lack what the case uses: that is a failure of it
        why = f"{type(error).__name__}: {error}"
    return " ".join(why.split())[:200] if why else None


def expect(found: object, wanted: object) -> str | None:
    """None where they are equal."""
    return None if found == wanted else f"{found!r} instead of {wanted!r}"


def hone(
    *words: str, folder: Path | str | None = None, seconds: float = 120, said: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command of the tree that is on trial, as a user types it. said: its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "hone", *words],
        cwd=folder,
        input=said,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "NO_COLOR": "1"},
    )
