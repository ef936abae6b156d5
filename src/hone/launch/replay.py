"""A skipped update computed again: the rows that a run kept, on the weights it had or the nearest before them."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hone.checkpoint.record import recorded_recipe
from hone.checkpoint.state import restore_weights
from hone.config.recipe import Recipe
from hone.errors import count_noun
from hone.launch import build
from hone.launch.job import load_start, make_learner, torch_settings
from hone.launch.rescue import nearest_checkpoint
from hone.model.policy import Policy
from hone.model.scorer import Scorer
from hone.storage import names
from hone.train.annotate import keep_old_policy
from hone.train.guard import NonFiniteTensor, load_rows
from hone.train.update import explain_skip

UNREAD = ("data", "eval_data", "reward")  # the rows are there already, with their rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What is not finite, in the order in which it is computed."""

    step: int
    rows: int
    weights: str  # where they are from, and how far from those of the time
    found: list[NonFiniteTensor]
    then: str  # what was first found in the run
    nearer: str = ""  # settings under which a run keeps the very weights, where these are others


def replay(file: str | Path, *, recipe: Recipe | None = None) -> Replay:
    """Compute the update again as far as its gradients; nothing is stepped or written.

    recipe: the run's own, for one whose algorithm was made in Python.
    """
    path = Path(file)
    batch, about = load_rows(path)
    folder = path.resolve().parent.parent
    recipe = recipe or recorded_recipe(
        folder, unread=UNREAD, how="replay it with hone.launch.replay.replay(file, recipe=recipe)"
    )
    with torch_settings(recipe):
        algo = build.algorithm(recipe)
        saved, late = nearest_checkpoint(folder, about["updates"])
        _, decoder = load_start(recipe, resumed=True)
        learner = make_learner(recipe, algo, decoder, saved=saved)
        if saved is not None:
            restore_weights(saved, cast(Policy | Scorer, learner.policy), learner)
        keep_old_policy(learner, algo)
        found = explain_skip(learner, batch.to(learner.device), algo)
    then = [str(NonFiniteTensor(**f)) for f in about["found"][:1]]
    name = saved.relative_to(folder) if saved is not None else names.START
    distance = f"{count_noun(late, 'update')} before it" if late else "exactly those of the time"
    return Replay(
        step=about["step"],
        rows=len(batch),
        weights=f"{name}, {distance}",
        found=found,
        then="".join(then),
        nearer=_nearer(recipe) if late else "",
    )


def _nearer(recipe: Recipe) -> str:
    """A checkpoint holds the weights between two steps, never those between two updates of one step."""
    several = recipe.train.epochs * recipe.train.minibatches > 1
    return "save.every=1 save.milestones=1" + (" train.epochs=1 train.minibatches=1" if several else "")
