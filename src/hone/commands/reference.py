"""hone algos, recipes, settings: lists of them, and the meaning of each setting."""

import argparse
import ast
import inspect
import io
import shutil
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hone.commands.command import Command, first_line, show
from hone.config.load import list_recipes, recipe_file, source, summary
from hone.config.overrides import OTHER_FRAMEWORKS, Choice, did_you_mean, settings_of, unknown
from hone.config.recipe import Recipe
from hone.errors import HoneError

WIDTH = 120  # the most columns of a line that is easy to read
INDENT = " " * 6


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSetting:
    """A setting by its dotted name."""

    name: str
    default: Any
    meaning: str
    choices: tuple[Any, ...] = ()  # if there are only a few

    @property
    def group(self) -> str:
        """The part of the recipe that the setting belongs to, "" for the recipe itself."""
        return self.name.rpartition(".")[0]

    def matches(self, prefix: str) -> bool:
        """Whether the name begins with the prefix, or the prefix names a part of it: algo.high is part of algo."""
        return self.name.startswith(prefix) or prefix.startswith(f"{self.name}.")

    def shown(self, width: int) -> str:
        """Its default as on the command line, and below it the meaning, in lines of `width` columns."""
        choices = f"  ({', '.join(map(written, self.choices))})" if self.choices else ""
        meaning = wrapped(self.meaning, width, indent=INDENT)
        return "\n".join([f"  {self.name}={written(self.default)}{choices}", *meaning])


def wrapped(text: str, width: int, *, indent: str) -> list[str]:
    """Indented lines of `width` columns."""
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return [indent + line for line in lines]


def text_width() -> int:
    """The columns of the terminal, at most WIDTH."""
    return min(WIDTH, shutil.get_terminal_size().columns)


def all_settings(config: Any = None, above: str = "") -> Iterator[RecipeSetting]:
    """All settings of a recipe, in the order of its source."""
    config = Recipe() if config is None else config
    hints, comments = get_type_hints(type(config)), meanings(type(config))
    for field in fields(config):
        value, hint, name = getattr(config, field.name), hints[field.name], f"{above}{field.name}"
        if is_dataclass(value) and not isinstance(value, Choice):
            yield from all_settings(value, f"{name}.")
        else:
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            yield RecipeSetting(name=name, default=value, meaning=comments.get(field.name, ""), choices=choices)


def meanings(kind: type) -> dict[str, str]:
    """The comments of each field that has any, by its name."""
    return field_comments(inspect.getsource(kind))


def field_comments(source: str) -> dict[str, str]:
    """The comments of each field in a class's source: the lines right above it and the one beside it."""
    source = textwrap.dedent(source)
    beside, alone = dict[int, str](), dict[int, str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            place = beside if token.line[: token.start[1]].strip() else alone
            place[token.start[0]] = token.string.removeprefix("#").strip()
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comments = dict[str, str]()
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            lines = [alone[i] for i in range(first, node.lineno)] + [beside[i] for i in own if i in beside]
            comments[node.target.id] = " ".join(lines)
    return {name: meaning for name, meaning in comments.items() if meaning}


def written(value: Any) -> str:
    """A default as a.b=value takes it.

    >>> written(None), written(True), written((0.9, 0.95)), written(""), written(Choice("grpo"))
    ('none', 'true', '0.9,0.95', '""', 'grpo')
    """
    if isinstance(value, Choice):
        return value.name
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value) or '""'


def _settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="only settings that begin like this")


def _settings(arguments: argparse.Namespace) -> None:
    settings, prefix = sorted(all_settings(), key=lambda s: bool(s.group)), arguments.prefix  # the recipe's own first
    matches = [setting for setting in settings if setting.matches(prefix)]
    if not matches:
        raise _no_setting(prefix, [setting.name for setting in settings])
    width = text_width()
    blocks = [_block(group, list(those), width) for group, those in groupby(matches, key=attrgetter("group"))]
    print(matches[0].shown(width) if len(matches) == 1 else "\n\n".join(blocks))


def _no_setting(prefix: str, names: Sequence[str]) -> HoneError:
    group = prefix[: prefix.rfind(".") + 1]
    inside = [name for name in names if name.startswith(group)] or names
    ends = [name for name in names if name.endswith(f".{prefix}")]
    groups = list(dict.fromkeys(name.partition(".")[0] for name in names))
    meant = OTHER_FRAMEWORKS.get(prefix) or next(iter(ends), "")
    hint = ("" if group or meant else did_you_mean(prefix, groups)) or did_you_mean(prefix, inside, meant=meant)
    return HoneError(f"no setting {prefix!r}{hint or ';'} `hone settings` lists them all")


def _block(group: str, settings: Sequence[RecipeSetting], width: int) -> str:
    """The settings of one group, below the docstring of its dataclass."""
    of = type(attrgetter(group)(Recipe())) if group else Recipe
    head = f"{group or 'recipe'}: {first_line(of)}"
    return "\n".join([textwrap.fill(head, width), *(setting.shown(width) for setting in settings)])


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
    Command(
        name="settings",
        help="list the settings of a recipe: their names, defaults and meanings",
        options=_settings_options,
        run=_settings,
        notes="`hone algos NAME` explains those of an algorithm, which are set as algo.SETTING=VALUE.",
        examples=("hone settings", "hone settings train", "hone settings train.recompute"),
    ),
)
