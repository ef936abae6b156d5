"""The settings of a reward: what its parts may be called, and how each counts. No torch here."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.config import unknown
from hone.errors import HoneError

VERIFIERS = ("math", "format", "choice", "exact", "code", "f1", "gym")  # rewards by name
# and those with a setting behind their name, as in "regex:[0-9]+"
MADE = ("regex", "tags", "schema", "grammar", "length", "overlong", "language", "repetition", "numeric", "code")
# a reward model, or several as one: "model:A", "model:A,B", "model-min:A,B", "model-penalty-0.5:A,B"
MODEL = re.compile(r"model(?:-(mean|min|penalty)(?:-(\d+(?:\.\d+)?))?)?:([^,]+(?:,[^,]+)*)")
JUDGE = "judge"  # a language model, as in "judge:FILE.yaml"
REWARDS = (
    *VERIFIERS, *(f"{kind}:SETTING" for kind in MADE), "model:FOLDER", "judge:FILE.yaml", "FILE.py:function",
)  # fmt: skip
Reward = str | Mapping[str, float] | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSpec:
    """How each part of the reward counts, by its name, as in parts.high.length=1.0."""

    low: Mapping[str, float] = field(default_factory=dict[str, float])  # the least that a part's own value counts as
    high: Mapping[str, float] = field(default_factory=dict[str, float])  # the most that it counts as, before its weight
    # as in "0:1 200:0.1": factors of a part's weight at steps, linear between them; evaluations go by the weight alone
    schedule: Mapping[str, str] = field(default_factory=dict[str, str])
    # seconds a completion may take, in place of train.reward_timeout; the part then runs in a process of its own
    timeout: Mapping[str, float] = field(default_factory=dict[str, float])
    cache: Mapping[str, int] = field(default_factory=dict[str, int])  # outcomes to remember by content; 0: none
    held_out: str = ""  # a verifier that marks every completion and adds nothing: how often does the reward disagree?


def is_reward_name(name: str) -> bool:
    """Whether it names one of Hone's own verifiers or a reward model."""
    kind, _, setting = name.partition(":")
    return name in VERIFIERS or (kind in (*MADE, JUDGE) and bool(setting)) or MODEL.fullmatch(name) is not None


def is_function(name: str) -> bool:
    """Whether it names a function of a file."""
    return ".py:" in name and not is_reward_name(name)


def is_part(name: str) -> bool:
    """What may stand in a weighted sum of rewards."""
    return is_reward_name(name) or is_function(name)


def check_reward(reward: Reward) -> None:
    """HoneError where a part has no name that is known."""
    names = list(reward) if isinstance(reward, Mapping) else []
    names += [reward] if isinstance(reward, str) and not is_function(reward) else []
    for name in names:
        if not is_part(name):
            raise unknown("reward", name, REWARDS)


def check_parts(parts: PartsSpec, reward: Reward) -> None:
    """HoneError where a setting is of a part that the reward does not have, or makes no sense."""
    names = list(reward) if isinstance(reward, Mapping) else [reward] if isinstance(reward, str) else []
    for setting in ("low", "high", "schedule", "timeout", "cache"):
        for name, value in getattr(parts, setting).items():
            if name not in names:
                raise unknown("part", name, names, owner=f"parts.{setting} is by part of the reward, which")
            if setting in ("timeout", "cache") and (value < 0 or (setting == "timeout" and not value)):
                raise HoneError(f"parts.{setting}.{name} is {value}: give a number above 0")
            if setting == "timeout" and (why := _own_time(name)):
                raise HoneError(f"parts.timeout.{name}: {why}")
    if parts.held_out and not is_part(parts.held_out):
        raise unknown("reward", parts.held_out, REWARDS, owner="parts.held_out")


def _own_time(name: str) -> str:
    """Why a part cannot be given its seconds, "" where it can."""
    if MODEL.fullmatch(name):
        return "a model runs in the run's own process: leave it out"
    return {
        JUDGE: "a judge's file has a timeout of its own: set it there",
        "math": "answers are compared in processes that have a time of their own: leave it out",
        "code": "a program that takes too long is wrong, not invalid: set seconds in a code:FILE.yaml",
    }.get(name.partition(":")[0], "")
