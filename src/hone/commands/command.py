"""What a command is: its name, one line of help, its options and what it does."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass


def no_options(parser: argparse.ArgumentParser) -> None:
    """For a command that takes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`hone NAME`."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], None]
    options: Callable[[argparse.ArgumentParser], None] = no_options
    notes: str = ""  # after the options, in the command's own help
    examples: tuple[str, ...] = ()


def show(pairs: Mapping[str, str], *, indent: str = "") -> None:
    """Names and what belongs to them, in two columns."""
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        print(f"{indent}{name:<{width}}  {text}".rstrip())


def first_line(documented: object) -> str:
    """Of its docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def run_action(arguments: argparse.Namespace) -> None:
    """For a command whose actions each say what they do."""
    arguments.action(arguments)
