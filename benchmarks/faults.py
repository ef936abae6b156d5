"""Seeded faults: every one of the catalogue must be caught, by the tests or by `hone check`.

The full run writes docs/dev/faults.md. --quick injects a sample that is always the same.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.catalogue import FAULTS, Edit, Fault, Sight
from benchmarks.catalogue.world import make_world
from benchmarks.form import Row, main, row
from benchmarks.patched import ROOT, WORKERS, Bench, bench

PAGE = ROOT / "docs" / "dev" / "faults.md"
QUICK = 12  # faults in a quick run
LIMIT = 120.0  # seconds for one fault
KINDS = {".py", ".cpp", ".h"}  # of files that a fault may change
Report = dict[str, Any]  # what `hone check --json` prints


@dataclass(frozen=True, slots=True)
class Result:
    """Whether and by whom a fault was caught."""

    fault: Fault
    caught: bool
    by: str
    seconds: float


def patch_of(on: Bench, fault: Fault) -> dict[str, str]:
    """The whole text of every file of the source that the fault changes."""
    texts: dict[str, str] = {}
    for edit in fault.source:
        path = file_of(on, edit)
        texts[path] = edit.apply(texts.get(path) or on.source(path))
    return texts


def file_of(on: Bench, edit: Edit) -> str:
    """The path below src of the only file that has the text: in the place that the edit names, else anywhere."""
    source = on.root / "src"
    every = sorted(path for path in (source / "hone").rglob("*") if path.suffix in KINDS)
    having = [path for path in every if edit.old in path.read_text(encoding="utf-8")]
    found = [path for path in having if path.is_relative_to(source / "hone" / edit.file)] or having
    if len(found) != 1:
        raise ValueError(f"{len(found)} files of src/hone have: {edit.old!r}")
    return str(found[0].relative_to(source))


def inject(on: Bench, fault: Fault, project: Path) -> Result:
    """Run the fault's tests and `hone check` on the patched source and project."""
    seconds, caught = 0.0, list[str]()
    if fault.tests:
        verdict = on.verdict(patch_of(on, fault), [f"tests/{t}" for t in fault.tests], limit=LIMIT)
        seconds += verdict.seconds
        caught += [verdict.by.removeprefix("tests/") or verdict.how] if verdict.red else []
    if fault.sight:
        start = time.monotonic()
        with on.tree(patch_of(on, fault)) as place:
            report = examine(fault, project=project, place=place)
        seconds += time.monotonic() - start
        caught += [seen] if (seen := seen_in(report, fault.sight)) else []
    return Result(fault, len(caught) == bool(fault.tests) + bool(fault.sight), " and ".join(caught), seconds)


