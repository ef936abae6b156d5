"""hone demo, run, check, resume: what turns a recipe into a run."""

import argparse
import contextlib
import json
import os
import sys
from typing import Any

from hone.commands.command import Command
from hone.config.load import load_recipe
from hone.config.overrides import from_yaml, override
from hone.config.rules import validate
from hone.errors import HoneError

ALLOW = "resume with settings that lead elsewhere than those the run was started with"


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name, FILE.py or FILE.py:function")
    parser.add_argument("settings", nargs="*", default=[], metavar="a.b=value", help="change a setting of the recipe")
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a file; a.b=value comes after it")


def _check_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def _run_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run where its folder has a checkpoint")
    parser.add_argument("--allow-change", action="store_true", help=ALLOW)


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="default: runs/demo")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few steps, no lesson in the numbers")


def _resume_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="a.b=value", help="change a setting, as in train.steps=2000"
    )
    parser.add_argument("--allow-change", action="store_true", help=ALLOW)


def _recipe(arguments: argparse.Namespace) -> Any:
    recipe = load_recipe(arguments.recipe)()
    if arguments.config:
        recipe = from_yaml(arguments.config, recipe)
    recipe = override(recipe, arguments.settings)
    validate(recipe)
    return recipe


def _run(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    from hone import start

    _tell(start.run(recipe, resume=arguments.resume, allow_change=arguments.allow_change))


def _tell(result: object) -> None:
    """Print the result, under torchrun on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(result)


def _check(arguments: argparse.Namespace) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the output of a reward is not part of the report
            recipe = _recipe(arguments)
            from hone.check import suite

            report = suite.check(recipe)
    except HoneError as error:
        if arguments.json:
            print(json.dumps({"recipe": arguments.recipe, "ok": False, "error": str(error), "findings": []}))
        raise
    if arguments.json:
        print(json.dumps(report.plain()))
    else:
        from rich.console import Console

        from hone.check.report import show

        show(report, Console())
    if not report.ok:
        names = ", ".join(f.name for f in report.failures)
        raise HoneError(
            f"{len(report.failures)} of {len(report.findings)} checks failed ({names}): do what each of them says"
        )


def _resume(arguments: argparse.Namespace) -> None:
    if not os.path.isdir(arguments.run_dir):
        raise HoneError(f"no folder {arguments.run_dir}: give the folder of a run, as in runs/NAME")
    from hone import start

    _tell(start.resume(arguments.run_dir, settings=arguments.settings, allow_change=arguments.allow_change))


def _demo(arguments: argparse.Namespace) -> None:
    from hone.demo import journey

    journey.main(seed=arguments.seed, out=arguments.out, quick=arguments.quick)


RUN_NOTES = """\
Ctrl-C or SIGTERM: the run saves after the step it is in and ends with code 130; a second one ends it at once, with what
was saved before. On several GPUs or processes: torchrun --nproc-per-node N -m hone run RECIPE. They share each step's
rows, and with train.shard=fsdp the weights too; the result is that of one process."""

COMMANDS = (
    Command(
        name="demo",
        help="train a small model through every stage on the CPU",
        options=_demo_options,
        run=_demo,
        examples=("hone demo", "hone demo --quick --out runs/quick"),
    ),
    Command(
        name="run",
        help="train what a recipe says",
        options=_run_options,
        run=_run,
        notes=RUN_NOTES,
        examples=(
            "hone run grpo train.steps=200 algo=dapo algo.high=0.3",
            "hone run sft --config settings.yaml --resume",
        ),
    ),
    Command(
        name="check",
        help="examine a recipe's step 0: tokens, masks, rewards, weights, gradients",
        options=_check_options,
        run=_check,
        notes="Nothing is written. Exit code 2 where a check fails.",
        examples=("hone check grpo", "hone check grpo sample.temperature=0.7 --json"),
    ),
    Command(
        name="resume",
        help="continue a run from its last checkpoint",
        options=_resume_options,
        run=_resume,
        examples=("hone resume runs/grpo", "hone resume runs/grpo train.steps=2000"),
    ),
)
