"""The command line: reads arguments, calls the library, turns errors into one line. torch is imported by a command,
never by this module, so that help is instant."""

import argparse
import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hone.config import from_yaml, override, settings_of, unknown
from hone.errors import HoneError, Interrupted
from hone.load import list_recipes, load_recipe, summary
from hone.recipe import validate

EPILOG = """\
examples:
  hone demo                                   the whole journey on the CPU, in minutes
  hone run recipes/grpo.py train.steps=200    a recipe with one setting changed
  hone check recipes/grpo.py                  is what will be trained what you meant?
  hone resume runs/grpo                       go on after Ctrl-C
  hone algos dapo                             what dapo can be set to
"""
REMEDIES = {
    errno.ENOSPC: "; free some space, then continue with `hone resume RUN_DIR`",
    errno.EDQUOT: "; free some space, then continue with `hone resume RUN_DIR`",
    errno.EACCES: "; choose a folder that you may write to, with out=FOLDER",
    errno.EPERM: "; choose a folder that you may write to, with out=FOLDER",
    errno.EROFS: "; choose a folder that you may write to, with out=FOLDER",
    errno.ENOTDIR: "; a file is in the way, choose another path",
    errno.EEXIST: "; a file is in the way, choose another path",
    errno.EISDIR: "; give a file, not a folder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 something to put right, 130 interrupted, 1 a bug."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    # Read when torch is loaded. Threads that wait by spinning slow training down tenfold on cores that are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        arguments.command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if arguments.debug:
            traceback.print_exc()
        code, message = _explain(error)
        print(f"hone: {' '.join(message.split())}", file=sys.stderr)
        return code
    return 0


def _explain(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted; nothing new was saved"
    if isinstance(error, Interrupted):
        return 130, str(error)
    if isinstance(error, HoneError):
        return 2, f"error: {error}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return 2, f"error: {where}{error.strerror or error}{REMEDIES.get(error.errno or 0, '')}"
    kind = type(error).__name__
    return 1, f"error: {kind}: {error} (a bug in Hone or in your own code: --debug shows the traceback)"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "command"):
        parser.print_help()
        parser.exit(2)
    # argparse takes `a=1 --resume b=2` for two lists and refuses the second.
    settings = [text for text in rest if "=" in text and not text.startswith("-")]
    if len(settings) < len(rest) or (rest and not hasattr(arguments, "settings")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if settings:
        arguments.settings = [*arguments.settings, *settings]
    arguments.debug = getattr(arguments, "debug", False)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    parser = argparse.ArgumentParser(
        prog="hone",
        description="From pre-training to verified reasoning: language-model training whose numbers you can check.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hone {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, parents=[common], allow_abbrev=False)
        sub.set_defaults(command=command)
        return sub

    _demo_options(add("demo", _demo, "train a small model through every stage on the CPU"))
    _run_options(add("run", _run, "train what a recipe says"))
    _check_options(add("check", _check, "examine a recipe's step 0: tokens, masks, rewards, weights, gradients"))
    add("resume", _resume, "continue a run from its last checkpoint").add_argument("run_dir", metavar="RUN_DIR")
    _eval_options(add("eval", _eval, "score a model on a file of problems"))
    algos = add("algos", _algos, "list the algorithms, or the settings of one")
    algos.add_argument("name", nargs="?", metavar="NAME")
    add("recipes", _recipes, "list the built-in recipes")
    return parser


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("hone")
    except metadata.PackageNotFoundError:
        return "(from the source tree)"


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name, FILE.py or FILE.py:function")
    parser.add_argument("settings", nargs="*", metavar="a.b=value", help="change a setting of the recipe")
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a file; a.b=value comes after it")


def _check_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def _run_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run where its folder has a checkpoint")


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("data", metavar="DATA.jsonl")
    parser.add_argument("--reward", default="math", help="verifier, or FILE.py:function (default: math)")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="samples a problem (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1.0")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="a completion (default: 64)")


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="default: runs/demo")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few steps, no lesson in the numbers")


def _recipe(arguments: argparse.Namespace) -> Any:
    recipe = load_recipe(arguments.recipe)()
    if arguments.config:
        recipe = from_yaml(arguments.config, recipe)
    recipe = override(recipe, arguments.settings)
    validate(recipe)
    return recipe


def _run(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    from hone import runner

    print(runner.run(recipe, resume=arguments.resume))


def _check(arguments: argparse.Namespace) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a reward prints is no part of the report
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

        from hone.check.show import show

        show(report, Console())
    if not report.ok:
        names = ", ".join(f.name for f in report.failures)
        raise HoneError(f"{len(report.failures)} of {len(report.findings)} checks failed: {names}")


def _resume(arguments: argparse.Namespace) -> None:
    if not os.path.isdir(arguments.run_dir):
        raise HoneError(f"no folder {arguments.run_dir}: give the folder of a run, as in runs/NAME")
    from hone import runner

    print(runner.resume(arguments.run_dir))


def _eval(arguments: argparse.Namespace) -> None:
    from hone import runner

    result: Mapping[str, Any] = runner.evaluate(
        arguments.model,
        arguments.data,
        reward=arguments.reward,
        samples=arguments.samples,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
    )
    width = max(map(len, result), default=0)
    for name, value in result.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")


def _demo(arguments: argparse.Namespace) -> None:
    from hone.demo import journey

    journey.main(seed=arguments.seed, out=arguments.out, quick=arguments.quick)


def _recipes(arguments: argparse.Namespace) -> None:
    found = list_recipes()
    if not found:
        raise HoneError("there are no recipes here: run this in the folder that has recipes/")
    width = max(map(len, found))
    for name, path in found.items():
        print(f"{name:<{width}}  {summary(path)}")


def _algos(arguments: argparse.Namespace) -> None:
    from hone.algo import ALGORITHMS

    if arguments.name is None:
        width = max(map(len, ALGORITHMS))
        for name, factory in ALGORITHMS.items():
            print(f"{name:<{width}}  {_first_line(factory)}")
        print("\n`hone algos NAME` lists the settings of one; `hone run RECIPE algo=NAME algo.SETTING=VALUE` uses it.")
        return
    if arguments.name not in ALGORITHMS:
        raise unknown("algorithm", arguments.name, ALGORITHMS)
    factory = ALGORITHMS[arguments.name]
    print(f"{arguments.name}: {_first_line(factory)}")
    settings = settings_of(factory)
    width = max(map(len, settings), default=0)
    for name, default in settings.items():
        print(f"  {name:<{width}}  {_shown(default)}")
    if not settings:
        print("  (no settings)")


def _first_line(factory: Callable[..., Any]) -> str:
    return (factory.__doc__ or "").strip().partition("\n")[0]


def _shown(default: Any) -> str:
    if callable(default):
        return getattr(default, "__name__", "required")
    return "none" if default is None else str(default)
