"""Process reward models: the probability that each step is right, as step rewards or as a potential."""

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
    """The function of this name that makes one number of the scores of steps."""
    if by not in AGGREGATES:
        raise HoneError(f"steps are summed up by {by!r}: use one of {', '.join(AGGREGATES)}")
    return AGGREGATES[by]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one rollout: the index of each one's last token, and the probability that all is right so far."""

    ends: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ProcessModel:
    """sigmoid(head) after each step. Several models are combined as in an `Ensemble`."""

    models: Sequence[ForwardModel]
    stepper: Stepper
    pad_id: int
    how: str = "mean"
    device: torch.device | str = "cpu"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Steps]:
        ends = [self.stepper.ends(r) for r in rollouts]
        per_model = [self._step_scores(model, rollouts, ends) for model in self.models]
        scores = iter(combine_scores(np.array(per_model, dtype=np.float64), how=self.how).tolist())
        return [Steps(row, [next(scores) for _ in row]) for row in ends]

    def _step_scores(
        self, model: ForwardModel, rollouts: Sequence[Rollout], ends: Sequence[Sequence[int]]
    ) -> list[float]:
        values = values_at(model, rollouts, ends, pad_id=self.pad_id, device=self.device)
        return torch.sigmoid(torch.tensor([x for row in values for x in row], dtype=torch.float64)).tolist()

    def rate(self, rollouts: Sequence[Rollout], *, by: str = "min") -> list[float]:
        """One number for each rollout, for re-ranking. A rollout without steps gets the lowest score, 0."""
        combine = aggregate(by)
        return [combine(steps.scores) if steps.scores else 0.0 for steps in self(rollouts)]


def shaping(potential: Sequence[float], *, gamma: float = 1.0, after: float = 0.0) -> list[float]:
    """gamma Phi(s_{t+1}) - Phi(s_t) for each action token, where `potential` is Phi(s_t) before it.

    after: Phi after the last token, 0 where the episode has ended (Ng, Harada and Russell 1999).

    >>> shaping([0.0, 0.5, 1.0])
    [0.5, 0.5, -1.0]
    """
    return [gamma * later - now for now, later in zip(potential, [*potential[1:], after], strict=True)]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Fills each rollout's step rewards from a process model.

    use "reward": weight * score at each step's end.
    use "progress": that minus the value of the step before. The sum is the last value, so that an extra step earns
    nothing by itself (Setlur et al. 2024).
    use "shaping": potential-based. Phi is weight * the score of the last step that has ended, 0 before the first end.
    outcome: the rollout's own reward replaces the last step's score, which predicts it. For algorithms that read step
    rewards alone.
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

    def after(self, score: Callable[[list[Group]], list[Group]]) -> Callable[[list[Group]], list[Group]]:
        """A function that scores groups and then fills their step rewards, in few passes for a whole step."""
        return lambda groups: self(score(groups))

    def _fill(self, rollout: Rollout, steps: Steps) -> Rollout:
        column = [math.nan] * len(rollout.tokens)
        if not np.isfinite(np.array(steps.scores)).all():
            return replace(rollout, step_reward=column, outcome=invalid("a score of the process model is not finite"))
        if self.use == "shaping":
            self._shape(rollout, steps, column)
        else:
            self._reward_steps(rollout, steps, column)
        outcome = rollout.outcome
        if outcome is None or outcome.value is None:
            return replace(rollout, step_reward=column)
        return replace(rollout, step_reward=column, outcome=_with_mean_score(outcome, steps.scores))

    def _reward_steps(self, rollout: Rollout, steps: Steps, column: list[float]) -> None:
        """Writes each step's value, or its difference from the value before, at the step's end."""
        values = [self.weight * score for score in steps.scores]
        if values and self.outcome and rollout.outcome is not None and rollout.outcome.value is not None:
            values[-1] = rollout.outcome.value
        before = [0.0, *values[:-1]] if self.use == "progress" else [0.0] * len(values)
        for end, now, earlier in zip(steps.ends, values, before, strict=False):  # without steps, before has one entry
            column[end] = now - earlier

    def _shape(self, rollout: Rollout, steps: Steps, column: list[float]) -> None:
        """Writes the shaping reward at every action token: with gamma below 1 none of them is 0."""
        actions = [i for i, on in enumerate(rollout.mask) if on]
        score = dict(zip(steps.ends, steps.scores, strict=True))
        phi, potential = 0.0, list[float]()
        for i in actions:
            potential.append(phi)
            phi = self.weight * score[i] if i in score else phi
        after = phi if rollout.stop is Stop.LENGTH else 0.0
        for i, x in zip(actions, shaping(potential, gamma=self.gamma, after=after), strict=True):
            column[i] = x


def _with_mean_score(outcome: Outcome, scores: Sequence[float]) -> Outcome:
    """The outcome with the mean step score as a part, for the log."""
    mean = math.fsum(scores) / len(scores) if scores else 0.0
    return replace(outcome, parts={**outcome.parts, "process": mean})
