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
    matches,
    overlong,
    schema,
    tags,
    varied,
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
# by the name before a colon: what makes a verifier of the text behind it
MAKERS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "regex": matches,
    "tags": tags,
    "schema": schema,
    "grammar": grammar,
    "length": length,
    "overlong": overlong,
    "language": language,
    "repetition": varied,
    "numeric": numeric,
    "code": code,
}
HANGS = {"regex", "schema", "grammar", "gym"}  # some text may keep these busy for ever
SECONDS = 5.0  # they have for a completion, unless told otherwise
REMEMBERED = {"math": 10_000, "code": 10_000, "judge": 10_000}  # outcomes, of what takes longer than to look up


def make_verifier(name: str) -> tuple[Callable[..., Any], bool]:
    """The verifier of this name, and whether it can hang, so that it belongs in a process of its own."""
    kind, _, setting = name.partition(":")
    if name in VERIFIERS:
        return VERIFIERS[name], kind in HANGS
    if kind in MAKERS and setting:
        return MAKERS[kind](setting), kind in HANGS
    listed = [*VERIFIERS, *(f"{known}:SETTING" for known in MAKERS)]
    raise HoneError(f"no verifier {name!r}: there are {', '.join(listed)}")
