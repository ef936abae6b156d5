"""docs/dev/trial.md: each class of faults with the number of cases tried and failed, before and after."""

from collections.abc import Sequence
from typing import Any

HEAD = """# The field trial

Hone was tried from a clean clone as a new user would, as an attacker would, and against suites that nobody here wrote.
This page says what was tried for each class of faults, and how many cases failed before and after the faults were
mended. `make trial` tries all of it again and writes this page from `benchmarks/results/trial_cpu.json`.
""".splitlines()
CLASSES = {
    "A": "Right answers that score 0",
    "B": "Wrong answers that score 1, and ways around a 0",
    "C": "Security",
    "D": "Reliability",
    "E": "What a new user stumbled on",
    "F": "What the documents say",
}


def page(stored: dict[str, Any], order: Sequence[str]) -> str:
    """A table for each class."""
    lines, before, after = list(HEAD), stored.get("before", {}), stored.get("after", {})
    for letter, title in CLASSES.items():
        names = [name for name in order if name in after and after[name]["letter"] == letter]
        if not names:
            continue
        lines += [
            "",
            f"## {letter}. {title}",
            "",
            "| what | tried | failed before | failed after |",
            "|---|---|---|---|",
        ]
        for name in names:
            lines += _rows(before.get(name), after[name])
        for section in filter(None, (after[name].get("section") for name in names)):
            lines += ["", *section]
    return "\n".join([*lines, ""])


def _rows(before: dict[str, Any] | None, after: dict[str, Any]) -> list[str]:
    old = {group["group"]: group for group in before["groups"]} if before else {}
    rows = list[str]()
    for group in after["groups"]:
        was = old.get(group["group"])
        earlier = f"{len(was['failed']):,} of {was['tried']:,}" if was else "not tried"
        rows.append(f"| {group['group']} | {group['tried']:,} | {earlier} | {len(group['failed']):,} |")
    return rows
