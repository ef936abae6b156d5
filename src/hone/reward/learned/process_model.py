"""A process reward model at work: the chance that each step is right, as dense rewards or as a potential."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hone.errors import HoneError
from hone.reward.learned.reward_model import combine_scores, values_at
from hone.reward.outcome import invalid
from hone.reward.steps import Stepper
from hone.types import ForwardModel, Group, Outcome, Rollout, Stop

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "product": math.prod,
}
USES = ("reward", "progress", "shaping")


def aggregate(by: str) -> Callable[[Sequence[float]], float]:
    """How the scores of steps become one number, by name."""
    if by not in AGGREGATES:
        raise HoneError(f"steps are summed up by {by!r}: use one of {', '.join(AGGREGATES)}")
    return AGGREGATES[by]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one rollout: the index of each one's last token, and the chance that it is right so far."""

    ends: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ProcessModel:
    """sigmoid(head) after each step; several models are joined as an `Ensemble` is."""

    models: Sequence[ForwardModel]
    stepper: Stepper
    pad_id: int
    how: str = "mean"
    device: torch.device | str = "cpu"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Steps]:
        ends = [self.stepper.ends(r) for r in rollouts]
        flat = [self._flat(model, rollouts, ends) for model in self.models]
        scores = iter(combine_scores(np.array(flat, dtype=np.float64), how=self.how).tolist())
        return [Steps(places, [next(scores) for _ in places]) for places in ends]

    def _flat(self, model: ForwardModel, rollouts: Sequence[Rollout], ends: Sequence[Sequence[int]]) -> list[float]:
        found = values_at(model, rollouts, ends, pad_id=self.pad_id, device=self.device)
        return torch.sigmoid(torch.tensor([x for row in found for x in row], dtype=torch.float64)).tolist()

    def rate(self, rollouts: Sequence[Rollout], *, by: str = "min") -> list[float]:
        """One number a rollout, for re-ranking; a rollout without a step has the lowest there is, 0."""
        summed = aggregate(by)
        return [summed(steps.scores) if steps.scores else 0.0 for steps in self(rollouts)]


def shaping(potential: Sequence[float], *, gamma: float = 1.0, after: float = 0.0) -> list[float]:
    """gamma Phi(s_{t+1}) - Phi(s_t) of each acted token, where `potential` is Phi(s_t) before it.

    after: Phi behind the last token, 0 where the episode has ended (Ng, Harada and Russell 1999).

    >>> shaping([0.0, 0.5, 1.0])
    [0.5, 0.5, -1.0]
    """
    return [gamma * then - now for now, then in zip(potential, [*potential[1:], after], strict=True)]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Fills each rollout's step rewards from a process model.

    use "reward": weight * score at each step's end; "progress": that less the one of the step before, so that they sum
    to the last one and a step more pays nothing by itself (Setlur et al. 2024); "shaping": potential-based, Phi =
    weight * the score of the last step that has ended, 0 before the first. outcome: a row's own reward, which is what
    its last step's score foretells, stands in for that score, for an algorithm that reads step rewards alone.
    """

    model: ProcessModel
    use: str = "reward"
    weight: float = 1.0
    gamma: float = 1.0
    outcome: bool = False

    def __post_init__(self) -> None:
        if self.use not in USES:
            raise HoneError(f"a process model is used as {self.use!r}: use one of {', '.join(USES)}")

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        steps = iter(self.model([r for g in groups for r in g]))
        return [[self._fill(r, next(steps)) for r in g] for g in groups]

    def after(self, mark: Callable[[list[Group]], list[Group]]) -> Callable[[list[Group]], list[Group]]:
        """`mark`, then this: a whole step's rollouts in few passes."""
        return lambda groups: self(mark(groups))

    def _fill(self, rollout: Rollout, steps: Steps) -> Rollout:
        column = [math.nan] * len(rollout.tokens)
        if not np.isfinite(np.array(steps.scores)).all():
            return replace(rollout, step_reward=column, outcome=invalid("a score of the process model is not finite"))
        if self.use == "shaping":
            self._shape(rollout, steps, column)
        else:
            self._pay(rollout, steps, column)
        outcome = rollout.outcome
        if outcome is None or outcome.value is None:
            return replace(rollout, step_reward=column)
        return replace(rollout, step_reward=column, outcome=_noted(outcome, steps.scores))

    def _pay(self, rollout: Rollout, steps: Steps, column: list[float]) -> None:
        """At each step's end: its score, or what that is more than the one before."""
        worth = [self.weight * score for score in steps.scores]
        if worth and self.outcome and rollout.outcome is not None and rollout.outcome.value is not None:
            worth[-1] = rollout.outcome.value
        before = [0.0, *worth[:-1]] if self.use == "progress" else [0.0] * len(worth)
        for end, now, then in zip(steps.ends, worth, before, strict=False):  # without a step, before has one more
            column[end] = now - then

    def _shape(self, rollout: Rollout, steps: Steps, column: list[float]) -> None:
        """Into every acted token: with gamma below 1 none of them is 0."""
        acted = [i for i, on in enumerate(rollout.mask) if on]
        score = dict(zip(steps.ends, steps.scores, strict=True))
        phi, potential = 0.0, list[float]()
        for i in acted:
            potential.append(phi)
            phi = self.weight * score[i] if i in score else phi
        after = phi if rollout.stop is Stop.LENGTH else 0.0
        for i, x in zip(acted, shaping(potential, gamma=self.gamma, after=after), strict=True):
            column[i] = x


def _noted(outcome: Outcome, scores: Sequence[float]) -> Outcome:
    """The outcome with the mean step score as a part of its own, for the log."""
    mean = math.fsum(scores) / len(scores) if scores else 0.0
    return replace(outcome, parts={**outcome.parts, "process": mean})
