"""hone replay: where an update that was skipped stops being finite."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from hone.commands.command import Command
from hone.errors import counted

if TYPE_CHECKING:
    from hone.launch.replay import Replay


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
    print(f"step {report.step}, {counted(report.rows, 'row')}, weights of {report.weights}")
    for f in report.found if arguments.all else report.found[:1]:
        print(f"{f.met}: {f}")
    if len(report.found) > 1 and not arguments.all:
        print(f"and {len(report.found) - 1} other tensors: --all or --json lists them")
    if not report.found:
        _nothing(report)


def _nothing(report: "Replay") -> None:
    """Why none is found though the run found one."""
    print(f"all is finite with these weights; in the run: {report.then or 'each micro-batch alone was finite too'}")
    if report.nearer:
        print(f"the weights of the time were not saved: a run with {report.nearer} keeps them")


NOTES = """\
An update whose loss or gradient is NaN or infinite is skipped and its rows are kept in RUN_DIR/bad. The run stops after
train.max_bad_updates of them in a row (10) or train.max_bad_total in all (100). The weights are those of the nearest
checkpoint before it: with save.every=1 save.milestones=1 and one update a step, the very ones of the time."""

COMMANDS = (
    Command(
        name="replay",
        help="recompute an update that was skipped, and say which numbers are not finite",
        options=_replay_options,
        run=_replay,
        notes=NOTES,
        examples=("hone replay runs/grpo/bad/step-000012.safetensors",),
    ),
)
