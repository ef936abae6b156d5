"""A reward is any function of a completion and its task. What it returns becomes a number or "invalid".

A reward that raises, or returns NaN, None or something that is not a number, is invalid and never zero. Rewards can be
summed with weights, bounds and schedules, and can cache their outcomes.
"""

import hashlib
import inspect
import json
import math
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hone.errors import HoneError
from hone.reward.event_loop import TimedOut, await_all
from hone.reward.outcome import crash_outcome, finite, invalid, location_of, to_outcome
from hone.types import Group, Outcome, Rollout, Task

ROW_PARAMETERS = ("completion", "task", "rollout")
WeightSchedule = tuple[tuple[int, float], ...]  # (step, factor), by step
BATCH_PARAMETERS = ("completions", "tasks", "rollouts")


@dataclass(frozen=True)
class Reward:
    """A user's function. Its parameters are bound by name and checked when it is wrapped.

    The function takes any of `completion`, `task`, `rollout`, or any of `completions`, `tasks`, `rollouts` and then
    returns one value for each. It may be async. It is given copies, so it cannot change Hone's own records.
    """

    function: Callable[..., Any]  # what is called
    seconds: float | None = field(default=None, kw_only=True)  # the limit for one completion, where it can be enforced

    def __post_init__(self) -> None:
        _ = self.names

    @cached_property
    def names(self) -> list[str]:
        """The names of the arguments that the function is called with."""
        return _bind(self.function)

    @property
    def name(self) -> str:
        """The function's name, as logs and errors show it."""
        return name_of(self.function)

    @cached_property
    def location(self) -> str:
        """The user's file and line where the function begins; "" for Hone's own."""
        return location_of(self.function)

    @property
    def one_by_one(self) -> bool:
        """Whether each call sees one completion, so that no outcome depends on the others in the batch."""
        return self.names[0] in ROW_PARAMETERS

    @property
    def is_async(self) -> bool:
        """Whether the function is async: many of its calls then wait at the same time."""
        f = self.function
        return inspect.iscoroutinefunction(f) or inspect.iscoroutinefunction(type(f).__call__)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return self.score_columns(self.columns(rollouts)) if rollouts else []

    def columns(self, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
        """The arguments of all rollouts, as one list for each name."""
        return {name: _column(name, rollouts) for name in self.names}

    def score_columns(self, columns: dict[str, list[Any]]) -> list[Outcome]:
        """Calls the function once for each row, or once for all rows."""
        count = len(columns[self.names[0]])
        if not self.one_by_one:
            return self._score_batch(columns, count)
        rows = [{name: column[i] for name, column in columns.items()} for i in range(count)]
        return self._await_rows(rows) if self.is_async else [self._score_row(row) for row in rows]

    def _score_row(self, arguments: dict[str, Any]) -> Outcome:
        try:
            return to_outcome(self._call_function(arguments), location=self.location)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and CancelledError too are only the function's own
            return crash_outcome(error)

    def _call_function(self, arguments: dict[str, Any]) -> Any:
        """Calls the function. If it forks, the child ends here."""
        owner = os.getpid()
        try:
            return self.function(**arguments)
        finally:
            if os.getpid() != owner:  # the child would continue as a second run
                os.write(2, f"reward {self.name} forked: end the child with os._exit before it returns\n".encode())
                os._exit(1)

    def _await_rows(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        calls: list[Callable[[], Awaitable[Any]]] = [partial(self.function, **row) for row in rows]
        return [self._outcome_of(value) for value in await_all(calls, seconds=self.seconds)]

    def _outcome_of(self, value: Any) -> Outcome:
        """The outcome of a value, or of an exception in place of one."""
        if isinstance(value, TimedOut):
            return self.timeout_outcome(self.seconds or 0.0)
        if isinstance(value, KeyboardInterrupt):
            raise value
        if isinstance(value, BaseException):
            return crash_outcome(value)
        try:
            return to_outcome(value, location=self.location)
        except Exception as error:  # a value can raise when it is turned into a number
            return crash_outcome(error)

    def timeout_outcome(self, seconds: float) -> Outcome:
        """The invalid outcome of a reward that took longer than this."""
        return invalid(
            f"timed out: reward {self.name} took more than {seconds:g} s (train.reward_timeout, parts.timeout)",
            location=self.location,
        )

    def _score_batch(self, columns: dict[str, list[Any]], n: int) -> list[Outcome]:
        try:
            if self.is_async:
                (result,) = await_all([partial(self.function, **columns)], seconds=self.seconds and self.seconds * n)
            else:
                result = self._call_function(columns)
            values: Any = result.tolist() if hasattr(result, "tolist") else result  # numpy and torch
            size = f" of {len(values)}" if isinstance(values, Sequence) else ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return [crash_outcome(error)] * n
        if isinstance(result, BaseException):
            return [self._outcome_of(result)] * n
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != n:
            raise HoneError(
                f"reward {self.name} returned a {type(result).__name__}{size}, expected a list of {n}: "
                "return one value for each completion"
            )
        return [self._outcome_of(value) for value in values]


def name_of(function: Any) -> str:
    """The function's own name, also under functools.partial, or the class of a callable object."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)


def _bind(function: Callable[..., Any]) -> list[str]:
    """The parameters to pass: those of a row, or those of a batch. Keyword-only ones with a default are settings."""
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise HoneError(f"reward {name} is not a Python function: wrap it in one") from error
    bound = list[str]()
    for p in parameters:
        if p.name in (*ROW_PARAMETERS, *BATCH_PARAMETERS) and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            bound.append(p.name)
        elif p.kind is not p.KEYWORD_ONLY or p.default is p.empty:
            raise HoneError(f"reward {name} has the parameter {str(p)!r}: {_ALLOWED}")
    if not bound or len({b in BATCH_PARAMETERS for b in bound}) != 1:
        raise HoneError(f"reward {name} takes ({', '.join(bound)}): {_ALLOWED}")
    return bound


_ALLOWED = (
    f"name them from {', '.join(ROW_PARAMETERS)}, or for a whole batch from {', '.join(BATCH_PARAMETERS)}; "
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
    if task is None or (isinstance(task.prompt, str) and not task.extra):
        return task
    try:
        return deepcopy(task)
    except Exception as error:  # copying runs what the task's own classes say
        message = f"{type(error).__name__}: {error}"
        raise HoneError(
            f"a task cannot be copied for its reward ({message}): keep text, numbers and lists in it"
        ) from error


def _copy(rollout: Rollout) -> Rollout:
    lists = {n: tuple(getattr(rollout, n)) for n in ("tokens", "mask", "gen_logp", "step_reward", "step_label")}
    return replace(rollout, task=_copy_task(rollout.task), **lists)


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """weight x schedule(step) x clip(value, low, high)"""

    reward: Any  # a Reward or a Combined
    weight: float = 1.0  # what the value is multiplied by
    low: float = -math.inf  # the least that the value counts as
    high: float = math.inf  # the most
    schedule: WeightSchedule = ()  # (step, factor) of the weight: linear between these steps, constant outside them

    def contribution(self, value: float, step: int) -> float:
        """What the part adds to the sum."""
        return self.weight * schedule_factor(self.schedule, step) * min(max(value, self.low), self.high)


def schedule_factor(schedule: WeightSchedule, step: int) -> float:
    """The schedule's factor at a step: linear between its points, constant outside them, 1 without points.

    >>> [schedule_factor(((0, 0.0), (10, 1.0)), step) for step in (0, 5, 10, 99)]
    [0.0, 0.5, 1.0, 1.0]
    """
    if not schedule:
        return 1.0
    i = bisect_right(schedule, step, key=lambda point: point[0])
    if i in (0, len(schedule)):
        return schedule[i and -1][1]
    (x0, y0), (x1, y1) = schedule[i - 1 : i + 1]
    return y0 + (y1 - y0) * (step - x0) / (x1 - x0)


def read_schedule(text: str, *, name: str) -> WeightSchedule:
    """A schedule from text such as "0:1 200:0.1", pairs of a step and a factor.

    >>> read_schedule("0:1 200:0.1", name="format")
    ((0, 1.0), (200, 0.1))
    """
    try:
        pairs = [pair.split(":") for pair in text.split()]
        points = tuple((int(step), float(value)) for step, value in pairs)
    except ValueError:
        points = ()
    steps = [step for step, _ in points]
    ascending = bool(points) and steps == sorted(set(steps)) and steps[0] >= 0
    if not ascending or not all(math.isfinite(value) for _, value in points):
        raise HoneError(
            f"parts.schedule.{name} is {text!r}: write steps that grow, each with a factor, as in '0:1 200:0.1'"
        )
    return points


@dataclass(frozen=True)
class Combined:
    """A weighted sum of rewards. In an outcome `parts` has each one's own value, `added` what it added to the sum."""

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
            added[name] = self.rewards[name].contribution(outcome.value, step)
        reason = next((outcome.reason for outcome in outcomes.values() if outcome.reason), "")
        return to_outcome(Outcome(value=math.fsum(added.values()), parts=parts, added=added, reason=reason))

    def without_schedules(self) -> "Combined":
        """The same sum without schedules, so that values of different steps can be compared."""
        return Combined({name: replace(part, schedule=()) for name, part in self.rewards.items()})


def check_part(name: str, part: RewardPart) -> RewardPart:
    """The part, or HoneError where its numbers make no sense."""
    if finite(part.weight) is None:
        raise HoneError(f"reward {name} has the weight {part.weight!r}: give a finite number")
    if not part.low <= part.high:
        raise HoneError(f"reward {name} is clipped to {part.low}..{part.high}: give parts.low below parts.high")
    return replace(part, weight=float(part.weight))


@dataclass(frozen=True)
class Cached(Reward):
    """A reward that caches its last `size` outcomes. Equal completions of one call are scored once."""

    inner: Reward = field(kw_only=True)
    size: int = field(kw_only=True)
    cache: OrderedDict[bytes | int, Outcome] = field(default_factory=OrderedDict[bytes | int, Outcome], kw_only=True)
    lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        keys = [cache_key(r) or i for i, r in enumerate(rollouts)]
        with self.lock:
            outcomes = {key: self.cache[key] for key in keys if key in self.cache}
        missing = {key: r for key, r in zip(keys, rollouts, strict=True) if key not in outcomes}
        outcomes |= zip(missing, self.inner(list(missing.values())), strict=True)
        with self.lock:
            for key, outcome in outcomes.items():
                if isinstance(key, bytes) and outcome.valid:
                    self.cache[key] = outcome
                    self.cache.move_to_end(key)
            while len(self.cache) > self.size:
                self.cache.popitem(last=False)
        return [outcomes[key] for key in keys]


def cache_key(rollout: Rollout) -> bytes:
    """A hash of the completion and its task; empty where the task holds something that JSON cannot write."""
    task = rollout.task
    content = (rollout.text, None if task is None else (task.prompt, task.answer, task.extra, task.id))
    try:
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    except (TypeError, ValueError, RecursionError):
        return b""


def cached(reward: Reward, *, size: int) -> Reward:
    """The reward with a cache of so many outcomes; the reward itself for 0."""
    if not size:
        return reward
    if not reward.one_by_one or "rollout" in reward.names:
        raise HoneError(f"reward {reward.name} reads more than one completion and its task: leave out parts.cache")
    return Cached(reward.function, inner=reward, size=size)


RewardScorer = Reward | Combined


def as_scorer(function: Callable[..., Any]) -> RewardScorer:
    """The function wrapped as a Reward, unless it is one already."""
    return function if isinstance(function, Reward | Combined) else Reward(function)


def combine(rewards: Mapping[str, tuple[Callable[..., Any], float] | RewardPart]) -> Combined:
    """The weighted sum of the rewards. Where one part is invalid, the sum is invalid. Plain functions are wrapped."""
    if not rewards:
        raise HoneError("there is no reward to combine: name at least one with its weight")
    parts = {name: part if isinstance(part, RewardPart) else RewardPart(reward=part[0], weight=part[1])
             for name, part in rewards.items()}  # fmt: skip
    return Combined({name: check_part(name, replace(p, reward=as_scorer(p.reward))) for name, p in parts.items()})


def score(groups: Sequence[Group], reward: Callable[..., Any]) -> list[Group]:
    """The same groups with outcomes, from one call of the reward."""
    outcomes: Iterator[Outcome] = iter(as_scorer(reward)([r for g in groups for r in g]))
    return [[r.copy_with(outcome=next(outcomes)) for r in g] for g in groups]
