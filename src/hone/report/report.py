"""The report of a run: one HTML file that opens offline, with the table, the curves and what the model wrote."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.log.invalid import Total
from hone.log.progress import duration
from hone.report.chart import TITLES, figure, label, number
from hone.report.hacking import hacking
from hone.report.page import page, text
from hone.report.samples import invalid_rewards, problems, side_by_side, single

Row = Mapping[str, Any]
MAIN_CURVES = 9  # the others are folded away


def percent(x: float) -> str:
    return f"{100 * x:.1f}%"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A known column of the table: its heading and how its numbers are written."""

    heading: str
    show: Callable[[float], str] = label


COLUMNS = {
    "stage": TableColumn("stage"),
    "accuracy": TableColumn("held-out accuracy", percent),
    "greedy": TableColumn("greedy", percent),
    "format": TableColumn("format rate", percent),
    "length": TableColumn("mean length", "{:.1f}".format),
    "kl": TableColumn("KL from SFT", "{:z.3f}".format),
    "seconds": TableColumn("seconds", "{:,.1f}".format),
}


SUMMARY = {  # of a single run: the metrics on its cards, the first that it has
    "reward": label,
    "accuracy": percent,
    "eval_loss": label,
    "loss": label,
    "ref_kl": "{:z.3f}".format,
    "length": "{:.1f}".format,
    "truncated": percent,
    "grad_norm": label,
}
MOST_CARDS = 4  # beside the time
START = "start"  # the stage that a row's model began from: of the headline, no column


def write_report(
    path: str | Path,
    *,
    title: str,
    table: Sequence[Row],
    runs: Mapping[str, Sequence[dict[str, Any]]],
    samples: Sequence[Row] = (),
    top: Sequence[Row] | None = None,
    notes: Mapping[str, str] | None = None,
    invalid: Sequence[Total] = (),
) -> Path:
    """Writes the report and returns its path.

    table: one row a stage (stage, accuracy, format, length, kl, seconds; more columns are shown as they are).
    runs: stage -> its metrics a step. samples: stage, prompt, completion and, where known, problem, answer,
    correct, reward, parts, length, stop, step; a problem that several stages answered is shown side by side.
    top: samples among which those with the highest reward are shown; None: `samples`. invalid: why rewards are.
    """
    stages = list(dict.fromkeys([str(row["stage"]) for row in table if "stage" in row] + list(runs)))
    body = [
        _header(title, table, runs, stages=len(stages)),
        _table(table, stages),
        _curves(runs, stages, chosen=str(best(table).get("stage", ""))),
        hacking(runs, samples if top is None else top, stages),
        invalid_rewards(invalid),
        _samples(samples, stages),
    ]
    whole = page(text(title), "\n".join(filter(None, [*body, _notes(notes or {}), _footer()])))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(whole.encode("utf-8", "replace"))
    temporary.replace(path)
    return path


def _header(title: str, rows: Sequence[Row], runs: Mapping[str, Sequence[Row]], *, stages: int) -> str:
    steps = sum(map(len, runs.values()))
    lead = f"{_many(stages, 'stage')}, {_many(steps, 'step')}" if rows else _many(steps, "step")
    shown = best(rows)
    facts = "".join(_fact(name, rows, shown) for name in ("accuracy", "format", "kl")) + _time(rows)
    facts = facts or "".join(_run_facts([row for steps in runs.values() for row in steps]))
    return (
        f'<p class="brand">Hone report</p><h1>{text(title)}</h1><p class="lead">{lead}</p>'
        f'<div class="facts-row">{facts}</div>'
    )


