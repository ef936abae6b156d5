"""hone replay: where an update that was skipped stops being finite."""

import argparse
import json
from dataclasses import asdict

from hone.commands.command import Command


def _replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the rows of a skipped update, RUN_DIR/bad/step-N.safetensors")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the lines")


def _replay(arguments: argparse.Namespace) -> None:
    from hone.replay import replay

    report = replay(arguments.file)
    if arguments.json:
        print(json.dumps(asdict(report), indent=1))
        return
    print(f"step {report.step}, {report.rows} rows, weights of {report.weights}")
    for f in report.found:
        where = "" if f.micro < 0 else f"micro-batch {f.micro}: "
        print(f"{where}{f}")
    if not report.found:
        print(f"all is finite with these weights; in the run: {report.then or 'each micro-batch alone was finite too'}")


NOTES = """\
An update whose loss or gradient is NaN or infinite is skipped and its rows are kept in RUN_DIR/bad. The run stops after
train.max_bad_updates of them in a row (10) or train.max_bad_total in all (100)."""

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
