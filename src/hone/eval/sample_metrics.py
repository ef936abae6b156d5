r"""Metrics of several samples a task: pass@k, majority vote, and the standard error of a mean.

Majority voting is self-consistency (Wang et al. 2022, arXiv 2203.11171). Answers are compared as the verifier compares
them: 1/2, 0.5 and \frac{1}{2} are one answer.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hone.errors import HoneError
from hone.reward.verify.answers import answer_text
from hone.reward.verify.choice import final_choice
from hone.reward.verify.math.extract import final_answer
from hone.reward.verify.math.verdict import math_reward
from hone.types import Group, Rollout, Task

A = TypeVar("A", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    mean: float
    stderr: float | None  # None: one value says nothing about the error
    count: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k) = 1 - prod_{i=n-c+1..n} (1 - k/i): unbiased, and no large binomials."""
    if not 0 <= correct <= samples or k < 1:
        raise ValueError(f"pass@{k} with {correct} of {samples} correct is not defined")
    if k > samples:
        raise HoneError(f"pass@{k} needs at least {k} samples a task, there are {samples}: sample more")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Estimate:
    """The mean pass@k over tasks, from (samples, correct) of each, with its standard error over tasks."""
    return mean_and_error([pass_at_k(samples, correct, k) for samples, correct in counts])


def mean_and_error(values: Sequence[float]) -> Estimate:
    """Mean and its standard error sqrt(sum (x - mean)^2 / (n-1) / n)."""
    n = len(values)
    if n == 0:
        raise HoneError("there is nothing to average: evaluate at least one task")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n), n)


def majority(answers: Iterable[A | None]) -> A | None:
    """The commonest answer, the first to appear among equals; None (no answer) has no vote."""
    votes = Counter(a for a in answers if a is not None)
    return max(votes, key=votes.__getitem__) if votes else None


Read = Callable[[str, Task], str | None]


def _math(completion: str, task: Task) -> str | None:
    return final_answer(completion, task.prompt)


def _choice(completion: str, task: Task) -> str | None:
    return final_choice(completion, task.prompt)


def _exact(completion: str, task: Task) -> str | None:
    return answer_text(completion, task.prompt) or None


READERS: dict[str, Read] = {"math": _math, "choice": _choice, "exact": _exact}  # by the verifier that compares them


def verifier_of(rollout: Rollout) -> str:
    """The part of the reward whose answers can be voted on; "" if none can."""
    parts = rollout.outcome.parts if rollout.outcome else {}
    return next((name for name in READERS if name in parts), "")


def majority_at(groups: Sequence[Group]) -> dict[str, float]:
    """{"maj@n": the share of problems whose commonest answer is right}, n samples of each; {} where none can vote."""
    least = min((len(g) for g in groups), default=0)
    name = next((name for g in groups for r in g if (name := verifier_of(r))), "")  # an invalid outcome has no parts
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
    """The index of the answer in `known`; a new answer is appended."""
    for i, other in enumerate(known):
        if answer == other or (name == "math" and _equal(other, answer)):
            return i
    known.append(answer)
    return len(known) - 1


def _equal(one: str, other: str) -> bool:
    """Whether each is right when the other is the gold answer. A form that says more is not the same."""
    pairs = ((one, other), (other, one))
    return all(math_reward(f"<answer>{b}</answer>", Task(prompt="", answer=a)).value == 1 for a, b in pairs)


def _mark(rollout: Rollout, name: str) -> bool:
    return rollout.outcome is not None and rollout.outcome.parts.get(name) == 1
