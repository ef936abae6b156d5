"""Majority voting (self-consistency, Wang et al. 2022, arXiv 2203.11171): of several answers, the commonest one.

Answers are compared as the verifier compares them: 1/2, 0.5 and \\frac{1}{2} are one answer. Where a reward reads no
answer, as one that runs tests does, there is nothing to vote on.
"""

from collections.abc import Callable, Sequence

from hone.eval.pass_at_k import majority
from hone.reward.verify.answers import answered
from hone.reward.verify.choice import final_choice
from hone.reward.verify.math.extract import final_answer
from hone.reward.verify.math.verdict import math_reward
from hone.types import Group, Rollout, Task

Read = Callable[[str, Task], str | None]


def _math(completion: str, task: Task) -> str | None:
    return final_answer(completion)


def _choice(completion: str, task: Task) -> str | None:
    return final_choice(completion, task.prompt)


def _exact(completion: str, task: Task) -> str | None:
    return answered(completion) or None


READERS: dict[str, Read] = {"math": _math, "choice": _choice, "exact": _exact}  # by the verifier that compares them


def verifier_of(rollout: Rollout) -> str:
    """The part of the reward whose answers can be voted on, "" where there is none."""
    parts = rollout.outcome.parts if rollout.outcome else {}
    return next((name for name in READERS if name in parts), "")


def majority_at(groups: Sequence[Group]) -> dict[str, float]:
    """{"maj@n": the share of problems whose commonest answer is right}, n samples of each; {} where none can vote."""
    least = min((len(g) for g in groups), default=0)
    name = verifier_of(groups[0][0]) if least else ""
    if least < 2 or not name:
        return {}
    marks = [_mark(elected, name) for g in groups if (elected := vote(g[:least], name)) is not None]
    return {f"maj@{least}": sum(marks) / len(groups)}


def vote(group: Group, name: str) -> Rollout | None:
    """The first completion with the commonest answer; None where none has an answer."""
    keys, known = list[int | None](), list[str]()
    for r in group:
        task = r.task or Task(prompt="")
        answer = READERS[name](r.text, task)
        valid = r.outcome is not None and r.outcome.valid
        keys.append(_key(answer, known, name) if answer is not None and valid else None)
    chosen = majority(keys)
    return None if chosen is None else group[keys.index(chosen)]


def _key(answer: str, known: list[str], name: str) -> int:
    """The number of the answer among those met so far, to which it is added if it is new."""
    for i, other in enumerate(known):
        if answer == other or (name == "math" and _equal(other, answer)):
            return i
    known.append(answer)
    return len(known) - 1


def _equal(one: str, other: str) -> bool:
    """Each is right where the other is the gold answer: a form that says more than the other is not the same."""
    pairs = ((one, other), (other, one))
    return all(math_reward(f"<answer>{b}</answer>", Task(prompt="", answer=a)).value == 1 for a, b in pairs)


def _mark(rollout: Rollout, name: str) -> bool:
    return rollout.outcome is not None and rollout.outcome.parts.get(name) == 1
