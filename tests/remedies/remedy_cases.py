"""Errors that are provoked, and their remedies followed as they are stated."""

import tempfile
from pathlib import Path

from cases_calls import CALLS
from cases_commands import COMMANDS
from cases_data import DATA
from cases_settings import SETTINGS
from remedy_world import Case, make_world, outcome
from sites import raised_by

CASES: list[Case] = [*SETTINGS, *DATA, *COMMANDS, *CALLS]


def followed_texts() -> set[str]:
    """The messages of the catalogue that the cases provoke."""
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        found = [outcome(case, world) for case in CASES]
    return {text for message, why in found if not why and (text := raised_by(message))}