def _run_facts(rows: Sequence[Row]) -> Iterator[str]:
    """The facts of a run without a table: where its telling metrics began and ended, and its time."""
    found = {name: [x for row in rows if (x := number(row.get(name))) is not None] for name in SUMMARY}
    tenth = max(1, len(rows) // 10)
    for name in [name for name in SUMMARY if found[name]][:MOST_CARDS]:
        values = found[name]
        first, last = (sum(some) / len(some) for some in (values[:tenth], values[-tenth:]))
        yield _fact_card(text(TITLES.get(name, name)), SUMMARY[name](last), f"from {SUMMARY[name](first)}")
    if spent := [x for row in rows if (x := number(row.get("seconds"))) is not None]:
        yield _fact_card("time in all", duration(sum(spent)), _many(len(rows), "step"))


def best(rows: Sequence[Row]) -> Row:
    """The stage with the highest accuracy, or the last one where none has any."""
    known = [row for row in rows if number(row.get("accuracy")) is not None]
    return max(known, key=lambda row: number(row["accuracy"]) or 0.0) if known else (rows[-1] if rows else {})


def _fact(name: str, rows: Sequence[Row], shown: Row) -> str:
    """The best stage's number, and that of the stage it began from: the one named as its start, or else before it."""
    value, column = number(shown.get(name)), COLUMNS[name]
    if value is None:
        return ""
    under = f"after {text(str(shown.get('stage', '')))}"
    earlier = [row for row in rows[: list(rows).index(shown)] if number(row.get(name)) is not None]
    named = [row for row in earlier if row.get("stage") == shown.get(START)]
    earlier = named if START in shown else earlier
    if earlier and name == "accuracy":
        before = column.show(number(earlier[-1][name]) or 0.0)
        under += f", from {before} after {text(str(earlier[-1].get('stage', '')))}"
    return _fact_card(column.heading, column.show(value), under)


def _time(rows: Sequence[Row]) -> str:
    spent = [x for row in rows if (x := number(row.get("seconds"))) is not None]
    return _fact_card("time in all", duration(sum(spent)), _many(len(spent), "stage")) if spent else ""


def _many(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _fact_card(heading: str, value: str, under: str) -> str:
    return f'<div class="card fact"><span>{heading}</span><b>{value}</b><span>{under}</span></div>'


def _table(rows: Sequence[Row], stages: Sequence[str]) -> str:
    if not rows:
        return ""
    found = dict.fromkeys(name for row in rows for name in row if name != START)
    names = [name for name in COLUMNS if name in found] + [name for name in found if name not in COLUMNS]
    head = "".join(f'<th scope="col">{text(_heading(name))}</th>' for name in names)
    lines = "".join(_line(row, names, colour=stages.index(str(row["stage"])) if "stage" in row else 0) for row in rows)
    return (
        '<h2>Stages</h2><p class="hint">In the order the stages ran.</p>'
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _heading(name: str) -> str:
    return COLUMNS[name].heading if name in COLUMNS else name.replace("_", " ")


def _line(row: Row, names: Sequence[str], *, colour: int) -> str:
    cells = "".join(_cell(name, row.get(name)) for name in names)
    return f'<tr class="s{colour % 6}">{cells}</tr>'


def _cell(name: str, value: object) -> str:
    if name == "stage":
        return f'<th scope="row">{text("—" if value is None else value)}</th>'
    found = number(value)
    if found is not None:
        shown = COLUMNS[name].show(found) if name in COLUMNS else label(found)
    else:
        shown = text(value) if isinstance(value, str | bool) else "—"
    bar = _bar(found) if name == "accuracy" and found is not None else ""
    return f'<td data-name="{text(_heading(name))}">{bar}<span>{shown}</span></td>'


def _bar(share: float) -> str:
    width = 100 * min(1.0, max(0.0, share))
    return (
        '<svg class="bar" aria-hidden="true"><rect class="rest" width="100%" height="100%"/>'
        f'<rect class="part" width="{width:.1f}%" height="100%" rx="3"/></svg>'
    )


def _curves(runs: Mapping[str, Sequence[dict[str, Any]]], stages: Sequence[str], *, chosen: str) -> str:
    if not runs:
        return ""
    tabs = "".join(
        f'<button type="button" role="tab" id="tab{i}" aria-controls="panel{i}" class="s{stages.index(stage) % 6}'
        f'{" best" if stage == chosen else ""}">{text(stage)}</button>'
        for i, stage in enumerate(runs)
    )
    panels = "".join(
        f'<div class="panel s{stages.index(stage) % 6}" role="tabpanel" id="panel{i}" aria-labelledby="tab{i}">'
        f"<h3>{text(stage)}</h3>{_charts(rows)}</div>"
        for i, (stage, rows) in enumerate(runs.items())
    )
    one = " hidden" if len(runs) == 1 else ""
    hint = (
        "Thin: every step, or the extremes of each stretch of a long run. Bold: running mean, where there are "
        "enough steps. Red marks: not a finite number."
    )
    return (
        f'<h2>Curves</h2><p class="hint">{hint}</p>'
        f'<div class="tabs" role="tablist" aria-label="Stages"{one}>{tabs}</div>{panels}'
    )


def _charts(rows: Sequence[dict[str, Any]]) -> str:
    names = _curve_names(rows)
    if not names:
        return '<p class="none">no steps recorded</p>'
    figures = [figure(rows, name) for name in names]
    shown = f'<div class="charts">{"".join(figures[:MAIN_CURVES])}</div>'
    folded = figures[MAIN_CURVES:]
    if folded:
        shown += (
            f"<details><summary>{len(folded)} more curves</summary>"
            f'<div class="charts">{"".join(folded)}</div></details>'
        )
    return shown


def _curve_names(rows: Sequence[Row]) -> list[str]:
    """The metrics of the rows: the telling ones first, the others by name; null counts, text does not."""
    found = {
        name
        for row in rows
        for name, value in row.items()
        if name != "step" and (value is None or isinstance(value, int | float))
    }
    return [name for name in TITLES if name in found] + sorted(found - set(TITLES))


def _samples(samples: Sequence[Row], stages: Sequence[str]) -> str:
    together, alone = problems(samples)
    found: list[str] = []
    if together:
        found.append("<h2>The same problem, stage by stage</h2>")
        found += [side_by_side(group, stages) for group in together]
    if alone:
        cards = "".join(single(sample, stages) for sample in alone)
        found.append(f'<h2>Rollouts</h2><div class="singles">{cards}</div>')
    return "".join(found)


def _notes(notes: Mapping[str, str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in notes.items())
    return f'<h2>Machine and settings</h2><dl class="card">{items}</dl>'


def _footer() -> str:
    return "<footer>Written by Hone. This page loads nothing from the network.</footer>"
