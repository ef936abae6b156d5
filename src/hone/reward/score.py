"""A reward is any function of a completion and its task; what it returns becomes a number or "invalid".

A reward that raises, or returns NaN, None or something that is no number, is invalid and never zero.
"""

import inspect
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hone.errors import HoneError
from hone.reward.outcome import crashed, invalid, place_of, to_outcome
from hone.reward.parts import Combined, RewardPart, check_part
from hone.reward.waiting import Late, awaited
from hone.types import Group, Outcome, Rollout, Task

ONE = ("completion", "task", "rollout")
MANY = ("completions", "tasks", "rollouts")


@dataclass(frozen=True)
class Reward:
    """A user's function, its parameters bound by name and checked when it is wrapped.

    It takes any of `completion`, `task`, `rollout`, or any of `completions`, `tasks`, `rollouts` and then
    returns one value for each. It may be async. It is given copies: it can change nothing of ours.
    """

    function: Callable[..., Any]
    seconds: float | None = field(default=None, kw_only=True)  # a completion may take, where that can be seen to

    def __post_init__(self) -> None:
        _ = self.names

    @cached_property
    def names(self) -> list[str]:
        """What it is called with."""
        return _bind(self.function)

    @property
    def name(self) -> str:
        return name_of(self.function)

    @cached_property
    def place(self) -> str:
        """The user's file and line where it begins; "" of Hone's own."""
        return place_of(self.function)

    @property
    def one_by_one(self) -> bool:
        """Whether it sees one completion at a time, so that none depends on those that are scored with it."""
        return self.names[0] in ONE

    @property
    def waits(self) -> bool:
        """Whether it is async, so that many calls of it wait at the same time."""
        f = self.function
        return inspect.iscoroutinefunction(f) or inspect.iscoroutinefunction(type(f).__call__)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return self.judged(self.columns(rollouts)) if rollouts else []

    def columns(self, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
        """What it reads of the rollouts, by the name it is called with."""
        return {name: _column(name, rollouts) for name in self.names}

    def judged(self, columns: dict[str, list[Any]]) -> list[Outcome]:
        """The function called on each, or once on all."""
        number = len(columns[self.names[0]])
        if not self.one_by_one:
            return self._batched(columns, number)
        rows = [{name: column[i] for name, column in columns.items()} for i in range(number)]
        return self._awaited(rows) if self.waits else [self._one(row) for row in rows]

    def _one(self, arguments: dict[str, Any]) -> Outcome:
        try:
            return to_outcome(self._called(arguments), place=self.place)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and CancelledError too are only the function's own
            return crashed(error)

    def _called(self, arguments: dict[str, Any]) -> Any:
        """What it returns, in the process that called it."""
        owner = os.getpid()
        try:
            return self.function(**arguments)
        finally:
            if os.getpid() != owner:  # it would go on with a run of its own
                os.write(2, f"reward {self.name} forked: end the child with os._exit before it returns\n".encode())
                os._exit(1)

    def _awaited(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        makes: list[Callable[[], Awaitable[Any]]] = [partial(self.function, **row) for row in rows]
        return [self._of(value) for value in awaited(makes, seconds=self.seconds)]

    def _of(self, value: Any) -> Outcome:
        """The outcome of a value, or of the exception that came in its place."""
        if isinstance(value, Late):
            return self.late(self.seconds or 0.0)
        if isinstance(value, KeyboardInterrupt):
            raise value
        if isinstance(value, BaseException):
            return crashed(value)
        try:
            return to_outcome(value, place=self.place)
        except Exception as error:  # a value can raise when it is turned into a number
            return crashed(error)

    def late(self, seconds: float) -> Outcome:
        """No number, for it took longer than this."""
        return invalid(
            f"timed out: reward {self.name} took more than {seconds:g} s (train.reward_timeout, parts.timeout)",
            place=self.place,
        )

    def _batched(self, columns: dict[str, list[Any]], n: int) -> list[Outcome]:
        try:
            if self.waits:
                (result,) = awaited([partial(self.function, **columns)], seconds=self.seconds and self.seconds * n)
            else:
                result = self._called(columns)
            values: Any = result.tolist() if hasattr(result, "tolist") else result  # numpy and torch
            size = f" of {len(values)}" if isinstance(values, Sequence) else ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return [crashed(error)] * n
        if isinstance(result, BaseException):
            return [self._of(result)] * n
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != n:
            raise HoneError(
                f"reward {self.name} returned a {type(result).__name__}{size}, expected a list of {n}: "
                "return one value for each completion"
            )
        return [self._of(value) for value in values]


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
    if task is None or (isinstance(task.prompt, str) and not task.extra):
        return task
    try:
        return deepcopy(task)
    except Exception as error:  # copying runs what the task's own classes say
        said = f"{type(error).__name__}: {error}"
        raise HoneError(
            f"a task cannot be copied for its reward ({said}): keep text, numbers and lists in it"
        ) from error


def _copy(rollout: Rollout) -> Rollout:
    lists = {n: tuple(getattr(rollout, n)) for n in ("tokens", "mask", "gen_logp", "step_reward", "step_label")}
    return replace(rollout, task=_copy_task(rollout.task), **lists)


Scorer = Reward | Combined


def as_scorer(function: Callable[..., Any]) -> Scorer:
    """The function wrapped as a Reward, unless it is one already."""
    return function if isinstance(function, Reward | Combined) else Reward(function)


def combine(rewards: Mapping[str, tuple[Callable[..., Any], float] | RewardPart]) -> Combined:
    """sum_i added_i; a completion with any part invalid is invalid. Plain functions are wrapped."""
    if not rewards:
        raise HoneError("there is no reward to combine: name at least one with its weight")
    made = {name: part if isinstance(part, RewardPart) else RewardPart(reward=part[0], weight=part[1])
            for name, part in rewards.items()}  # fmt: skip
    return Combined({name: check_part(name, replace(p, reward=as_scorer(p.reward))) for name, p in made.items()})


def score(groups: Sequence[Group], reward: Callable[..., Any]) -> list[Group]:
    """The same groups with every outcome filled, by one call of the reward."""
    outcomes: Iterator[Outcome] = iter(as_scorer(reward)([r for g in groups for r in g]))
    return [[r.having(outcome=next(outcomes)) for r in g] for g in groups]
