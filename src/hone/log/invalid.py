"""Why rewards are invalid: a file of the run counts each kind of reason, step by step.

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
WARNED = 20  # kinds that a run warns of as they come; the rest is only in the file
SUMMED = 5  # kinds that the summary names


@dataclass(frozen=True, slots=True)
class Total:
    """One kind of invalid reward, as a run's file counts it."""

    kind: str
    count: int
    step: int  # the first with this kind
    reason: str


def merge_kinds(parts: Sequence[Kinds]) -> dict[str, tuple[int, str]]:
    """The sum of several ranks' counts, the most frequent first."""
    merged = dict[str, tuple[int, str]]()
    for part in parts:
        for kind, (count, reason) in part.items():
            before = merged.get(kind, (0, reason))
            merged[kind] = (before[0] + count, before[1])
    return dict(sorted(merged.items(), key=lambda pair: -pair[1][0]))


class InvalidLog:
    """The file of a run. On resume it drops the steps after the checkpoint."""

    def __init__(self, path: str | Path, *, start: int = 0) -> None:
        self.path, self._warned = Path(path), set[str]()
        truncate_after(self.path, start)

    def write(self, step: int, kinds: Kinds) -> list[str]:
        """Append a step's reasons; returns a warning for each new kind."""
        if not kinds:
            return []
        drop_torn_line(self.path)
        for kind, (count, reason) in kinds.items():
            append(self.path, {"step": step, "kind": kind, "count": count, "reason": reason})
        new = [kind for kind in kinds if kind not in self._warned][: max(0, WARNED - len(self._warned))]
        self._warned |= set(new)
        return [f"warn: no reward for {_completions(kinds[kind][0], kind)}: {kinds[kind][1]}" for kind in new]


def read_totals(path: str | Path) -> list[Total]:
    """Every kind in the file, the most frequent first; lines that Hone did not write are left out."""
    totals = dict[str, Total]()
    for row in read(path):
        if not _is_row(row):
            continue
        before = totals.get(row["kind"], Total(row["kind"], 0, row["step"], row["reason"]))
        totals[row["kind"]] = Total(before.kind, before.count + row["count"], before.step, before.reason)
    return sorted(totals.values(), key=lambda total: -total.count)


def _is_row(row: Any) -> bool:
    kinds = {"step": int, "kind": str, "count": int, "reason": str}
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def summary(totals: Sequence[Total]) -> str:
    """24 rewards were invalid: 20 x KeyError (rewards.py:7), first at step 3; ...; "" where none was"""
    if not totals:
        return ""
    shown = [f"{total.count} x {total.kind}, first at step {total.step}" for total in totals[:SUMMED]]
    more = [f"{len(totals) - SUMMED} more kinds"] if len(totals) > SUMMED else []
    count = sum(total.count for total in totals)
    return f"{count} reward{'s were' if count > 1 else ' was'} invalid ({names.INVALID}): " + "; ".join([*shown, *more])


def _completions(count: int, kind: str) -> str:
    which = "held-out completion" if kind.startswith(HELD_OUT) else "completion"
    return f"a {which}" if count == 1 else f"{count} {which}s"
