"""One trajectory, many ways: the first steps of every algorithm, cut and laid out differently, give the same weights
and the same logged numbers."""

import pytest
import torch
from each import each
from torch import Tensor
from ways import CASES, FEW, Trajectory, Way, alone, furthest, start, trajectory

from hone.train import optim

torch.set_num_threads(1)
SINGLE = torch.float32
WAYS = {  # which rows are computed together, and when
    "one row a micro-batch": Way(micro_rows=1),
    "prompts shared, three rows a micro-batch": Way(micro_rows=3, layout="shared", left=2, right=1, checkpoint=True),
    "few tokens a micro-batch": Way(micro_tokens=1),
    "rows in another order": Way(order=3),
    "old log-probs by a pass of their own": Way(early=True, micro_rows=3),
    "passes begun before rewards": Way(begun=True, micro_rows=3, layout="shared", left=2, order=2),
    "everything at once": Way(micro_rows=5, layout="packed", left=3, right=2, order=1, checkpoint=True, chunk=7),
}
BELOW = {  # how the model computes a row
    "packed, three rows a micro-batch": Way(micro_rows=3, layout="packed"),
    "packed": Way(layout="packed"),
    "prompts shared": Way(layout="shared"),
    "packed, thirty tokens a micro-batch": Way(micro_tokens=30, layout="packed"),
    "padding on both sides": Way(left=2, right=9),
    "activations recomputed": Way(checkpoint=True),
    "vocabulary in chunks": Way(chunk=3),
    "fast layers": Way(backends=("fused",)),
    "fast layers, prompts shared, three rows": Way(backends=("fused",), micro_rows=3, layout="shared", checkpoint=True),
    "copies stepped on the host": Way(copies=True, micro_rows=3),
    "replayed": Way(backends=("fused", "graphs"), micro_rows=3, layout="shared"),
    "shared out in tiles": Way(backends=("fused", "graphs"), tiles=True, micro_rows=3, layout="shared", left=2),
    "all layers at once in C++": Way(backends=("native",), layout="shared", micro_rows=3, left=2),
    "layers in C++, prompts shared": Way(backends=("native",), layout="shared", micro_rows=3, left=2, checkpoint=True),
}
# What an algorithm's weights, totals and columns must be right for: these are tried with every algorithm.
ALGORITHM = ("one row a micro-batch", "old log-probs by a pass of their own", "everything at once")
# No algorithm sees the others: the fast tests try them with the few that differ most.
OTHERS = [name for name in CASES if name not in FEW]
SEEN = {way: WAYS[way] for way in ALGORITHM}
UNSEEN = {way: how for way, how in (WAYS | BELOW).items() if way not in ALGORITHM}


def plain(name: str) -> Trajectory:
    """The trajectory that the others are compared with."""
    return alone(name, Way())


def compare(name: str, way: Way) -> None:
    other = trajectory(CASES[name], way)
    assert furthest(plain(name).weights, other.weights) <= 1e-12
    assert [m.keys() for m in other.metrics] == [m.keys() for m in plain(name).metrics]
    for ours, theirs in zip(plain(name).metrics, other.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@each("name", CASES)
def test_the_plain_way_trains(name: str) -> None:
    learner, _ = start(CASES[name], Way())
    before = [p.detach() for p in optim.parameters_of(learner.optimizer)]
    assert furthest(before, plain(name).weights) > 0.01


@pytest.mark.parametrize("way", SEEN)
@each("name", CASES)
def test_no_way_that_an_algorithm_sees_changes_a_weight_or_a_metric(name: str, way: str) -> None:
    compare(name, SEEN[way])


@pytest.mark.parametrize("way", UNSEEN)
@each("name", FEW)
def test_no_way_of_computing_changes_a_weight_or_a_metric(name: str, way: str) -> None:
    compare(name, UNSEEN[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", UNSEEN)
@each("name", OTHERS)
def test_nor_does_it_for_any_other_algorithm(name: str, way: str) -> None:
    compare(name, UNSEEN[way])


@each("name", CASES)
def test_passes_begun_before_rewards_change_no_bit(name: str) -> None:
    other = trajectory(CASES[name], Way(begun=True))
    assert furthest(plain(name).weights, other.weights) == 0
    assert other.metrics == plain(name).metrics


def only_rounding(name: str) -> None:
    one = trajectory(CASES[name], Way(dtype=SINGLE))
    other = trajectory(CASES[name], Way(dtype=SINGLE, micro_rows=3, layout="packed", left=2, order=1, chunk=5))
    difference = residual(one.weights, other.weights)
    assert difference.abs().max() < 2e-5, "each weight has moved by about 0.02"
    assert abs(difference.mean()) <= 0.2 * difference.std(), "rounding goes either way"


def residual(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.cat([(x.double() - y.double()).flatten() for x, y in zip(a, b, strict=True)])


@each("name", FEW)
def test_in_single_precision_only_rounding_differs_and_has_no_direction(name: str) -> None:
    only_rounding(name)


@pytest.mark.slow
@each("name", OTHERS)
def test_so_it_is_for_any_other_algorithm(name: str) -> None:
    only_rounding(name)


@each("name", CASES)
def test_the_same_run_twice_is_the_same_to_the_bit(name: str) -> None:
    second = trajectory(CASES[name], Way())
    assert furthest(plain(name).weights, second.weights) == 0
    assert second.metrics == plain(name).metrics


@each("name", FEW)
def test_another_seed_is_another_run(name: str) -> None:
    assert furthest(plain(name).weights, trajectory(CASES[name], Way(seed=1)).weights) > 0
