"""hone replay, report: look at the folder of a run."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hone.commands.command import Command
from hone.errors import HoneError, count_noun

if TYPE_CHECKING:
    from hone.launch.replay import Replay


SHOWN_SAMPLES = 24  # of the last samples
REPLAY_NOTES = """\
An update whose loss or gradient is NaN or infinite is skipped and its rows are kept in RUN_DIR/bad. The run stops after
train.max_bad_updates of them in a row (10) or train.max_bad_total in all (100). The weights are those of the nearest
checkpoint before it: with save.every=1 save.milestones=1 and one update a step, the very ones of the time."""


def _replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the rows of a skipped update, RUN_DIR/bad/step-N.safetensors")
    parser.add_argument("--all", action="store_true", help="every tensor that is not finite, not the first only")
    parser.add_argument("--json", action="store_true", help="one JSON object with all of them instead of the lines")


def _replay(arguments: argparse.Namespace) -> None:
    from hone.launch.replay import replay

    report = replay(arguments.file)
    if arguments.json:
        print(json.dumps(asdict(report), indent=1))
        return
    print(f"step {report.step}, {count_noun(report.rows, 'row')}, weights of {report.weights}")
    for f in report.found if arguments.all else report.found[:1]:
        print(f"{f.met}: {f}")
    if len(report.found) > 1 and not arguments.all:
        print(f"and {len(report.found) - 1} other tensors: --all or --json lists them")
    if not report.found:
        _show_nothing_found(report)


def _show_nothing_found(report: "Replay") -> None:
    """Say why the replay found only finite numbers although the run did not."""
    print(f"all is finite with these weights; in the run: {report.then or 'each micro-batch alone was finite too'}")
    if report.nearer:
        print(f"the weights of the time were not saved: a run with {report.nearer} keeps them")


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument("--out", default="", metavar="FILE", help="where to write it (default: RUN_DIR/report.html)")


def _report(arguments: argparse.Namespace) -> None:
    from hone.log import sinks
    from hone.log.invalid import read_totals
    from hone.report.report import write_report
    from hone.storage import names

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
        samples=samples[-SHOWN_SAMPLES:],
        top=samples,
        invalid=read_totals(folder / names.INVALID),
    )
    print(path)


COMMANDS = (
    Command(
        name="replay",
        help="recompute an update that was skipped, and say which numbers are not finite",
        options=_replay_options,
        run=_replay,
        notes=REPLAY_NOTES,
        examples=("hone replay runs/grpo/bad/step-000012.safetensors",),
    ),
    Command(
        name="report",
        help="write a run's report as one HTML page",
        options=_report_options,
        run=_report,
        examples=("hone report runs/grpo",),
    ),
)
