"""The form every benchmark has in common: rows with a goal, and the machine they were measured on."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from hone.demo.summary import machine

Row = dict[str, Any]


def row(name: str, ours: float, *, unit: str, goal: str, ok: bool, peer: float | None = None) -> Row:
    """One line of the result; ratio is ours against the peer, where there is one."""
    ratio = ours / peer if peer else None
    return {"name": name, "ours": ours, "peer": peer, "ratio": ratio, "unit": unit, "goal": goal, "ok": ok}


def note(name: str, ours: float, *, unit: str, peer: float | None = None) -> Row:
    """A number to know, without a goal."""
    return {**row(name, ours, unit=unit, goal="", ok=True, peer=peer), "goal": None}


def say(*words: object) -> None:
    """Progress goes to stderr: the last line of stdout is the result."""
    print(*words, file=sys.stderr, flush=True)


def main(measure: Callable[[bool], Sequence[Row]], description: str) -> int:
    """Measure and print; the exit code tells whether every goal was met."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a shorter measurement, within two minutes on 2 cores")
    rows = list(measure(parser.parse_args().quick))
    about = {**machine(), "system": platform.platform(), "date": datetime.now(UTC).date().isoformat()}
    for missed in (r for r in rows if not r["ok"]):
        print(
            f"missed: {missed['name']}: {missed['ours']:.4g} {missed['unit']}, goal {missed['goal']}", file=sys.stderr
        )
    print(json.dumps({"rows": rows, "machine": about}))
    return 0 if all(r["ok"] for r in rows) else 1
