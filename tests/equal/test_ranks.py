"""The number of ranks, uneven shares and ranks without a row change nothing: weights, metrics, or that all agree."""

import pytest
import torch
from ranks import assert_alike, assert_as_alone, by_ranks
from ways import CASES, FEW, Trajectory, Way

torch.set_num_threads(1)
UNEVEN = Way(prompts=5, micro_rows=3, layout="packed")
WAYS = {2: {"uneven": UNEVEN}, 3: {"uneven": UNEVEN, "a rank without rows": Way(prompts=2)}}
RUNS = [(ranks, way) for ranks, ways in WAYS.items() for way in ways]
CHOSEN = {2: list(CASES), 3: FEW}  # two ranks with every algorithm; that there may be more of them no algorithm sees
Found = dict[int, dict[tuple[str, str], list[Trajectory]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """The cases by 2 and by 3 processes."""
    return {ranks: by_ranks(ranks, ways, CHOSEN[ranks]) for ranks, ways in WAYS.items()}


@pytest.mark.parametrize(("ranks", "way"), RUNS)
def test_ranks_change_no_weight_and_no_metric(ranks: int, way: str, found: Found) -> None:
    for name in CHOSEN[ranks]:
        assert_as_alone(name, WAYS[ranks][way], found[ranks][name, way])


@pytest.mark.parametrize(("ranks", "way"), RUNS)
def test_all_ranks_hold_the_same_weights_to_the_bit(ranks: int, way: str, found: Found) -> None:
    for name in CHOSEN[ranks]:
        assert_alike(name, found[ranks][name, way])


@pytest.mark.slow
def test_three_ranks_agree_for_every_other_algorithm() -> None:
    others = [name for name in CASES if name not in FEW]
    for (name, way), seen in by_ranks(3, WAYS[3], others).items():
        assert_as_alone(name, WAYS[3][way], seen)
