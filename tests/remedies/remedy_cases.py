"""Errors that are provoked, and their remedies followed as they are stated."""

import tempfile
from pathlib import Path

from cases_calls import CALLS
from cases_chat import CHAT
from cases_commands import COMMANDS
from cases_corpus import CORPUS
from cases_data import DATA
from cases_files import READ
from cases_formats import FORMATS
from cases_machines import MACHINES
from cases_models import MODELS
from cases_recipes import RECIPES
from cases_rewards import REWARDED
from cases_runs import RUNS
from cases_serving import SERVING
from cases_settings import SETTINGS
from remedy_world import Case, make_world, outcome
from sites import raised_by

CASES: list[Case] = [
    *SETTINGS, *RECIPES, *DATA, *READ, *CHAT, *COMMANDS, *CORPUS, *REWARDED, *MODELS, *FORMATS,
    *SERVING, *RUNS, *MACHINES, *CALLS,
]  # fmt: skip


def followed_texts() -> set[str]:
    """The messages of the catalogue that the cases provoke."""
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        found = [(case.says, *outcome(case, world)) for case in CASES]
    return {text for says, message, why in found if not why and (text := raised_by(message, says))}
