"""What a number of samples a task says about the model: pass@k, majority vote, and the error of a mean."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hone.errors import HoneError

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
    """pass@k over tasks, from (samples, correct) of each; the error is that over tasks."""
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
