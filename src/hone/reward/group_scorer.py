"""The reward of a run: it fills the outcome of every rollout, and stops a run where too many are invalid."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from hone.errors import HoneError, count_noun
from hone.log.progress import say
from hone.log.rollouts import HELD_OUT
from hone.reward.outcome import commonest, kinds
from hone.reward.score import RewardScorer, score
from hone.types import Group, Outcome, Rollout

WAIT_SECONDS = 2.0  # fewer seconds than this: wait for all, to report quick failures in full


class TooManyInvalid(Exception):
    """More outcomes are invalid than may be; `outcomes` are those."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(f"{len(outcomes)} outcomes are invalid")
        self.outcomes = outcomes


@dataclass(slots=True, kw_only=True)
class InvalidCount:
    """One part's outcomes of one call, as they come."""

    most_invalid: float
    late: Callable[[str], None]  # is told of one that took too long
    since: float = field(default_factory=time.monotonic)
    bad: list[Outcome] = field(default_factory=list[Outcome])

    def __call__(self, outcomes: Sequence[Outcome], *, late: bool) -> None:
        """TooManyInvalid where waiting for the others cannot help."""
        self.bad += [outcome for outcome in outcomes if not outcome.valid]
        if late:
            self.late(outcomes[0].reason)
        if len(self.bad) > self.most_invalid and time.monotonic() - self.since >= WAIT_SECONDS:
            raise TooManyInvalid(self.bad)


_limit: ContextVar[tuple[float, Callable[[str], None]] | None] = ContextVar("limit", default=None)


@contextmanager
def limit_invalid(most_invalid: float, late: Callable[[str], None]) -> Iterator[None]:
    """Inside, each call in this thread may have at most so many invalid outcomes."""
    token = _limit.set((most_invalid, late))
    try:
        yield
    finally:
        _limit.reset(token)


def count_invalid() -> InvalidCount | None:
    """For a call that begins here; None where nobody has set a limit."""
    limit = _limit.get()
    return None if limit is None else InvalidCount(most_invalid=limit[0], late=limit[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScorer:
    """Every outcome filled, and refused where too many are invalid.

    held_out: another verifier, whose verdict is noted among the parts and adds nothing.
    """

    reward: RewardScorer
    max_invalid: float = 0.2
    held_out: RewardScorer | None = None
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

        bad: invalid outcomes already seen in this step. count: all rollouts of the step (0: these groups are all).
        """
        count = count or sum(map(len, groups))
        try:
            with limit_invalid(self.max_invalid * count - len(bad), self._late):
                scored = score(groups, self.reward)
        except TooManyInvalid as enough:
            raise self._too_many([*bad, *enough.outcomes], count) from None
        if self.held_out is None:
            return scored
        with limit_invalid(math.inf, self._late):
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
            f"({count_noun(times, 'time')}): {reason}: correct the reward function or the task, "
            "or raise train.max_invalid"
        )

    def _late(self, reason: str) -> None:
        if not self.late:
            self.late.append(reason)
            say(f"{reason}: no reward for that completion; said once a run")


def _noted(rollout: Rollout, value: float | None) -> Rollout:
    """The rollout with the held-out verifier's value among its parts, if both it and the reward have a value."""
    outcome = rollout.outcome
    if outcome is None or not outcome.valid or value is None:
        return rollout
    return replace(rollout, outcome=replace(outcome, parts={**outcome.parts, HELD_OUT: value}))
