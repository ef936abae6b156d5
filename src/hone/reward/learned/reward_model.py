"""Trained heads as rewards. They score the sampled tokens, or with another vocabulary the tokens of the sampled text.

An ensemble combines several of them: the mean, the minimum, or the mean minus a penalty for their disagreement.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hone.data.collate import collate
from hone.errors import HoneError
from hone.types import ForwardModel, Group, Outcome, Rollout

ROWS, TOKENS = 64, 16_384  # the most in a forward pass


@torch.no_grad()
def values_at(
    score: ForwardModel,
    rollouts: Sequence[Rollout],
    positions: Sequence[Sequence[int]],
    *,
    pad_id: int,
    device: torch.device | str = "cpu",
) -> list[list[float]]:
    """The head's value after the tokens at `positions` of each rollout.

    Rollouts of one prompt share a forward pass: Hone's own scorers then read the prompt once, and no padding.
    """
    values: list[list[float]] = [[] for _ in rollouts]
    for part in _forward_batches(rollouts):
        groups = [[Rollout(tokens=rollouts[i].tokens, mask=rollouts[i].mask) for i in group] for group in part]
        batch = collate(groups, pad_id=pad_id).to(device)
        heads = score(batch, frozenset({"value"})).value.double().cpu()
        for row, i in zip(heads, (i for group in part for i in group), strict=True):
            values[i] = row[torch.tensor(positions[i], dtype=torch.int64)].tolist()
    return values


def _forward_batches(rollouts: Sequence[Rollout]) -> Iterator[list[list[int]]]:
    """The rollouts' indices by forward pass and prompt. Sorted by length: a pass has little padding."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, r in enumerate(rollouts):
        start = next((n for n, on in enumerate(r.mask) if on), len(r.tokens))
        groups.setdefault(tuple(r.tokens[:start]), []).append(i)
    ordered = sorted(groups.values(), key=lambda group: max(len(rollouts[i].tokens) for i in group))
    part, number, tokens = list[list[int]](), 0, 0
    for group in ordered:
        for i in group:
            if part and (number == ROWS or tokens + len(rollouts[i].tokens) > TOKENS):
                yield part
                part, number, tokens = [], 0, 0
            if not part or part[-1][0] not in group:
                part.append([])
            part[-1].append(i)
            number, tokens = number + 1, tokens + len(rollouts[i].tokens)
    if part:
        yield part


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """The head's value at the last real token. Wrap it in `Reward` as any batched function."""

    score: ForwardModel
    pad_id: int
    device: torch.device | str = "cpu"
    encode: Callable[[Rollout], Rollout] | None = None  # makes the tokens of a model with another vocabulary

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        encoded: Group = [self.encode(r) for r in rollouts] if self.encode else list(rollouts)
        last = [[len(r.tokens) - 1] for r in encoded]
        values = values_at(self.score, encoded, last, pad_id=self.pad_id, device=self.device)
        return [value for (value,) in values]

    def mean_and_std(self, rollouts: Sequence[Rollout]) -> tuple[float, float]:
        """The mean and std of its scores of these rollouts. `Scorer.normalise` subtracts and divides by them."""
        scores = np.array(self(rollouts), dtype=np.float64)
        std = float(scores.std()) if len(scores) else 0.0
        if not np.isfinite(scores).all() or len(scores) < 2 or std <= 1e-12 * float(np.abs(scores).max()):
            raise HoneError(
                f"cannot calibrate the reward model on {len(scores)} rollouts whose scores have std {std:g}: "
                "use at least two that differ and whose scores are finite"
            )
        return float(scores.mean()), std


AGGREGATIONS = ("mean", "min", "penalty")
Array = np.ndarray[Any, np.dtype[np.float64]]


def combine_scores(values: Array, *, how: str = "mean", k: float = 1.0) -> Array:
    """[M, N] of M members -> [N]: mean, min, or penalty: mean - k std (population) over the members."""
    if how not in AGGREGATIONS:
        raise HoneError(f"an ensemble is joined by {how!r}: use one of {', '.join(AGGREGATIONS)}")
    if how == "min":
        return values.min(0)
    return values.mean(0) - k * values.std(0) if how == "penalty" else values.mean(0)


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Several rewards of the same rollouts as one; wrap it in `Reward`. The members' mean and spread are its parts."""

    members: Sequence[Callable[[Sequence[Rollout]], Sequence[float]]]
    how: str = "mean"
    k: float = 1.0  # of penalty

    def __post_init__(self) -> None:
        if not self.members or not np.isfinite(self.k) or self.k < 0:
            raise HoneError(
                f"an ensemble of {len(self.members)} models with k={self.k}: give models, and k of 0 or more"
            )
        combine_scores(np.zeros((1, 0)), how=self.how)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        values = np.array([member(rollouts) for member in self.members], dtype=np.float64).reshape(-1, len(rollouts))
        columns = zip(combine_scores(values, how=self.how, k=self.k), values.mean(0), values.std(0), strict=True)
        # a member's NaN makes the value NaN, which is an invalid reward
        return [Outcome(value=float(v), parts={"mean": float(m), "spread": float(s)}) for v, m, s in columns]
