"""A reward as a run uses it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hone.errors import HoneError, counted
from hone.log.hacking import HELD_OUT
from hone.log.progress import say
from hone.reward.outcome import commonest, kinds
from hone.reward.patience import Enough, limited
from hone.reward.score import Scorer, score
from hone.types import Group, Outcome, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Every outcome filled, and refused where too many are invalid.

    held_out: another verifier, whose verdict is noted among the parts and adds nothing.
    """

    reward: Scorer
    max_invalid: float = 0.2
    held_out: Scorer | None = None
    late: list[str] = field(default_factory=list[str])  # the first time-out, which is told
    told: set[str] = field(default_factory=set[str])  # kinds of reasons of the held-out verifier, each told once

    @property
    def one_by_one(self) -> bool:
        """Whether no completion's outcome depends on those that are scored with it."""
        return self.reward.one_by_one and (self.held_out is None or self.held_out.one_by_one)

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        found = self.fill(groups)
        self.check(found)
        return found

    def fill(self, groups: Sequence[Group], *, bad: Sequence[Outcome] = (), count: int = 0) -> list[Group]:
        """The same groups with every outcome filled.

        bad, count: of a step whose other rollouts were scored before or will be, its invalid outcomes so far and all
        of its rollouts; none: these groups are all of it.
        """
        count = count or sum(map(len, groups))
        try:
            with limited(self.max_invalid * count - len(bad), self._late):
                scored = score(groups, self.reward)
        except Enough as enough:
            raise self._too_many([*bad, *enough.outcomes], count) from None
        if self.held_out is None:
            return scored
        with limited(math.inf, self._late):
            said = self.held_out([r for g in scored for r in g])
        for kind, (_, reason) in kinds(said).items():
            if kind not in self.told:
                self.told.add(kind)
                say(f"parts.held_out has no verdict: {reason}; said once a run")
        verdicts = iter(said)
        return [[_noted(r, next(verdicts).value) for r in g] for g in scored]

    def check(self, groups: Sequence[Group]) -> None:
        """Stop a run whose reward is broken: refuse a share of invalid outcomes above `max_invalid`."""
        rollouts = [r for g in groups for r in g]
        outcomes = [r.outcome for r in rollouts if r.outcome is not None]
        if len(outcomes) < len(rollouts):
            raise ValueError("a rollout is not scored")
        bad = [outcome for outcome in outcomes if not outcome.valid]
        if not bad or len(bad) <= self.max_invalid * len(outcomes):
            return
        raise self._too_many(bad, len(outcomes))

    def _too_many(self, bad: Sequence[Outcome], count: int) -> HoneError:
        reason, times, _ = commonest(bad)
        return HoneError(
            f"{len(bad)} of {count} rewards are invalid, more than {self.max_invalid:.0%}; most often "
            f"({counted(times, 'time')}): {reason}: correct the reward function or the task, or raise train.max_invalid"
        )

    def _late(self, reason: str) -> None:
        if not self.late:
            self.late.append(reason)
            say(f"{reason}: no reward for that completion; said once a run")


def _noted(rollout: Rollout, value: float | None) -> Rollout:
    """With the held-out verifier's value among the parts, where both it and the reward have one."""
    outcome = rollout.outcome
    if outcome is None or not outcome.valid or value is None:
        return rollout
    return replace(rollout, outcome=replace(outcome, parts={**outcome.parts, HELD_OUT: value}))
