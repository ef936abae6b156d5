"""Several learned rewards as one: their mean, the lowest of them, or their mean less what they disagree by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.errors import HoneError
from hone.types import Outcome, Rollout

JOINS = ("mean", "min", "penalty")
Array = np.ndarray[Any, np.dtype[np.float64]]


def joined(values: Array, *, how: str = "mean", k: float = 1.0) -> Array:
    """[M, N] of M members -> [N]: mean, min, or penalty: mean - k std (population) over the members."""
    if how not in JOINS:
        raise HoneError(f"an ensemble is joined by {how!r}: use one of {', '.join(JOINS)}")
    if how == "min":
        return values.min(0)
    return values.mean(0) - k * values.std(0) if how == "penalty" else values.mean(0)


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Rewards of the same rollouts joined; wrap it in `Reward`. The members' mean and spread are its parts."""

    members: Sequence[Callable[[Sequence[Rollout]], Sequence[float]]]
    how: str = "mean"
    k: float = 1.0  # of penalty

    def __post_init__(self) -> None:
        if not self.members or not np.isfinite(self.k) or self.k < 0:
            raise HoneError(
                f"an ensemble of {len(self.members)} models with k={self.k}: give models, and k of 0 or more"
            )
        joined(np.zeros((1, 0)), how=self.how)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        values = np.array([member(rollouts) for member in self.members], dtype=np.float64).reshape(-1, len(rollouts))
        columns = zip(joined(values, how=self.how, k=self.k), values.mean(0), values.std(0), strict=True)
        # a member's NaN makes the whole NaN, which is no reward
        return [Outcome(value=float(v), parts={"mean": float(m), "spread": float(s)}) for v, m, s in columns]
