"""What a command is: its name, one line of help, its options and what it does."""

import argparse
from collections.abc import Callable
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
