"""The field trial: what failed when Hone was attacked, measured and used from outside, tried again.

The full run stores what it found in benchmarks/results/trial_cpu.json and writes docs/dev/trial.md. `--before FOLDER`
tries the same cases on the checkout of older code in FOLDER and stores what failed there.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.form import Row, print_result, row, say
from benchmarks.trials.case import play
from benchmarks.trials.page import page

ROOT = Path(__file__).parents[1]
STORED, PAGE = ROOT / "benchmarks" / "results" / "trial_cpu.json", ROOT / "docs" / "dev" / "trial.md"
CLASSES = {  # a module of benchmarks/trials, by the letter of its class
    "sentences": "A",
    "forms": "A",
    "programs": "A",
    "judges": "A",
    "loopholes": "B",
    "costly": "B",
    "vacuous_tests": "B",
    "untrusted": "C",
    "serving": "C",
    "workers": "C",
    "accidents": "D",
    "inputs": "D",
    "saving": "E",
    "newcomer": "E",
    "remedies": "E",
    "documents": "F",
}
Result = dict[str, Any]  # letter, title, seconds, groups: [{group, tried, failed}], section: lines for the page


def tried(name: str, tree: Path, *, quick: bool) -> Result:
    """The cases of one class, in a process that imports Hone from the tree."""
    begin = time.monotonic()
    path = os.pathsep.join([str(tree / "src"), str(ROOT)])
    words = [sys.executable, "-m", "benchmarks.trial", "--one", name, *(["--quick"] if quick else [])]
    run = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(f"the trial of {name} broke off with {run.returncode}")
    said = run.stdout.splitlines()[-1].replace(sys.executable, "python")
    for folder in (tree, ROOT, ROOT.parent):  # no path of this machine is stored
        said = said.replace(f"{folder}/", "")
    found: Result = json.loads(said)
    found |= {"letter": CLASSES[name], "seconds": round(time.monotonic() - begin, 1)}
    failed = sum(len(group["failed"]) for group in found["groups"])
    say(f"{name}: {sum(group['tried'] for group in found['groups'])} tried, {failed} failed, {found['seconds']} s")
    return found


def one(name: str, *, quick: bool) -> None:
    """In a process of its own: print what became of the cases as JSON."""
    module = importlib.import_module(f"benchmarks.trials.{name}")
    groups = [asdict(found) for found in play(module.cases(quick))]
    section = module.section() if hasattr(module, "section") and not quick else []
    print(json.dumps({"title": module.TITLE, "groups": groups, "section": section}))


def rows_of(results: dict[str, Result]) -> Iterator[Row]:
    for name, found in results.items():
        for group in found["groups"]:
            failed: Sequence[str] = group["failed"]
            for why in failed[:5]:
                say(f"FAILED: {name}: {group['group']}: {why}")
            yield row(f"{found['letter']}: {group['group']}", len(failed), unit=f"failed of {group['tried']}",
                      goal="0", ok=not failed)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of the cases, within two minutes on 2 cores")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of older code to try instead")
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(CLASSES)}; with commas")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one, quick=given.quick)
        return 0
    names = given.only.split(",") if given.only else list(CLASSES)
    results = {name: tried(name, given.before or ROOT, quick=given.quick) for name in names}
    code = print_result(list(rows_of(results)))
    if not given.quick:
        store("before" if given.before else "after", results)
    return 0 if given.before else code


def store(when: str, results: dict[str, Result]) -> None:
    """Keep what other runs found; write the page anew."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored.setdefault(when, {}).update(results)
    STORED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(stored, list(CLASSES)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
