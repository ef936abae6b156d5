"""A reward as a run uses it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hone.errors import HoneError
from hone.log.hacking import HELD_OUT
from hone.reward.outcome import commonest
from hone.reward.score import Scorer, score
from hone.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Every outcome filled, and refused where too many are invalid.

    held_out: another verifier, whose verdict is noted among the parts and adds nothing.
    """

    reward: Scorer
    max_invalid: float = 0.2
    held_out: Scorer | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether no completion's outcome depends on those that are scored with it."""
        return self.reward.one_by_one and (self.held_out is None or self.held_out.one_by_one)

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        found = self.fill(groups)
        self.check(found)
        return found

    def fill(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with every outcome filled."""
        scored = score(groups, self.reward)
        if self.held_out is None:
            return scored
        said = iter(self.held_out([r for g in scored for r in g]))
        return [[_noted(r, next(said).value) for r in g] for g in scored]

    def check(self, groups: Sequence[Group]) -> None:
        """Stop a run whose reward is broken: refuse a share of invalid outcomes above `max_invalid`."""
        rollouts = [r for g in groups for r in g]
        outcomes = [r.outcome for r in rollouts if r.outcome is not None]
        if len(outcomes) < len(rollouts):
            raise ValueError("a rollout is not scored")
        reason, times, bad = commonest(outcomes)
        if not bad or bad <= self.max_invalid * len(outcomes):
            return
        raise HoneError(
            f"{bad} of {len(outcomes)} rewards are invalid, more than {self.max_invalid:.0%}; most often "
            f"({times} times): {reason}: correct the reward function or the task, or raise train.max_invalid"
        )


def _noted(rollout: Rollout, value: float | None) -> Rollout:
    """With the held-out verifier's value among the parts, where both it and the reward have one."""
    outcome = rollout.outcome
    if outcome is None or not outcome.valid or value is None:
        return rollout
    return replace(rollout, outcome=replace(outcome, parts={**outcome.parts, HELD_OUT: value}))
