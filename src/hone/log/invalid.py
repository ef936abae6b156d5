"""Why rewards are invalid: each kind of reason with how often it was given, step by step in a file of the run.

A kind is a few words, as in "KeyError (rewards.py:7)"; with it comes the first reason of that kind in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.log.sinks import append, drop_torn_line, read, truncate_after
from hone.storage import names

HELD_OUT = "held-out: "  # before a kind that an evaluation met
Kinds = Mapping[str, tuple[int, str]]  # how often, and the first reason
TOLD = 20  # kinds that a run tells of as they come; the rest is in the file
SUMMED = 5  # kinds that its last line names


@dataclass(frozen=True, slots=True)
class Total:
    """One kind of invalid reward, as a run's file counts it."""

    kind: str
    count: int
    step: int  # the first that had it
    reason: str


def merge_kinds(parts: Sequence[Kinds]) -> dict[str, tuple[int, str]]:
    """The counts of several ranks together, the most frequent first."""
    found = dict[str, tuple[int, str]]()
    for part in parts:
        for kind, (count, reason) in part.items():
            before = found.get(kind, (0, reason))
            found[kind] = (before[0] + count, before[1])
    return dict(sorted(found.items(), key=lambda pair: -pair[1][0]))


class InvalidLog:
    """The file of a run; on resume what came after the checkpoint is forgotten."""

    def __init__(self, path: str | Path, *, start: int = 0) -> None:
        self.path, self._told = Path(path), set[str]()
        truncate_after(self.path, start)

    def write(self, step: int, kinds: Kinds) -> list[str]:
        """Append a step's reasons; returns what to tell of those that are new."""
        if not kinds:
            return []
        drop_torn_line(self.path)
        for kind, (count, reason) in kinds.items():
            append(self.path, {"step": step, "kind": kind, "count": count, "reason": reason})
        fresh = [kind for kind in kinds if kind not in self._told][: max(0, TOLD - len(self._told))]
        self._told |= set(fresh)
        return [f"warn: no reward for {_completions(kinds[kind][0], kind)}: {kinds[kind][1]}" for kind in fresh]


def read_totals(path: str | Path) -> list[Total]:
    """Every kind that the file tells of, the most frequent first; lines that are none of Hone's are left out."""
    found = dict[str, Total]()
    for row in read(path):
        if not _is_row(row):
            continue
        before = found.get(row["kind"], Total(row["kind"], 0, row["step"], row["reason"]))
        found[row["kind"]] = Total(before.kind, before.count + row["count"], before.step, before.reason)
    return sorted(found.values(), key=lambda total: -total.count)


def _is_row(row: Any) -> bool:
    kinds = {"step": int, "kind": str, "count": int, "reason": str}
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def summary(found: Sequence[Total]) -> str:
    """24 rewards were invalid: 20 x KeyError (rewards.py:7), first at step 3; ...; "" where none was"""
    if not found:
        return ""
    shown = [f"{total.count} x {total.kind}, first at step {total.step}" for total in found[:SUMMED]]
    more = [f"{len(found) - SUMMED} more kinds"] if len(found) > SUMMED else []
    count = sum(total.count for total in found)
    return f"{count} reward{'s were' if count > 1 else ' was'} invalid ({names.INVALID}): " + "; ".join([*shown, *more])


def _completions(count: int, kind: str) -> str:
    which = "held-out completion" if kind.startswith(HELD_OUT) else "completion"
    return f"a {which}" if count == 1 else f"{count} {which}s"
