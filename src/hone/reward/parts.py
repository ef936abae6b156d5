"""Rewards put together: each part has a weight, bounds, and a schedule by which its weight changes over the steps.

A step is counted by the version of the weights that wrote the completion, so that nothing here has a state.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hone.errors import HoneError
from hone.reward.outcome import finite, invalid, to_outcome
from hone.types import Outcome, Rollout

Points = tuple[tuple[int, float], ...]  # (step, factor), by step


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """weight x schedule(step) x clip(value, low, high)"""

    reward: Any  # a Reward or a Combined
    weight: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    schedule: Points = ()

    def added(self, value: float, step: int) -> float:
        """What it adds to the sum."""
        return self.weight * factor(self.schedule, step) * min(max(value, self.low), self.high)


def factor(schedule: Points, step: int) -> float:
    """The schedule's number at a step: linear between its points, level outside them, 1 without any.

    >>> [factor(((0, 0.0), (10, 1.0)), step) for step in (0, 5, 10, 99)]
    [0.0, 0.5, 1.0, 1.0]
    """
    if not schedule:
        return 1.0
    place = bisect_right(schedule, step, key=lambda point: point[0])
    if place in (0, len(schedule)):
        return schedule[place and -1][1]
    (x0, y0), (x1, y1) = schedule[place - 1 : place + 1]
    return y0 + (y1 - y0) * (step - x0) / (x1 - x0)


def read_schedule(text: str, *, name: str) -> Points:
    """From "0:1 200:0.1": step and factor, step and factor.

    >>> read_schedule("0:1 200:0.1", name="format")
    ((0, 1.0), (200, 0.1))
    """
    try:
        pairs = [pair.split(":") for pair in text.split()]
        points = tuple((int(step), float(value)) for step, value in pairs)
    except ValueError:
        points = ()
    steps = [step for step, _ in points]
    whole = bool(points) and steps == sorted(set(steps)) and steps[0] >= 0
    if not whole or not all(math.isfinite(value) for _, value in points):
        raise HoneError(
            f"parts.schedule.{name} is {text!r}: write steps that grow, each with a factor, as in '0:1 200:0.1'"
        )
    return points


@dataclass(frozen=True)
class Combined:
    """A weighted sum of rewards; `parts` holds each one's own value, `added` what it added to the sum."""

    rewards: Mapping[str, RewardPart]

    @property
    def one_by_one(self) -> bool:
        return all(part.reward.one_by_one for part in self.rewards.values())

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        columns = {name: part.reward(rollouts) for name, part in self.rewards.items()}
        return [self._sum({name: c[i] for name, c in columns.items()}, r.version) for i, r in enumerate(rollouts)]

    def _sum(self, outcomes: dict[str, Outcome], step: int) -> Outcome:
        parts, added = dict[str, float](), dict[str, float]()
        for name, outcome in outcomes.items():
            if outcome.value is None:
                return invalid(f"{name}: {outcome.reason}")
            parts[name] = outcome.value
            parts |= {f"{name}/{inner}": value for inner, value in outcome.parts.items()}
            added[name] = self.rewards[name].added(outcome.value, step)
        said = next((outcome.reason for outcome in outcomes.values() if outcome.reason), "")
        return to_outcome(Outcome(value=math.fsum(added.values()), parts=parts, added=added, reason=said))

    def steady(self) -> "Combined":
        """The same without schedules, so that numbers of different steps can be compared."""
        return Combined({name: replace(part, schedule=()) for name, part in self.rewards.items()})


def check_part(name: str, part: RewardPart) -> RewardPart:
    """The part, or HoneError where its numbers make no sense."""
    if finite(part.weight) is None:
        raise HoneError(f"reward {name} has the weight {part.weight!r}: give a finite number")
    if not part.low <= part.high:
        raise HoneError(f"reward {name} is clipped to {part.low}..{part.high}: give parts.low below parts.high")
    return replace(part, weight=float(part.weight))
