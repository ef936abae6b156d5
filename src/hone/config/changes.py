"""What differs between the recipe a run was started with and the one it is to go on with. No torch here."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.config.overrides import to_json
from hone.config.recipe import Recipe
from hone.errors import HoneError

Change = tuple[Any, Any]  # before, now

# they say where, how long and in what pieces a run computes, what it watches and what it keeps: not what it learns
FREE = (
    "name", "out", "tensorboard", "eval_data", "save", "limits", "sample.max_rows", "train.steps", "train.micro_rows",
    "train.micro_tokens", "train.layout", "train.recompute", "train.device", "train.shard", "train.threads",
    "train.deterministic", "train.eval_every", "train.eval_samples", "train.max_invalid", "train.max_bad_updates",
    "train.max_bad_total", "train.reward_apart", "train.reward_timeout", "train.reward_memory", "parts.timeout",
    "parts.cache", "parts.held_out",
)  # fmt: skip
# with another of these the weights and moments of a checkpoint have no place
NEVER = ("model", "lora", "critic", "optim.bits")


def changes(recipe: Recipe, before: Mapping[str, Any]) -> dict[str, Change]:
    """The settings that lead to another trajectory, by name, as they were in `before` (a recipe.json) and are now."""
    # what a run of an earlier version did not know of was as it is by default
    usual, now = _plain(Recipe()), _plain(recipe)
    was = {**usual, **_flat(before)}
    names = [name for name in {**was, **now} if was.get(name) != now.get(name) and not _is(name, FREE)]
    if recipe.train.dtype == "auto":  # which means what the run has
        names = [name for name in names if name != "train.dtype"]
    if recipe.optim.schedule != "constant" and was.get("train.steps") != now["train.steps"]:
        names.append("train.steps")  # by which the schedule goes
    return {name: (was.get(name), now.get(name)) for name in names}


def _plain(recipe: Recipe) -> dict[str, Any]:
    """The settings as recipe.json has them, flat."""
    return _flat(json.loads(json.dumps(to_json(recipe))))


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; a reward's parts and an algorithm's settings too."""
    found = dict[str, Any]()
    for name, value in settings.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def _is(name: str, groups: Iterable[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def describe_changes(changed: Mapping[str, Change]) -> str:
    """optim.lr was 0.001 and is 0.01; seed was 3 and is 4

    >>> describe_changes({"seed": (3, 4), "teacher": (None, "t")})
    'seed was 3 and is 4; teacher was not set and is t'
    """
    said = [(name, *("not set" if value is None else value for value in change)) for name, change in changed.items()]
    return "; ".join(f"{name} was {was} and is {now}" for name, was, now in said)


def check_changes(changed: Mapping[str, Change], folder: Path, *, allow: bool) -> None:
    """HoneError names what differs, unless it is allowed and can be."""
    started = f"{folder} was started with other settings: {describe_changes(changed)}"
    if any(_is(name, NEVER) for name in changed):
        raise HoneError(f"{started}: start a new run with model.path=CHECKPOINT, for its weights do not fit these")
    if changed and not allow:
        raise HoneError(f"{started}: resume it as it was, or add --allow-change to go on differently")
