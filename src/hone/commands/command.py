"""What a command is, and the parser of every command.

Options are written in full, and an error for an unknown name suggests the nearest one.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hone.config.overrides import unknown
from hone.errors import HoneError

DEBUG = "show the traceback of an error"
EXAMPLES = "examples:"


def no_options(parser: argparse.ArgumentParser) -> None:
    """No options: for a command that takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`hone NAME`."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], None]
    options: Callable[[argparse.ArgumentParser], None] = no_options
    notes: str = ""  # after the options, in the command's own help
    examples: tuple[str, ...] = ()


def show(pairs: Mapping[str, str]) -> None:
    """Print names and their descriptions in two columns."""
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        print(f"{name:<{width}}  {text}".rstrip())


def first_line(documented: object) -> str:
    """The first line of the docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def check_port(port: int) -> None:
    """HoneError where a server cannot listen there."""
    if not 0 <= port < 2**16:
        raise HoneError(f"--port is {port}: set it between 0 (any that is free) and 65535")


def run_action(arguments: argparse.Namespace) -> None:
    """For a command whose actions each say what they do."""
    arguments.action(arguments)


# --- the parser ---


class Formatter(argparse.HelpFormatter):
    """Paragraphs are filled as usual; examples stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(p if p.startswith(EXAMPLES) else fill(p, width, indent) for p in paragraphs)


class Parser(argparse.ArgumentParser):
    """argparse's parser, with `--debug` for every command. `parser` in its result is the innermost parser used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Formatter, **settings})
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG)
        self.set_defaults(parser=self)

    def refuse(self, left: Sequence[str], *, settings: bool) -> NoReturn:
        """End with an error about arguments that are left over; settings: the command takes a.b=value."""
        option = next((text for text in left if text.startswith("-")), None)
        if option is None:
            self.error(f"{left[0]!r} is one argument too many: leave it out, or see {self.prog} --help")
        name, _, value = option.partition("=")
        hint = f"; a setting is written {name.lstrip('-')}={value or 'VALUE'}" if settings and "." in name else ""
        long = [known for known in self._option_string_actions if known.startswith("--")]
        self.error(f"{unknown('option', name, long, owner=self.prog)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = str(action.metavar or "value").lower()
            raise argparse.ArgumentError(None, str(unknown(kind, str(value), action.choices)))


def add_command(commands: Any, name: str, help: str, *, notes: str = "", examples: Sequence[str] = ()) -> Parser:
    """Add a command of `hone`, or an action of a command; notes: text below the options in its help."""
    shown = "\n  ".join((EXAMPLES, *examples)) if examples else ""
    epilog = "\n\n".join(filter(None, (notes, shown)))
    return commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", epilog=epilog)


def add_actions(parser: argparse.ArgumentParser) -> Any:
    """Let the parser have actions, one of which must be named."""
    return parser.add_subparsers(title="actions", metavar="ACTION", required=True)
