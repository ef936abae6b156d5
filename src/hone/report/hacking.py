"""The reward-hacking view of the report: parts over time, drift, shares, disagreement, top-rewarded samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.report.chart import figure, label, number
from hone.report.page import text
from hone.report.samples import single

Rows = Sequence[dict[str, Any]]
DRIFTS = ("length", "repetition", "truncated", "reward", "disagreement", "hacked")
CURVES = ("length", "repetition", "disagreement", "hacked")
MOST = 6  # samples that are shown
HINT = (
    "Rising reward is good news only if nothing here explains it better: one part that carries all of it, completions "
    "that grow or repeat themselves, a held-out verifier that disagrees (parts.held_out)."
)


@dataclass(frozen=True, slots=True)
class Drift:
    """A metric's mean over the first and the last tenth of a run."""

    name: str
    first: float
    last: float


def hacking(runs: Mapping[str, Rows], samples: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> str:
    """A section for the runs that had a reward, "" where none had."""
    rewarded = {stage: rows for stage, rows in runs.items() if any("reward" in row for row in rows)}
    if not rewarded:
        return ""
    found = "".join(_run(stage, rows, stages) for stage, rows in rewarded.items())
    best = "".join(single(sample, stages) for sample in top(samples))
    shown = f'<h3>Top-rewarded samples</h3><div class="singles">{best}</div>' if best else ""
    return f'<h2>Reward hacking?</h2><p class="hint">{HINT}</p>{found}{shown}'


def _run(stage: str, rows: Rows, stages: Sequence[str]) -> str:
    there = {name for row in rows for name in row}
    parts = sorted(name for name in there if name.startswith(("reward/", "share/")))
    names = [*parts, *(name for name in CURVES if name in there)]
    charts = "".join(figure(rows, name) for name in names)
    colour = f"s{stages.index(stage) % 6}" if stage in stages else "s0"
    lines = "".join(_line(drift) for drift in drifts(rows))
    table = (
        '<div class="card scroll"><table><thead><tr><th scope="col">over the run</th><th scope="col">first tenth</th>'
        f'<th scope="col">last tenth</th></tr></thead><tbody>{lines}</tbody></table></div>'
    )
    return (
        f'<details class="{colour}" open><summary>{text(stage)}</summary>{table if lines else ""}'
        f'<div class="charts">{charts}</div></details>'
    )


def _line(drift: Drift) -> str:
    return (
        f'<tr><th scope="row">{text(drift.name)}</th><td data-name="first tenth"><span>{label(drift.first)}</span></td>'
        f'<td data-name="last tenth"><span>{label(drift.last)}</span></td></tr>'
    )


def drifts(rows: Sequence[Mapping[str, Any]]) -> list[Drift]:
    """How the metrics that show reward hacking, and the parts of the reward, have changed.

    >>> drifts([{"length": 10.0}, {"length": 30.0}])
    [Drift(name='length', first=10.0, last=30.0)]
    """
    parts = sorted({name for row in rows for name in row if name.startswith(("reward/", "share/"))})
    found = list[Drift]()
    for name in (*DRIFTS, *parts):
        values = [x for row in rows if (x := number(row.get(name))) is not None]
        size = max(1, len(values) // 10)
        if len(values) > 1:
            found.append(Drift(name, sum(values[:size]) / size, sum(values[-size:]) / size))
    return found


def top(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The six samples with the highest reward. Of equal completions only the latest counts."""
    scored = [s for s in samples if number(s.get("reward")) is not None]
    found = dict[str, Mapping[str, Any]]()
    scored.reverse()  # the sort is stable, so of equal rewards the latest comes first
    for sample in sorted(scored, key=lambda s: -float(s["reward"])):
        found.setdefault(str(sample.get("completion", "")), sample)
    return list(found.values())[:MOST]
