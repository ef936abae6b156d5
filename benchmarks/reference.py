"""The pages of docs/reference that come from the code: settings, command line and algorithms.

    python -m benchmarks.reference

`make docs` runs it first; a test says when a page is older than the code. The page of the Python API is made by
mkdocstrings while the site is built.
"""

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

from hone.algo import ALGORITHMS
from hone.algo.explain import METHODS, setting
from hone.algo.settings import allowed
from hone.cli import build_parser
from hone.commands.command import first_line
from hone.commands.reference import all_settings, written
from hone.config.overrides import settings_of
from hone.config.recipe import Recipe

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTE = "<!-- written by `python -m benchmarks.reference`, which `make docs` runs: change the code, not this page -->\n"
COLUMNS = "100"  # of the help texts
KINDS = {  # in the order in which a reader meets them
    "From text and worked answers": ("pretrain", "sft"),
    "Learning what is good": ("reward_model", "pointwise_reward_model", "process_reward_model"),
    "From rewards, without a critic": (
        "reinforce", "reinforce_baseline", "rloo", "reinforce_pp", "reinforce_pp_baseline",
        "grpo", "dr_grpo", "dapo", "gspo", "cispo", "online_dpo", "expert_iteration",
    ),
    "From rewards, with a critic": ("a2c", "trpo", "ppo", "ppo_penalty", "klq"),
    "From a teacher": ("distil",),
    "From stored preferences": ("dpo", "ipo", "kto", "orpo", "simpo"),
}  # fmt: skip


def pages() -> dict[str, str]:
    """Each page's name and text."""
    made = {"settings.md": settings_page(), "cli.md": cli_page(), "algorithms.md": algorithms_page()}
    return {name: text + NOTE for name, text in made.items()}


def cell(text: str) -> str:
    """A text as a table takes it."""
    return " ".join(text.replace("|", "\\|").split())


def settings_page() -> str:
    """`hone settings` as tables."""
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe. On the command line a setting is written `name=value`, as in",
        "`hone run grpo train.steps=20`. `hone settings PREFIX` prints the same in the terminal. The settings of an",
        "algorithm are on [its page](algorithms.md).",
    ]
    known = sorted(all_settings(), key=lambda one: bool(one.group))  # the recipe's own first
    for group, those in groupby(known, key=attrgetter("group")):
        of: Any = type(attrgetter(group)(Recipe())) if group else Recipe
        lines += ["", f"## {group or 'The recipe itself'}", "", sentence(first_line(of)), ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        for one in those:
            choices = f" One of {', '.join(f'`{written(choice)}`' for choice in one.choices)}." if one.choices else ""
            meaning = sentence(cell(one.meaning)) + choices if one.meaning else choices.strip()
            lines.append(f"| `{one.name}` | {shown(one.default)} | {meaning} |")
    return "\n".join([*lines, "", ""])


def shown(default: object) -> str:
    """A default in a table. What has no name on the command line is left empty."""
    if callable(default) or (is_dataclass(default) and not written(default).isidentifier()):
        return ""
    text = cell(written(default)).strip('"')
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """It ends with a full stop.

    >>> sentence("how many"), sentence("Why?")
    ('how many.', 'Why?')
    """
    return text if not text or text[-1] in ".?!:" else f"{text}."


def cli_page() -> str:
    """`hone COMMAND --help` of every command, and of the actions of those that have any."""
    lines = ["# Command line", "", "`hone --help` and the help of every command, as the terminal prints them.", ""]
    with mock.patch.dict(os.environ, {"COLUMNS": COLUMNS, "NO_COLOR": "1"}):
        for name, parser in parsers(build_parser()):
            depth = "##" if name.count(" ") < 2 else "###"
            lines += [
                f"{depth} {name}",
                "",
                "```help",
                re.sub(r"[ \t]+\n", "\n", parser.format_help()).strip(),
                "```",
                "",
            ]
    return "\n".join(lines)


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and those of its commands."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from parsers(inner)


def algorithms_page() -> str:
    """Each algorithm with what it minimises, when to use it, its paper and its settings."""
    lines = [
        "# Algorithms",
        "",
        "Each algorithm is a function of `hone.algo`. Its keyword arguments are its settings. In Python,",
        "`hone.algo.grpo(beta=0.0)` is what `algo=grpo algo.beta=0` is on the command line. `hone algos NAME` prints",
        "what this page says of one.",
        "",
        "In the formulas `pi` is the model in training. `pi_old` is the model that sampled. `ref` is the frozen model",
        "that the run started from. `r = pi/pi_old` is a token's ratio and `A` its advantage. `R` is a reward and `V`",
        "the critic's value. For a pair, `u = log pi/ref (chosen) - log pi/ref (rejected)`.",
        "",
        "## Which one?",
        "",
        "| algorithm | use it |",
        "|---|---|",
    ]
    names = [name for those in KINDS.values() for name in those]
    lines += [f"| [{name}](#{name}) | {cell(METHODS[name].use)} |" for name in names]
    for kind, those in KINDS.items():
        lines += ["", f"## {kind}"]
        for name in those:
            lines += ["", *algorithm(name)]
    return "\n".join([*lines, "", ""])


def algorithm(name: str) -> Iterator[str]:
    """The part of the page about one."""
    factory, method = ALGORITHMS[name], METHODS[name]
    yield f"### {name}"
    yield ""
    yield sentence(first_line(factory))
    yield ""
    yield f"- **Minimises** `{method.formula}`"
    yield f"- **Use it** {method.use}."
    yield f"- **Paper**: {method.paper}."
    yield f"- **Source**: `{source_of(factory)}`."
    if settings := settings_of(factory):
        yield from ("", "| set it as | default | range | meaning | when to change it |", "|---|---|---|---|---|")
        for one, default in settings.items():
            about, numbers = setting(name, one), allowed(name, one)
            value = getattr(default, "__name__", "") if callable(default) else written(default)
            words = f"{sentence(cell(about.meaning))} | {sentence(cell(about.change))}"
            yield f"| `algo.{one}` | `{cell(value)}` | {cell(str(numbers)) if numbers else ''} | {words} |"


def source_of(factory: Any) -> str:
    """algo/online.py"""
    module = inspect.unwrap(factory).__module__
    return module.removeprefix("hone.").replace(".", "/") + ".py"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
