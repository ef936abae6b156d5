"""Rewards: what a completion is worth, as a number or as invalid with a reason. Users know this room as `hone.rewards`.

Verifiers: `math`, `choice`, `exact`, `f1`, called as `math(completion, gold)`, where gold is the right answer or a
Task; `code` and `gym` take a Task, `format` the completion alone. Makers of verifiers: `numeric` as in `numeric("1%")`,
`regex`, `tags`, `schema`, `grammar`, `length`, `overlong`, `language`, `repetition`. `combine` adds up with weights.
Doors for other rooms: `score` (Reward, score), `group_scorer` (the reward of a run), `outcome` (a number or invalid),
`steps` (where steps end). verify/ checks by program, sandbox/ runs programs, learned/ asks models, workers/ are
processes. May import: types, errors, storage.textfile, log, data, algo.select, model (in learned/).
"""

from importlib import import_module

TYPE_CHECKING = False  # as in typing, whose import would delay every process of the sandbox
if TYPE_CHECKING:
    from typing import Any

    from hone.reward.outcome import invalid
    from hone.reward.score import Reward, RewardPart, combine
    from hone.reward.verify.choice import choice_reward as choice
    from hone.reward.verify.choice import exact_reward as exact
    from hone.reward.verify.code.verdict import code_reward as code
    from hone.reward.verify.compare import f1_reward as f1
    from hone.reward.verify.compare import gym_reward as gym
    from hone.reward.verify.compare import numeric
    from hone.reward.verify.math.verdict import math_reward as math
    from hone.reward.verify.structure import format_reward as format
    from hone.reward.verify.structure import grammar, language, length, overlong, regex, repetition, schema, tags
    from hone.types import Outcome, Task

_HOME = {  # the module that defines a public name; `verify` has the verifiers by name
    "Outcome": "hone.types",
    "Reward": "hone.reward.score",
    "RewardPart": "hone.reward.score",
    "Task": "hone.types",
    "combine": "hone.reward.score",
    "invalid": "hone.reward.outcome",
}
__all__ = [
    "Outcome",
    "Reward",
    "RewardPart",
    "Task",
    "choice",
    "code",
    "combine",
    "exact",
    "f1",
    "format",
    "grammar",
    "gym",
    "invalid",
    "language",
    "length",
    "math",
    "numeric",
    "overlong",
    "regex",
    "repetition",
    "schema",
    "tags",
]


def __getattr__(name: str) -> "Any":
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'hone.reward' has no attribute {name!r}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    verify = import_module("hone.reward.verify")
    return (verify.MAKERS | verify.VERIFIERS)[name]


def __dir__() -> list[str]:
    return list(__all__)
