"""The tables of docs/speed.md, docs/process.md and docs/verifiers.md, written from the stored results.

python -m benchmarks.table
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS, DOCS = Path(__file__).parent / "results", Path(__file__).parents[1] / "docs"
SPEED = DOCS / "speed.md"
PROCESS, CREDIT = RESULTS / "process_cpu.json", RESULTS / "credit_cpu.json"
PAGE = DOCS / "process.md"
BEGIN, END = "<!-- speed, written by `make table` -->\n", "<!-- end of speed -->\n"
MATHS, VERIFIERS = RESULTS / "maths_cpu.json", DOCS / "verifiers.md"
MATHS_MARKS = "<!-- maths, written by `make table` -->\n", "<!-- end of maths -->\n"
MARKS = "<!-- process, written by `make table` -->\n", "<!-- end of process -->\n"
CREDIT_MARKS = "<!-- credit, written by `make table` -->\n", "<!-- end of credit -->\n"
NO_SPEED = {
    PROCESS,
    CREDIT,
    MATHS,
    *(RESULTS / f"{name}_cpu.json" for name in ("trial", "walk", "walk_before", "trees")),
}
HEAD = "| work | Hone | peer | ratio | goal | |\n|---|---|---|---|---|---|\n"
LESS = {"GB", "MiB", "ms", "s"}  # units of which less is better


def number(x: float | None, unit: str) -> str:
    """As a reader takes it: 248,922 tokens/s, 38.6 %, 6.7 GB, 0.58 s.

    >>> number(0.386, ""), number(248_921.8, "tokens/s"), number(1.72, "steps/s"), number(None, "GB")
    ('38.6 %', '248,922 tokens/s', '0.58 s', '')
    """
    if x is None:
        return ""
    if unit == "":
        return f"{100 * x:.1f} %"
    if unit == "steps/s":
        return f"{1 / x:.2f} s"
    return f"{x:,.0f} {unit}" if x >= 1_000 else f"{x:.3g} {unit}"


def ratio(row: dict[str, Any]) -> str:
    """How many times as good."""
    if not row["ratio"]:
        return ""
    return f"{1 / row['ratio'] if row['unit'] in LESS else row['ratio']:.3g} x"


def table(results: Path) -> str:
    """Rows that have a goal, of every stored result, and what they were measured on."""
    lines, machines = list[str](), list[str]()
    speeds = (path for path in results.glob("*.json") if path.name not in {other.name for other in NO_SPEED})
    for path in sorted(speeds):
        found = json.loads(path.read_text())
        goals = [row for row in found.get("rows", []) if row["goal"]]  # hashes of trajectories have no rows
        for row in goals:
            met = "met" if row["ok"] else "**missed**"
            ours, peer = number(row["ours"], row["unit"]), number(row["peer"], row["unit"])
            lines.append(f"| {row['name']} | {ours} | {peer} | {ratio(row)} | {row['goal']} | {met} |\n")
        if not goals:
            continue
        about = found["machine"]
        versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers", "trl") if name in about)
        machines.append(f"`{path.name}`: {about.get('gpu') or about['cpu']}, {versions}, {about['date']}")
    stored = "".join(f"- {machine}\n" for machine in machines)
    return f"{HEAD}{''.join(lines)}\nStored in `benchmarks/results`:\n\n{stored}"


def gain_tables(path: Path) -> str:
    """Each gain with those of its seeds, then what was measured, seed by seed."""
    found = json.loads(path.read_text())
    gains = "| gain in points | seeds 0, 1, 2 | mean, standard error | |\n|---|---|---|---|\n"
    values = "\n| | seeds 0, 1, 2 | mean |\n|---|---|---|\n"
    for row in (r for r in found["rows"] if "seeds" in r):
        seeds = ", ".join(f"{x:+.1f}" if row["goal"] else f"{x:.1f}" for x in row["seeds"])
        if row["goal"]:
            met = "met" if row["ok"] else "**missed**"
            gains += f"| {row['name']} | {seeds} | {row['ours']:+.1f}, {row['standard_error']:.1f} | {met} |\n"
        else:
            values += f"| {row['name']} | {seeds} | {row['ours']:.1f} |\n"
    about = found["machine"]
    return f"{gains}{values}\nStored in `benchmarks/results/{path.name}`: {about['cpu']}, {about['date']}.\n"


def measured(x: float, unit: str) -> str:
    """A share as a percentage, short times in milliseconds.

    >>> measured(1.0, "share"), measured(0.0058, "s"), measured(1.82, "s"), measured(0, "answers")
    ('100 %', '5.8 ms', '1.82 s', '0 answers')
    """
    if unit == "share":
        return f"{100 * x:.3g} %"
    return f"{1000 * x:.3g} ms" if unit == "s" and x < 0.1 else f"{x:.3g} {unit}"


def maths_tables(found: dict[str, Any]) -> str:
    """What is accepted of each set of gold answers, the library's share and rate in brackets; then hostile answers."""
    rows = {row["name"]: row for row in found["rows"]}
    accepted = re.compile(r"(.+), (gold|equivalent|perturbed): accepted of (\d+)")
    sets, rest = dict[str, dict[str, str]](), ""
    for name, row in rows.items():
        if found_set := accepted.fullmatch(name):
            count = int(found_set.group(3))
            cell = f"{row['ours'] * count:,.0f} of {count:,} ({100 * row['peer']:.1f} %)"
            sets.setdefault(found_set.group(1), {})[found_set.group(2)] = cell
        elif "," not in name or name.startswith(("hostile", "past the guard", "first")):
            rest += f"| {name} | {measured(row['ours'], row['unit'])} | {row['goal'] or ''} |\n"
    head = (
        "| gold answers | as they are | equivalent forms | perturbed | equivalent forms a second |\n"
        + "|---" * 5
        + "|\n"
    )
    for name, cells in sets.items():
        rate = rows[f"{name}, equivalent: rate"]
        speed = f"{rate['ours']:,.0f} ({rate['peer']:,.0f})"
        head += f"| `{name}` | {cells['gold']} | {cells['equivalent']} | {cells['perturbed']} | {speed} |\n"
    about = found["machine"]
    stored = (
        f"\nStored in `benchmarks/results/{MATHS.name}`: {about['cpu']}, {about['cores']} cores, {about['date']}.\n"
    )
    return f"{head}\n| | | goal |\n|---|---|---|\n{rest}{stored}"


def written(page: str, made: str, *, marks: tuple[str, str] = (BEGIN, END), name: str = "speed.md") -> str:
    """The page with the table between its marks."""
    begin, last = marks
    before, _, rest = page.partition(begin)
    _, end, after = rest.partition(last)
    if not end:
        raise SystemExit(f"{name} lacks the marks {begin.strip()} and {last.strip()}: put them where the table goes")
    return before + begin + made + last + after


if __name__ == "__main__":
    SPEED.write_text(written(SPEED.read_text(), table(RESULTS)))
    for path, marks in ((PROCESS, MARKS), (CREDIT, CREDIT_MARKS)):
        PAGE.write_text(written(PAGE.read_text(), gain_tables(path), marks=marks, name=PAGE.name))
    made = maths_tables(json.loads(MATHS.read_text()))
    VERIFIERS.write_text(written(VERIFIERS.read_text(), made, marks=MATHS_MARKS, name=VERIFIERS.name))
    sys.exit(0)
