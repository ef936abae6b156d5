"""pass@k against enumeration of every subset, and the votes and errors by hand."""

import itertools
import math
import random
import statistics

import pytest

from hone.errors import HoneError
from hone.eval.sample_metrics import Estimate, majority, mean_and_error, mean_pass_at_k, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 8):
        for c in range(n + 1):
            results = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(results, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_one_is_the_share_of_right_samples():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)


def test_large_counts_neither_overflow_nor_lose_the_answer():
    exact = 1 - math.comb(99_990, 1000) / math.comb(100_000, 1000)
    assert pass_at_k(100_000, 10, 1000) == pytest.approx(exact, rel=1e-9)
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-6)


def test_pass_at_k_is_unbiased():
    # each sample is right with p = 0.3: the expectation of the estimate is 1 - 0.7^k
    draw = random.Random(0)
    counts = [(6, sum(draw.random() < 0.3 for _ in range(6))) for _ in range(20_000)]
    estimate = mean_pass_at_k(counts, 3)
    assert estimate.stderr is not None
    assert abs(estimate.mean - (1 - 0.7**3)) < 4 * estimate.stderr


def test_what_is_not_defined_is_refused():
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 2, 0), (-1, 0, 1)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(n, c, k)
    with pytest.raises(HoneError, match="pass@8 needs at least 8 samples a task, there are 4"):
        mean_pass_at_k([(8, 1), (4, 2)], 8)


def test_mean_and_standard_error_by_hand():
    # 1 2 3 4: mean 2.5, squares 5, 5/3/4
    assert mean_and_error([1, 2, 3, 4]) == Estimate(2.5, math.sqrt(5 / 12), 4)
    assert mean_and_error([0.7]) == Estimate(0.7, None, 1)
    assert mean_and_error([0.1] * 10).stderr == pytest.approx(0, abs=1e-16)
    values = [random.Random(1).gauss(1e6, 1) for _ in range(50)] + [1e6]
    assert mean_and_error(values).stderr == pytest.approx(statistics.stdev(values) / math.sqrt(51))
    with pytest.raises(HoneError, match="nothing to average"):
        mean_and_error([])


def test_majority_is_the_commonest_and_the_first_among_equals():
    assert majority(["b", "a", "a"]) == "a"
    assert majority(["b", "a", "a", "b"]) == "b"
    assert majority([None, None, None, "a"]) == "a"
    assert majority([0, 0, 1]) == 0
    assert majority([None]) is None
    assert majority(iter([])) is None
