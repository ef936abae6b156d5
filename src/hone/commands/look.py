"""hone algos, recipes: what there is to choose from."""

import argparse
from typing import Any

from hone.commands.command import Command, first_line, show
from hone.config import settings_of, unknown
from hone.errors import HoneError
from hone.load import list_recipes, summary


def _algos_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="of one algorithm: list its settings")


def _recipes(arguments: argparse.Namespace) -> None:
    found = list_recipes()
    if not found:
        raise HoneError("there are no recipes here: run this in the folder that has recipes/")
    show({name: summary(path) for name, path in found.items()})


def _algos(arguments: argparse.Namespace) -> None:
    from hone.algo import ALGORITHMS

    if arguments.name is None:
        show({name: first_line(factory) for name, factory in ALGORITHMS.items()})
        print("\n`hone algos NAME` lists the settings of one; `hone run RECIPE algo=NAME algo.SETTING=VALUE` uses it.")
        return
    if arguments.name not in ALGORITHMS:
        raise unknown("algorithm", arguments.name, ALGORITHMS)
    factory = ALGORITHMS[arguments.name]
    print(f"{arguments.name}: {first_line(factory)}")
    settings = {name: _shown(default) for name, default in settings_of(factory).items()}
    show(settings or {"(no settings)": ""}, indent="  ")


def _shown(default: Any) -> str:
    if callable(default):
        return getattr(default, "__name__", "required")
    return "none" if default is None else str(default)


COMMANDS = (
    Command(
        name="algos",
        help="list the algorithms, or the settings of one",
        options=_algos_options,
        run=_algos,
        examples=("hone algos", "hone algos dapo"),
    ),
    Command(name="recipes", help="list the built-in recipes", run=_recipes),
)
