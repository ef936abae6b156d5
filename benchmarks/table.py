"""The README's table of speed, written from the stored results.

python -m benchmarks.table
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS, README = Path(__file__).parent / "results", Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- speed, written by `make table` -->\n", "<!-- end of speed -->\n"
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
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        for row in (r for r in found["rows"] if r["goal"]):
            met = "met" if row["ok"] else "**missed**"
            ours, peer = number(row["ours"], row["unit"]), number(row["peer"], row["unit"])
            lines.append(f"| {row['name']} | {ours} | {peer} | {ratio(row)} | {row['goal']} | {met} |\n")
        about = found["machine"]
        versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers", "trl") if name in about)
        machines.append(f"`{path.name}`: {about.get('gpu') or about['cpu']}, {versions}, {about['date']}")
    return HEAD + "".join(lines) + "\nStored in `benchmarks/results`: " + "; ".join(machines) + ".\n"


def written(readme: str, made: str) -> str:
    """The README with the table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"README.md lacks the marks {BEGIN.strip()} and {END.strip()}: put them where the table goes")
    return before + BEGIN + made + END + after


if __name__ == "__main__":
    README.write_text(written(README.read_text(), table(RESULTS)))
    sys.exit(0)
