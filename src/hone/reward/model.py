"""A trained reward head as a reward: it scores the tokens that were sampled, never text encoded again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from hone.data.collate import collate
from hone.errors import HoneError
from hone.types import Model, Rollout


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """(head value at the last real token - mean) / std; wrap it in `Reward` as any batched function."""

    score: Model
    pad_id: int
    mean: float = 0.0
    std: float = 1.0
    rows: int = 64  # rows a forward pass
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if not (self.std > 0 and np.isfinite([self.mean, self.std]).all()):
            raise HoneError(f"reward model: mean {self.mean} and std {self.std}: std must be above 0, both finite")
        if self.rows < 1:
            raise HoneError(f"reward model: rows is {self.rows}: it must be 1 or more")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return ((self.raw(rollouts) - self.mean) / self.std).tolist()

    @torch.no_grad()
    def raw(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The head's value after the last token of each rollout, before normalisation."""
        values = np.zeros(len(rollouts))
        order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].tokens))  # little padding
        for start in range(0, len(order), self.rows):
            index = order[start : start + self.rows]
            rows = [Rollout(tokens=rollouts[i].tokens, mask=rollouts[i].mask) for i in index]
            batch = collate([rows], pad_id=self.pad_id).to(self.device)
            value = self.score(batch, frozenset({"value"})).value
            last = batch.real.sum(-1, keepdim=True) - 1
            values[index] = value.gather(1, last).squeeze(1).double().cpu().numpy()
        return values

    def calibrate(self, rollouts: Sequence[Rollout]) -> Self:
        """The same model with zero mean and unit (population) variance on these rollouts."""
        raw = self.raw(rollouts)
        std = float(raw.std()) if len(raw) else 0.0
        if not np.isfinite(raw).all() or len(raw) < 2 or std <= 1e-12 * float(np.abs(raw).max()):
            raise HoneError(
                f"cannot calibrate the reward model on {len(raw)} rollouts whose scores have std {std:g}: "
                "use at least two that differ and whose scores are finite"
            )
        return replace(self, mean=float(raw.mean()), std=std)
