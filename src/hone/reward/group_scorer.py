"""The reward of a run: it gives every rollout an outcome, and stops the run where too many outcomes are invalid."""

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

FAST_FAILURE_SECONDS = 2.0  # within them a call is not cut short: quick failures are reported in full


class TooManyInvalid(Exception):
    """More outcomes are invalid than allowed; `outcomes` holds the invalid ones."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(f"{len(outcomes)} outcomes are invalid")
        self.outcomes = outcomes


@dataclass(slots=True, kw_only=True)
class InvalidCount:
    """Counts the invalid outcomes of one call of one reward, while they arrive."""

    max_invalid: float
    on_timeout: Callable[[str], None]  # called with the reason of an outcome that timed out
    start: float = field(default_factory=time.monotonic)
    invalid: list[Outcome] = field(default_factory=list[Outcome])

    def __call__(self, outcomes: Sequence[Outcome], *, timed_out: bool) -> None:
        """Adds outcomes. Raises TooManyInvalid where the outcomes still to come cannot save the call."""
        self.invalid += [outcome for outcome in outcomes if not outcome.valid]
        if timed_out:
            self.on_timeout(outcomes[0].reason)
        if len(self.invalid) > self.max_invalid and time.monotonic() - self.start >= FAST_FAILURE_SECONDS:
            raise TooManyInvalid(self.invalid)


_limit: ContextVar[tuple[float, Callable[[str], None]] | None] = ContextVar("limit", default=None)


@contextmanager
def limit_invalid(max_invalid: float, on_timeout: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, each call in this thread may have at most so many invalid outcomes."""
    token = _limit.set((max_invalid, on_timeout))
    try:
        yield
    finally:
        _limit.reset(token)


def count_invalid() -> InvalidCount | None:
    """A counter for a call that begins now; None outside of `limit_invalid`."""
    limit = _limit.get()
    return None if limit is None else InvalidCount(max_invalid=limit[0], on_timeout=limit[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScorer:
    """Scores groups of rollouts, and raises HoneError where too many outcomes are invalid.

    held_out: another verifier. Its verdict is recorded among the parts and adds nothing to the reward.
    earlier: the step's rollouts of rounds before this one. The share is of the whole step.
    """

    reward: RewardScorer
    max_invalid: float = 0.2
    held_out: RewardScorer | None = None
    earlier: Sequence[Rollout] = ()
    timeouts: list[str] = field(default_factory=list[str])  # the reason of the first time-out, which is reported
    reported: set[str] = field(default_factory=set[str])  # kinds of reasons of the held-out verifier, reported once

    @property
    def one_by_one(self) -> bool:
        """Whether no outcome depends on the other completions in the call."""
        return self.reward.one_by_one and (self.held_out is None or self.held_out.one_by_one)

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        scored = self.fill(groups)
        self.check(scored)
        return scored

    def after(self, groups: Sequence[Group]) -> "GroupScorer":
        """The scorer of a further round of a step that has these scored groups already."""
        return replace(self, earlier=[r for g in groups for r in g])

    def fill(self, groups: Sequence[Group], *, bad: Sequence[Outcome] = (), count: int = 0) -> list[Group]:
        """The same groups with outcomes.

        bad: invalid outcomes that the round has already. count: the rollouts of the round (0: of these groups).
        """
        count = (count or sum(map(len, groups))) + len(self.earlier)
        bad = [*(r.outcome for r in self.earlier if r.outcome is not None and not r.outcome.valid), *bad]
        try:
            with limit_invalid(self.max_invalid * count - len(bad), self._report_timeout):
                scored = score(groups, self.reward)
        except TooManyInvalid as error:
            raise self._too_many([*bad, *error.outcomes], count) from None
        if self.held_out is None:
            return scored
        with limit_invalid(math.inf, self._report_timeout):
            outcomes = self.held_out([r for g in scored for r in g])
        for kind, (_, reason) in kinds(outcomes).items():
            if kind not in self.reported:
                self.reported.add(kind)
                say(f"parts.held_out has no verdict: {reason}; said once a run")
        verdicts = iter(outcomes)
        return [[_with_held_out(r, next(verdicts).value) for r in g] for g in scored]

    def check(self, groups: Sequence[Group]) -> None:
        """Raises HoneError where the share of invalid outcomes is above `max_invalid`: the reward is broken."""
        rollouts = [*self.earlier, *(r for g in groups for r in g)]
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

    def _report_timeout(self, reason: str) -> None:
        if not self.timeouts:
            self.timeouts.append(reason)
            say(f"{reason}: no reward for that completion; said once a run")


def _with_held_out(rollout: Rollout, value: float | None) -> Rollout:
    """The rollout with the held-out verifier's value among its parts, if both it and the reward have a value."""
    outcome = rollout.outcome
    if outcome is None or not outcome.valid or value is None:
        return rollout
    return replace(rollout, outcome=replace(outcome, parts={**outcome.parts, HELD_OUT: value}))
