"""From a recipe's reward to what scores completions; functions of the user's run in processes of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hone.config import unknown
from hone.data.tokenizer import Tokenizer, check_fits
from hone.load import load_function
from hone.model.fetch import resolve
from hone.model.folder import load_scorer
from hone.recipe import Recipe
from hone.reward.apart import apart
from hone.reward.model import RewardModel
from hone.reward.score import Reward, Scorer, as_scorer, combine
from hone.reward.verify import VERIFIERS

Spec = str | Mapping[str, float] | Callable[..., Any]


def judges(recipe: Recipe) -> dict[str, Reward]:
    """The recipe's functions in processes of their own, by name ("" of one made in Python); none offline.

    To be called before there is anything large in memory, of which each process would hold a copy once it changes.
    """
    spec, train = recipe.reward, recipe.train
    if not recipe.online or train.reward_apart == "never":
        return {}
    if callable(spec):
        found = {"": spec} if train.reward_apart == "always" else {}
    else:
        named = [spec] if isinstance(spec, str) else [name for name, weight in spec.items() if weight]
        found = {name: load_function(name) for name in named if ".py:" in name}
    if not found:
        return {}
    return dict(zip(found, apart(list(found.values()), seconds=train.reward_timeout), strict=True))


def scorer(
    spec: Spec,
    vocabulary: Tokenizer,
    *,
    device: torch.device | str = "cpu",
    judges: Mapping[str, Reward] | None = None,
) -> Scorer:
    """Named verifiers with weights, a reward model's folder, a function in a file, or a function.

    judges: what stands for some of the functions.
    """
    made = judges or {}
    if isinstance(spec, str):
        spec = {spec: 1.0} if ".py:" not in spec else made[spec] if spec in made else load_function(spec)
    if callable(spec):
        return as_scorer(made.get("", spec))
    parts = {name: made.get(name) or _named(name, vocabulary, device) for name, weight in spec.items() if weight}
    return combine({name: (part, spec[name]) for name, part in parts.items()})


def _named(name: str, vocabulary: Tokenizer, device: torch.device | str) -> Callable[..., Any]:
    kind, _, folder = name.partition(":")
    if ".py:" in name:
        return load_function(name)
    if kind != "model" or not folder:
        if name not in VERIFIERS:
            raise unknown("reward", name, [*VERIFIERS, "model:FOLDER", "FILE.py:function"])
        return VERIFIERS[name]
    scorer = load_scorer(resolve(folder))
    check_fits(vocabulary, scorer.decoder.config.vocab_size)
    return RewardModel(score=scorer.eval().to(device), pad_id=vocabulary.pad_id, device=device)
