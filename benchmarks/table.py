"""The README's table of speed and the tables of docs/process.md, written from the stored results.

python -m benchmarks.table
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS, README = Path(__file__).parent / "results", Path(__file__).parents[1] / "README.md"
PROCESS, PAGE = RESULTS / "process_cpu.json", README.parent / "docs" / "process.md"
BEGIN, END = "<!-- speed, written by `make table` -->\n", "<!-- end of speed -->\n"
MARKS = "<!-- process, written by `make table` -->\n", "<!-- end of process -->\n"
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
    for path in sorted(path for path in results.glob("*.json") if path.name != PROCESS.name):  # which is no speed
        found = json.loads(path.read_text())
        for row in (r for r in found["rows"] if r["goal"]):
            met = "met" if row["ok"] else "**missed**"
            ours, peer = number(row["ours"], row["unit"]), number(row["peer"], row["unit"])
            lines.append(f"| {row['name']} | {ours} | {peer} | {ratio(row)} | {row['goal']} | {met} |\n")
        about = found["machine"]
        versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers", "trl") if name in about)
        machines.append(f"`{path.name}`: {about.get('gpu') or about['cpu']}, {versions}, {about['date']}")
    return HEAD + "".join(lines) + "\nStored in `benchmarks/results`: " + "; ".join(machines) + ".\n"


def process_tables(found: dict[str, Any]) -> str:
    """Each gain with those of its seeds, then what was measured, seed by seed."""
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
    return f"{gains}{values}\nStored in `benchmarks/results/{PROCESS.name}`: {about['cpu']}, {about['date']}.\n"


def written(page: str, made: str, *, marks: tuple[str, str] = (BEGIN, END), name: str = "README.md") -> str:
    """The page with the table between its marks."""
    begin, last = marks
    before, _, rest = page.partition(begin)
    _, end, after = rest.partition(last)
    if not end:
        raise SystemExit(f"{name} lacks the marks {begin.strip()} and {last.strip()}: put them where the table goes")
    return before + begin + made + last + after


if __name__ == "__main__":
    README.write_text(written(README.read_text(), table(RESULTS)))
    made = process_tables(json.loads(PROCESS.read_text()))
    PAGE.write_text(written(PAGE.read_text(), made, marks=MARKS, name=PAGE.name))
    sys.exit(0)
