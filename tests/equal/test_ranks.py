"""The number of ranks, uneven shares and ranks without a row change nothing: weights, metrics, or that all agree."""

import pytest
import torch
from ranks import by_ranks
from ways import CASES, Trajectory, Way, alone, furthest

torch.set_num_threads(1)
UNEVEN = Way(prompts=5, micro_rows=3, layout="packed")
WAYS = {2: {"uneven": UNEVEN}, 3: {"uneven": UNEVEN, "a rank without rows": Way(prompts=2)}}
RUNS = [(ranks, way) for ranks, ways in WAYS.items() for way in ways]
Found = dict[int, dict[tuple[str, str], list[Trajectory]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Every case by 2 and by 3 processes."""
    return {ranks: by_ranks(ranks, ways) for ranks, ways in WAYS.items()}


@pytest.mark.parametrize(("ranks", "way"), RUNS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_change_no_weight_and_no_metric(name: str, ranks: int, way: str, found: Found) -> None:
    one = alone(name, WAYS[ranks][way])
    for seen in found[ranks][name, way]:
        assert furthest(one.weights, seen.weights) <= 1e-12
        assert [m.keys() for m in seen.metrics] == [m.keys() for m in one.metrics]
        for ours, theirs in zip(one.metrics, seen.metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("ranks", "way"), RUNS)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hold_the_same_weights_to_the_bit(name: str, ranks: int, way: str, found: Found) -> None:
    first, *others = found[ranks][name, way]
    assert all(furthest(first.weights, other.weights) == 0 for other in others)
    assert all(other.metrics == first.metrics for other in others)
