"""hone algos, recipes: what there is to choose from."""

import argparse
from collections.abc import Mapping
from typing import Any

from hone.commands.command import Command, first_line, show
from hone.commands.settings import INDENT, text_width, wrapped, written
from hone.config.load import list_recipes, recipe_file, source, summary
from hone.config.overrides import settings_of, unknown


def _algos_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="of one algorithm: its formula, its paper, what its settings mean"
    )


def _recipes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print the file of one, to begin your own with")


def _recipes(arguments: argparse.Namespace) -> None:
    if arguments.name is None:
        show({name: summary(path) for name, path in list_recipes().items()})
        print("\n`hone recipes NAME` prints one; `hone run NAME a.b=value` runs it with other settings.")
        return
    print(source(recipe_file(arguments.name)).rstrip())


def _algos(arguments: argparse.Namespace) -> None:
    from hone.algo import ALGORITHMS

    if arguments.name is None:
        show({name: first_line(factory) for name, factory in ALGORITHMS.items()})
        print(
            "\n`hone algos NAME` explains one and its settings; `hone run RECIPE algo=NAME algo.SETTING=VALUE` uses it."
        )
        return
    if arguments.name not in ALGORITHMS:
        raise unknown("algorithm", arguments.name, ALGORITHMS)
    print(_explained(arguments.name, settings_of(ALGORITHMS[arguments.name]), width=text_width()))


def _explained(name: str, settings: Mapping[str, Any], *, width: int) -> str:
    """The algorithm's line, its formula, paper and use; then each setting with its default, its meaning and its use."""
    from hone.algo import ALGORITHMS
    from hone.algo.explain import METHODS, setting
    from hone.algo.settings import allowed

    method = METHODS[name]
    lines = [f"{name}: {first_line(ALGORITHMS[name])}"]
    lines += wrapped(f"minimises {method.formula}", width, indent="  ")
    lines += [f"  paper: {method.paper}"]
    lines += [*wrapped(f"use it {method.use}", width, indent="  "), ""]
    if not settings:
        return "\n".join([*lines, "  (no settings)"])
    for one, default in settings.items():
        about, numbers = setting(name, one), allowed(name, one)
        lines.append(f"  algo.{one}={_shown(default)}" + (f"  ({numbers})" if numbers else ""))
        lines += wrapped(f"{about.meaning}.", width, indent=INDENT)
        lines += wrapped(f"change: {about.change}.", width, indent=INDENT)
    return "\n".join(lines)


def _shown(default: Any) -> str:
    if callable(default):
        return getattr(default, "__name__", "required")
    return written(default)


COMMANDS = (
    Command(
        name="algos",
        help="list the algorithms, or explain one and its settings",
        options=_algos_options,
        run=_algos,
        examples=("hone algos", "hone algos dapo"),
    ),
    Command(
        name="recipes",
        help="list the recipes, or print one",
        options=_recipes_options,
        run=_recipes,
        notes="They are those that come with Hone, and the files in ./recipes, which come first.",
        examples=("hone recipes", "hone recipes grpo"),
    ),
)
