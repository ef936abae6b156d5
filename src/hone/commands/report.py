"""hone report: a run's curves, reward-hacking view and samples as one page."""

import argparse
from pathlib import Path

from hone.commands.command import Command
from hone.errors import HoneError

SHOWN = 24  # of the last samples


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument("--out", default="", metavar="FILE", help="where to write it (default: RUN_DIR/report.html)")


def _run(arguments: argparse.Namespace) -> None:
    from hone.checkpoint import names
    from hone.log import sinks
    from hone.log.invalid import totals
    from hone.report.report import write_report

    folder = Path(arguments.run_dir)
    rows = sinks.read(folder / names.METRICS)
    if not rows:
        raise HoneError(f"{folder} has no {names.METRICS} to report on: give the folder of a run")
    samples = [{**sample, "stage": folder.name} for sample in sinks.read(folder / names.SAMPLES)]
    path = write_report(
        arguments.out or folder / names.REPORT,
        title=f"Hone: {folder.name}",
        table=[],
        runs={folder.name: rows},
        samples=samples[-SHOWN:],
        top=samples,
        invalid=totals(folder / names.INVALID),
    )
    print(path)


COMMANDS = (
    Command(
        name="report",
        help="write a run's report as one HTML page",
        options=_options,
        run=_run,
        examples=("hone report runs/grpo",),
    ),
)
