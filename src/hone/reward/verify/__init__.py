"""Verifiers by name: functions of a completion (and its task) that a program can check.

Doors: `VERIFIERS` by name, `MAKERS` by the name before a colon, `make_verifier` for either. `answers` finds the answer
of a completion, `structure` looks at its form, `choice`, `compare`, math/ and code/ compare it with the task.
May import: types, errors, storage.textfile, log, algo.select, data, reward.outcome, reward.sandbox, reward.workers.
"""

from collections.abc import Callable
from typing import Any

from hone.errors import HoneError
from hone.reward.verify.choice import choice_reward, exact_reward
from hone.reward.verify.code.verdict import code, code_reward
from hone.reward.verify.compare import f1_reward, gym_reward, numeric
from hone.reward.verify.math.verdict import math_reward
from hone.reward.verify.structure import (
    format_reward,
    grammar,
    language,
    length,
    overlong,
    regex,
    repetition,
    schema,
    tags,
)

VERIFIERS: dict[str, Callable[..., Any]] = {
    "math": math_reward,
    "format": format_reward,
    "choice": choice_reward,
    "exact": exact_reward,
    "code": code_reward,
    "f1": f1_reward,
    "gym": gym_reward,
}
# by the name before a colon: functions that make a verifier of the text after the colon
MAKERS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "regex": regex,
    "tags": tags,
    "schema": schema,
    "grammar": grammar,
    "length": length,
    "overlong": overlong,
    "language": language,
    "repetition": repetition,
    "numeric": numeric,
    "code": code,
}
CAN_HANG = {"regex", "schema", "grammar", "gym"}  # some completions may keep these busy for ever
SECONDS = 5.0  # the limit of those for a completion, unless set otherwise
CACHE_SIZES = {"math": 10_000, "code": 10_000, "judge": 10_000}  # of rewards that take longer than a look into a cache


def make_verifier(name: str) -> tuple[Callable[..., Any], bool]:
    """The verifier of this name, and whether it can hang, so that it belongs in a process of its own."""
    kind, _, setting = name.partition(":")
    if name in VERIFIERS:
        return VERIFIERS[name], kind in CAN_HANG
    if kind in MAKERS and setting:
        return MAKERS[kind](setting), kind in CAN_HANG
    listed = [*VERIFIERS, *(f"{known}:SETTING" for known in MAKERS)]
    raise HoneError(f"no verifier {name!r}: there are {', '.join(listed)}")
