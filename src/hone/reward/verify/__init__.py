"""Verifiers by name: functions of a completion (and its task) that a program can check."""

from collections.abc import Callable
from typing import Any

from hone.reward.verify.choice import choice_reward, exact_reward
from hone.reward.verify.code import code_reward
from hone.reward.verify.format import format_reward
from hone.reward.verify.math import math_reward

VERIFIERS: dict[str, Callable[..., Any]] = {
    "math": math_reward,
    "format": format_reward,
    "choice": choice_reward,
    "exact": exact_reward,
    "code": code_reward,
}
