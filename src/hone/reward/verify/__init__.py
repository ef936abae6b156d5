"""Verifiers by name: functions of a completion (and its task) that a program can check."""

from collections.abc import Callable
from typing import Any

from hone.errors import HoneError
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
REMEMBERED = {"math": 10_000, "code": 10_000}  # outcomes, of what takes longer to judge than to look up


def made(name: str) -> tuple[Callable[..., Any], bool]:
    """The verifier of this name, and whether it can hang, so that it belongs in a process of its own."""
    if name in VERIFIERS:
        return VERIFIERS[name], False
    raise HoneError(f"no verifier {name!r}: there are {', '.join(VERIFIERS)}")