def examine(fault: Fault, *, project: Path, place: Path) -> Report:
    """`hone check` on a copy of the project with the fault in it; what it says on stdout, or on stderr."""
    sight = fault.sight or Sight()
    folder = place / "project"
    shutil.copytree(project, folder)
    for edit in fault.project:
        file = folder / edit.file
        file.write_text(edit.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
    command = [sys.executable, "-m", "hone", "check", f"recipes.py:{sight.recipe}", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["nice", "-n", "19", *command, *sight.settings, *fault.settings],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    said = done.stdout.strip()
    return json.loads(said.splitlines()[-1]) if said else {"findings": [], "error": done.stderr.strip()}


def seen_in(report: Report, sight: Sight) -> str:
    """By which words of the report the fault is seen, "" for none."""
    for finding in report["findings"]:
        if sight.finding and finding["name"] == sight.finding and finding["verdict"] in ("warn", "fail"):
            return f"hone check: {finding['name']}"
    error = report.get("error") or ""
    return "hone check: refused" if sight.refusal and sight.refusal in error else ""


def check_green(on: Bench, faults: Sequence[Fault], project: Path) -> None:
    """Without a fault tests are green and `hone check` passes, or red would mean nothing."""
    files = sorted({test for fault in faults for test in fault.tests})
    for name, verdict in on.each(lambda name: on.verdict({}, [f"tests/{name}"], limit=2 * LIMIT), files):
        if verdict.red:
            raise SystemExit(f"faults: tests/{name} is {verdict.how} without any fault: {verdict.by} {verdict.why}")
    sights = [f for f in faults if f.sight]
    plain = {(f.sight.recipe, f.sight.settings): f.sight for f in sights if f.sight and not f.project}

    def look(sight: Sight) -> Report:
        with on.tree({}) as place:
            return examine(Fault(name="none", mimics="", where="recipe", sight=sight), project=project, place=place)

    for sight, report in on.each(look, plain.values()):
        loud = [f for f in report["findings"] if f["verdict"] in ("warn", "fail")]
        if loud or report.get("error"):
            what = loud[0] if loud else report["error"]
            raise SystemExit(f"faults: hone check of {sight.recipe} {sight.settings} without any fault: {what}")


def check_fits(on: Bench, faults: Sequence[Fault]) -> None:
    """Every patch finds its text exactly once, or the catalogue has rotted."""
    for fault in faults:
        try:
            patch_of(on, fault)
        except ValueError as error:
            raise SystemExit(f"faults: {fault.name!r} no longer fits the source: {error}") from error


def page(results: Sequence[Result], seconds: float) -> str:
    """docs/dev/faults.md"""
    caught = sum(r.caught for r in results)
    lines = [
        *HEAD,
        "",
        f"{len(results)} faults, {caught} caught, in {seconds / 60:.1f} minutes on {WORKERS} cores.",
        "",
        "| fault | mimics | where | caught by | seconds |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.fault.name} | {r.fault.mimics} | {r.fault.where} | {_cell(r)} | {r.seconds:.1f} |"
        for r in sorted(results, key=lambda r: FAULTS.index(r.fault))
    ]
    return "\n".join([*lines, ""])


def _cell(r: Result) -> str:
    return f"`{r.by.replace('|', '/')}`" if r.caught else "**not caught**"


HEAD = """# Seeded faults

`make faults` (`python -m benchmarks.faults`) writes this page. Each fault is a small patch of the kind that other
frameworks have shipped, or that a user can make. It is put into a copy of the source, and a test must go red that is
green without it; or into a small project of a user, on which `hone check` must warn, fail or refuse, and says nothing
without it. Where both are named, both caught it. "pain n" is a row of [pains.md](pains.md),
"contract" a line of [contract.md](../contract.md).

## Dropped since 801c4f8

The catalogue of commit 801c4f8 had 248 faults. Three of them are gone, because the code that they broke is gone. Two
are new: "a row that a stop string ended counts as truncated", and "training under top-p does not know what the sampler
kept".

- "a prompt half read when the weights changed is shared with later ones": an engine ends with its weights (90380e5), so
  nothing that it has read outlives them.
- "top-p is allowed in training" and "top-p while training": both broke the refusal of top-p. Training under top-p is
  allowed now, and exact (917daf3). The second of the new faults took their place.

## The faults
""".splitlines()


def measure(quick: bool) -> list[Row]:
    """A sample, or all of them and the page."""
    start = time.monotonic()
    # by name: a fault more in the catalogue does not change the sample, and with it the time
    chosen = sorted(FAULTS, key=lambda fault: crc32(fault.name.encode()))[:QUICK] if quick else list(FAULTS)
    results: list[Result] = []
    with bench() as on:
        check_fits(on, FAULTS)
        project = on.folder / "project"
        project.mkdir()
        make_world(project)
        check_green(on, chosen, project)
        for fault, result in on.each(lambda fault: inject(on, fault, project), chosen):
            results.append(result)
            said = f"caught by {result.by}" if result.caught else "NOT CAUGHT"
            print(f"{len(results)}/{len(chosen)} {fault.name}: {said} ({result.seconds:.1f} s)", file=sys.stderr)
    seconds = time.monotonic() - start
    if not quick:
        PAGE.write_text(page(results, seconds), encoding="utf-8")
    missed = [r.fault.name for r in results if not r.caught]
    return [
        row(
            "faults", len(results), unit="faults", goal=">= 40" if not quick else "> 0", ok=quick or len(results) >= 40
        ),
        row("caught", len(results) - len(missed), unit="faults", goal=f"{len(results)}", ok=not missed),
        row("time", seconds, unit="s", goal="<= 600", ok=seconds <= 600),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
