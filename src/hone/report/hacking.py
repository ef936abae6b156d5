"""The reward-hacking view of the report: parts over time, drift, shares, disagreement, top-rewarded samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from hone.log.hacking import Drift, drifts, top
from hone.report.chart import label
from hone.report.figure import figure
from hone.report.samples import single, text

Rows = Sequence[dict[str, Any]]
CURVES = ("length", "repetition", "disagreement", "hacked")
HINT = (
    "Rising reward is good news only if nothing here explains it better: one part that carries all of it, completions "
    "that grow or repeat themselves, a held-out verifier that disagrees (parts.held_out)."
)


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
