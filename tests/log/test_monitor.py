"""The statistics of collapse by hand, and a monitor that speaks once, in time, with the remedy."""

import json
import math
import random
from array import array
from dataclasses import fields

import pytest
import torch
from each import each

from hone.log.limits import LimitSpec
from hone.log.monitor import LOW, REMEDIES, Monitor
from hone.log.rollouts import count_repeated, repetition

torch.set_num_threads(1)


def test_repetition_by_hand() -> None:
    # "a b a b a b": 4-grams abab, baba, abab -> one of three is a repeat
    assert repetition([["a", "b", "a", "b", "a", "b"]]) == pytest.approx(1 / 3)
    # bigrams 11 11 11 | 12 23: two repeats of five, and the 1 2 of another completion is no repeat
    assert repetition([[1, 1, 1, 1], [1, 2, 3]], n=2) == pytest.approx(2 / 5)
    assert repetition([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 0.0
    assert repetition([]) == repetition([[1, 2, 3]]) == repetition([[]]) == 0.0


@each("n", [1, 2, 4, 9])
@each("vocabulary", [1, 3, 70_000, 2**40])
def test_completions_in_arrays_are_counted_as_those_in_lists(n: int, vocabulary: int) -> None:
    draw = random.Random(n)
    rows = [[draw.randrange(vocabulary) for _ in range(draw.choice([0, 1, 3, 4, 40]))] for _ in range(50)]
    rows += [row[:3] * 4 for row in rows]
    found = count_repeated([array("q", row) for row in rows], n)
    assert found == count_repeated(rows, n)
    assert 0 < found[0] < found[1]
    assert count_repeated([array("q")] * 50, n) == (0, 0)


def test_every_limit_has_a_remedy_and_every_remedy_a_limit() -> None:
    limits = {f.name.rsplit("_", 1)[0] for f in fields(LimitSpec) if not f.name.startswith("patience")}
    assert limits == set(REMEDIES)
    assert limits >= LOW


def test_a_warning_comes_after_patience_names_the_remedy_and_comes_once() -> None:
    monitor = Monitor(LimitSpec(entropy_warn=0.05, entropy_stop=None, patience_warn=3))
    said = [monitor.check({"entropy": 0.02}) for step in range(1, 8)]
    assert [len(s) for s in said] == [0, 0, 1, 0, 0, 0, 0]
    (warning,) = said[2]
    assert warning.severity == "warn"
    assert warning.message == (
        "entropy 0.02 below 0.05 for 3 steps: the policy hardly varies any more; if its reward is not good yet, lower "
        "optim.lr, or raise algo.entropy where the algorithm has it"
    )


def test_noise_does_not_trip_it_and_recovery_rearms_it() -> None:
    monitor = Monitor(LimitSpec(entropy_warn=0.05, entropy_stop=None, patience_warn=2))
    values = [0.01, 0.9, 0.01, 0.9, 0.01, 0.01, 0.01, 0.9, 0.01, 0.01]
    said = [len(monitor.check({"entropy": x})) for x in values]
    assert said == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_step_without_the_metric_neither_counts_nor_recovers() -> None:
    monitor = Monitor(LimitSpec(ref_kl_warn=1.0, patience_warn=2))
    said = [len(monitor.check(m)) for m in [{"ref_kl": 2.0}, {}, {"ref_kl": 2.0}, {}, {"ref_kl": 2.0}]]
    assert said == [0, 0, 1, 0, 0]


def test_a_stop_follows_a_warning_and_is_said_instead_of_it() -> None:
    monitor = Monitor(LimitSpec(gen_kl_warn=0.02, gen_kl_stop=0.5, patience_warn=2, patience_stop=4))
    said = [[w.severity for w in monitor.check({"gen_kl": 3.0})] for s in range(6)]
    assert said == [[], ["warn"], [], ["stop"], [], []]
    once = Monitor(LimitSpec(gen_kl_warn=0.02, gen_kl_stop=0.5, patience_warn=1, patience_stop=1))
    (only,) = once.check({"gen_kl": 3.0})
    assert only.severity == "stop"
    assert only.message.startswith("gen_kl 3 above 0.5: ")


@each("name", sorted(set(REMEDIES) - {"nonfinite"}))
@each("severity", ["warn", "stop"])
def test_each_limit_trips_on_its_own_side_only(name: str, severity: str) -> None:
    other = "stop" if severity == "warn" else "warn"
    limits = LimitSpec(**{f"{name}_{severity}": 0.4, f"{name}_{other}": None, f"patience_{severity}": 1})
    bad, good = (0.3, 0.5) if name in LOW else (0.5, 0.3)
    assert Monitor(limits).check({name: good}) == []
    assert Monitor(limits).check({name: 0.4}) == [], "the limit itself is allowed"
    (warning,) = Monitor(limits).check({name: bad})
    assert warning.severity == severity
    assert warning.message == f"{name} {bad} {'below' if name in LOW else 'above'} 0.4: {REMEDIES[name]}"
    off = LimitSpec(**{f"{name}_warn": None, f"{name}_stop": None, "patience_warn": 1, "patience_stop": 1})
    assert Monitor(off).check({name: bad}) == []


@each("bad", [math.nan, math.inf, -math.inf])
@each("name", ["loss", "grad_norm", "value_loss"])
def test_a_loss_that_is_not_a_number_warns_at_once_and_stops_if_it_stays(name: str, bad: float) -> None:
    monitor = Monitor()
    assert monitor.check({name: 1.0}) == []
    (warning,) = monitor.check({name: bad, "reward": 1.0})
    assert warning.severity == "warn"
    assert warning.message.endswith(REMEDIES["nonfinite"])
    assert monitor.check({name: bad}) == []
    (stop,) = monitor.check({name: bad})
    assert stop.severity == "stop"
    assert Monitor(LimitSpec(nonfinite_warn=None, nonfinite_stop=None)).check({name: bad}) == []


def test_a_statistic_that_is_nan_warns_and_infinity_stops() -> None:
    monitor = Monitor(LimitSpec(patience_warn=1, patience_stop=1))
    (lost,) = monitor.check({"entropy": math.nan})
    assert lost.severity == "warn"
    assert lost.message.startswith("entropy is nan")
    (gone,) = monitor.check({"gen_kl": math.inf})
    assert gone.severity == "stop"


def test_a_healthy_run_says_nothing() -> None:
    healthy = {
        "loss": 0.1, "grad_norm": 1.0, "entropy": 0.4, "clip_fraction": 0.05, "ess": 0.95, "gen_kl": 1e-4,
        "explained_variance": 0.6, "repetition": 0.02, "ref_kl": 0.05, "truncated": 0.02, "invalid": 0.0,
        "varied": 0.01, "other": 1e9,
    }  # fmt: skip
    monitor = Monitor()
    assert [w for step in range(50) for w in monitor.check(healthy)] == []


def test_a_reward_that_never_differs_is_said_once_with_the_remedy_and_stops_nothing() -> None:
    monitor = Monitor()
    said = [monitor.check({"varied": 0.0}) for step in range(1, 30)]
    assert [n for n, found in enumerate(said, start=1) if found] == [3]
    assert said[2][0].severity == "warn"
    assert said[2][0].message.startswith("varied 0 below 0.001 for 3 steps: rewards do not differ within any group")


def test_the_state_goes_through_json_and_on_as_if_never_interrupted() -> None:
    values = [0.01, 0.01, 0.9, 0.01, 0.01, 0.01, 0.01, 1e-6, 1e-6, 1e-6, 1e-6]
    limits = LimitSpec(patience_warn=2, patience_stop=3)
    straight = Monitor(limits)
    expected = [straight.check({"entropy": x}) for x in values]
    assert {w.severity for found in expected for w in found} == {"warn", "stop"}
    for cut in range(len(values)):
        first, second = Monitor(limits), Monitor(limits)
        found = [first.check({"entropy": x}) for x in values[:cut]]
        second.load(json.loads(json.dumps(first.state())))
        found += [second.check({"entropy": x}) for x in values[cut:]]
        assert found == expected


def test_completions_of_two_tokens_in_all_repeat_nothing():
    assert count_repeated([array("q", [1, 2]), *([array("q")] * 15)]) == (0, 0)
