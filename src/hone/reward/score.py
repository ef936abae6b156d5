"""A reward is any function of a completion and its task; what it returns becomes a number or "invalid".

A reward that raises, or returns NaN, None or something that is no number, is invalid and never zero.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

from hone.errors import HoneError
from hone.types import Group, Outcome, Rollout, Task

ONE = ("completion", "task", "rollout")
MANY = ("completions", "tasks", "rollouts")


@dataclass(frozen=True)
class Reward:
    """A user's function, its parameters bound by name and checked when it is wrapped.

    It takes any of `completion`, `task`, `rollout`, or any of `completions`, `tasks`, `rollouts` and then
    returns one value for each. It is given copies: it can change nothing of ours.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        _ = self.names

    @cached_property
    def names(self) -> list[str]:
        """What it is called with."""
        return _bind(self.function)

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def apart(self) -> bool:
        """Whether it sees one completion at a time, so that none depends on those that are scored with it."""
        return self.names[0] in ONE

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return self.judged(self.columns(rollouts)) if rollouts else []

    def columns(self, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
        """What it reads of the rollouts, by the name it is called with."""
        return {name: _column(name, rollouts) for name in self.names}

    def judged(self, columns: dict[str, list[Any]]) -> list[Outcome]:
        """The function called on each, or once on all."""
        number = len(columns[self.names[0]])
        if not self.apart:
            return self._batched(columns, number)
        return [self._one({name: column[i] for name, column in columns.items()}) for i in range(number)]

    def _one(self, arguments: dict[str, Any]) -> Outcome:
        try:
            return to_outcome(self.function(**arguments))
        except (Exception, SystemExit) as error:
            return crashed(error)

    def _batched(self, columns: dict[str, list[Any]], n: int) -> list[Outcome]:
        try:
            result = self.function(**columns)
        except (Exception, SystemExit) as error:
            return [crashed(error)] * n
        values: Any = result.tolist() if hasattr(result, "tolist") else result  # numpy and torch
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != n:
            size = f" of {len(values)}" if isinstance(values, Sequence) else ""
            raise HoneError(
                f"reward {self.name} returned a {type(result).__name__}{size}, expected a list of {n}: "
                "return one value for each completion"
            )
        return [self._one_of(value) for value in values]

    def _one_of(self, value: Any) -> Outcome:
        try:
            return to_outcome(value)
        except Exception as error:  # a value can raise when it is turned into a number
            return crashed(error)


def name_of(function: Any) -> str:
    """The function's own name, also under functools.partial, or the class of a callable object."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)


def _bind(function: Callable[..., Any]) -> list[str]:
    """The names to pass, all of ONE or all of MANY; keyword-only parameters with a default are settings."""
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise HoneError(f"reward {name} is not a Python function: wrap it in one") from error
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise HoneError(f"reward {name} is async: write it as a plain function, batched if it has to wait")
    bound = list[str]()
    for p in parameters:
        if p.name in (*ONE, *MANY) and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            bound.append(p.name)
        elif p.kind is not p.KEYWORD_ONLY or p.default is p.empty:
            raise HoneError(f"reward {name} has the parameter {str(p)!r}: {_ALLOWED}")
    if not bound or len({b in MANY for b in bound}) != 1:
        raise HoneError(f"reward {name} takes ({', '.join(bound)}): {_ALLOWED}")
    return bound


_ALLOWED = (
    f"name them from {', '.join(ONE)}, or for a whole batch from {', '.join(MANY)}; "
    "settings are keyword-only with a default"
)


def _column(name: str, rollouts: Sequence[Rollout]) -> list[Any]:
    if name in ("completion", "completions"):
        return [r.text for r in rollouts]
    if name in ("rollout", "rollouts"):
        return [_copy(r) for r in rollouts]
    if any(r.task is None for r in rollouts):
        raise ValueError("a rollout has no task, but the reward asks for it")
    return [_copy_task(r.task) for r in rollouts]


def _copy_task(task: Task | None) -> Task | None:
    plain = task is None or (isinstance(task.prompt, str) and not task.extra)
    return task if plain else deepcopy(task)


def _copy(rollout: Rollout) -> Rollout:
    lists = {n: tuple(getattr(rollout, n)) for n in ("tokens", "mask", "gen_logp", "step_reward", "step_label")}
    return replace(rollout, task=_copy_task(rollout.task), **lists)


def invalid(reason: str) -> Outcome:
    """No number, for this reason."""
    return Outcome(value=None, reason=" ".join(reason.split())[:300])


def crashed(error: BaseException) -> Outcome:
    """No number, for it raised."""
    try:
        return invalid(f"{type(error).__name__}: {error}")
    except Exception:  # an exception whose own text cannot be written
        return invalid(type(error).__name__)


def _finite(value: Any) -> float | None:
    """The number a value stands for, or None: text and infinities are no numbers."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def to_outcome(value: Any) -> Outcome:
    """What a reward function returned, as an outcome: number, parts to be summed, Outcome, else invalid."""
    if isinstance(value, Mapping):
        return _from_parts(value)
    if isinstance(value, Outcome):
        if not value.valid:
            return value if value.reason else replace(value, reason="the reward gave no reason")
        bad = [name for name, part in value.parts.items() if _finite(part) is None]
        number = _finite(value.value)
        if number is None or bad:
            return invalid(f"the reward returned an Outcome of {value.value!r} with parts {dict(value.parts)!r}")
        return replace(value, value=number)
    number = _finite(value)
    if number is None:
        return invalid(f"the reward returned {type(value).__name__} {value!r}, expected a finite number")
    return Outcome(value=number)


def _from_parts(parts: Mapping[Any, Any]) -> Outcome:
    numbers = {str(name): _finite(part) for name, part in parts.items()}
    good = {name: number for name, number in numbers.items() if number is not None}
    if not parts or len(good) < len(parts):
        return invalid(f"the reward returned the parts {dict(parts)!r}, expected finite numbers")
    return to_outcome(Outcome(value=math.fsum(good.values()), parts=good))


@dataclass(frozen=True)
class Combined:
    """A weighted sum of rewards; `parts` holds each one's own value, before its weight."""

    rewards: Mapping[str, tuple["Reward | Combined", float]]

    @property
    def apart(self) -> bool:
        return all(reward.apart for reward, _ in self.rewards.values())

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        columns = {name: reward(rollouts) for name, (reward, _) in self.rewards.items()}
        return [self._sum({name: c[i] for name, c in columns.items()}) for i in range(len(rollouts))]

    def _sum(self, outcomes: dict[str, Outcome]) -> Outcome:
        parts = dict[str, float]()
        for name, outcome in outcomes.items():
            if outcome.value is None:
                return invalid(f"{name}: {outcome.reason}")
            parts[name] = outcome.value
            parts |= {f"{name}/{inner}": value for inner, value in outcome.parts.items()}
        total = math.fsum(weight * parts[name] for name, (_, weight) in self.rewards.items())
        return to_outcome(Outcome(value=total, parts=parts))


def combine(rewards: Mapping[str, tuple[Callable[..., Any], float]]) -> Combined:
    """sum_i weight_i reward_i; a completion with any part invalid is invalid. Plain functions are wrapped."""
    if not rewards:
        raise HoneError("there is no reward to combine: name at least one with its weight")
    for name, (_, weight) in rewards.items():
        if _finite(weight) is None:
            raise HoneError(f"reward {name} has the weight {weight!r}: give a finite number")
    return Combined({name: (as_scorer(f), float(weight)) for name, (f, weight) in rewards.items()})


Scorer = Reward | Combined


def as_scorer(function: Callable[..., Any]) -> Scorer:
    """The function wrapped as a Reward, unless it is one already."""
    return function if isinstance(function, Reward | Combined) else Reward(function)


def score(groups: Sequence[Group], reward: Callable[..., Any]) -> list[Group]:
    """The same groups with every outcome filled, by one call of the reward."""
    outcomes: Iterator[Outcome] = iter(as_scorer(reward)([r for g in groups for r in g]))
    return [[replace(r, outcome=next(outcomes)) for r in g] for g in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A reward as a run uses it: every outcome filled, and refused where too many are invalid."""

    reward: Scorer
    max_invalid: float = 0.2

    @property
    def apart(self) -> bool:
        return self.reward.apart

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        found = self.fill(groups)
        self.check(found)
        return found

    def fill(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with every outcome filled."""
        return score(groups, self.reward)

    def check(self, groups: Sequence[Group]) -> None:
        """See `check_valid`."""
        check_valid(groups, max_invalid=self.max_invalid)


def check_valid(groups: Sequence[Group], *, max_invalid: float = 0.2) -> None:
    """Stop a run whose reward is broken: refuse a share of invalid outcomes above `max_invalid`."""
    outcomes = [r.outcome for g in groups for r in g]
    reasons = Counter[str]()
    for outcome in outcomes:
        if outcome is None:
            raise ValueError("a rollout is not scored")
        reasons.update([] if outcome.valid else [outcome.reason])
    if not reasons or reasons.total() <= max_invalid * len(outcomes):
        return
    reason, times = reasons.most_common(1)[0]
    raise HoneError(
        f"{reasons.total()} of {len(outcomes)} rewards are invalid, more than {max_invalid:.0%}; most often "
        f"({times} times): {reason}: correct the reward function or the task, or raise train.max_invalid"
    )
