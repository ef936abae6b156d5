"""hone report: a run's curves, reward-hacking view and samples as one page."""

import argparse
import json
from pathlib import Path
from typing import Any

from hone.commands.command import Command
from hone.errors import HoneError


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument("--out", default="", metavar="FILE", help="where to write it (default: RUN_DIR/report.html)")


def _run(arguments: argparse.Namespace) -> None:
    from hone import rundir
    from hone.log.report import write_report

    folder = Path(arguments.run_dir)
    rows = _rows(folder / rundir.METRICS)
    if not rows:
        raise HoneError(f"{folder} has no {rundir.METRICS} to report on: give the folder of a run")
    samples = [{**sample, "stage": folder.name} for sample in _rows(folder / rundir.SAMPLES)]
    path = write_report(
        arguments.out or folder / "report.html",
        title=f"Hone: {folder.name}",
        table=[],
        runs={folder.name: rows},
        samples=samples[-SHOWN:],
        top=samples,
    )
    print(path)


SHOWN = 24  # of the last samples


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; a last line that is being written is left out."""
    found = list[dict[str, Any]]()
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # bad UTF-8 too: the end of a line that a crash cut
            continue
    return [row for row in found if isinstance(row, dict)]


COMMANDS = (
    Command(
        name="report",
        help="write a run's report as one HTML page",
        options=_options,
        run=_run,
        examples=("hone report runs/grpo",),
    ),
)
