"""How a run starts and goes on: `hone.run` and `hone.resume`. The cheap checks come first, then the steps."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hone.check import suite
from hone.checkpoint import run_folder
from hone.checkpoint.record import recorded_recipe
from hone.config.overrides import override
from hone.config.recipe import Recipe
from hone.errors import HoneError
from hone.launch import train
from hone.launch.job import Run
from hone.storage import files, names


def run(recipe: Recipe, *, resume: bool = False, allow_change: bool = False) -> Path:
    """Train what the recipe says; returns the folder of the finished model, ready to load.

    Under torchrun every process is a rank of one run, and the first of them prints and writes.
    allow_change: a run that is resumed may go on with settings that lead elsewhere than those it was started with.
    """
    return train.run(recipe, examine=_check_first, resume=resume, allow_change=allow_change)


def resume(run_dir: str | Path, *, settings: Sequence[str] = (), allow_change: bool = False) -> Path:
    """Continue a run from its last whole checkpoint, with the settings it was started with.

    settings: changes to them, `a.b=value`; those that lead elsewhere have to be allowed.
    """
    folder = Path(run_dir)
    recipe = override(recorded_recipe(folder), settings)
    if recipe.run_dir.resolve() != folder.resolve():
        raise HoneError(f"name and out say where a run lies: leave them out, or move {folder} there first")
    if not files.checkpoints(folder / names.CHECKPOINTS):
        raise HoneError(f"{folder} has no checkpoint to continue from: start it again with `hone run`")
    return run(recipe, resume=True, allow_change=allow_change)


def _check_first(job: Run) -> None:
    """The cheap checks of `hone check`: what is wrong is said before anything is written, the rest is noted."""
    findings = suite.cheap(job)
    for f in findings:
        if f.verdict == "fail":
            raise HoneError(f"{f.name}: {f.seen}: {f.remedy} (`hone check` says more)")
    for f in findings:
        if f.verdict == "warn" and run_folder.is_first():
            print(f"{job.recipe.name}: warn: {f.name}: {f.seen}: {f.remedy}", file=sys.stderr)
