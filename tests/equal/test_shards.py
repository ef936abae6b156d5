"""Weights shared out over ranks change nothing: the trajectory is that of one process which holds all of them."""

import pytest
import torch
from each import each
from ranks import assert_alike, assert_as_alone, by_ranks
from ways import CASES, Trajectory, Way

torch.set_num_threads(1)
UNEVEN = Way(prompts=5, micro_rows=3, layout="packed", shard="fsdp")  # ranks have different numbers of micro-batches
WAYS = {
    2: {
        "gradients summed once": UNEVEN,
        "gradients never whole": Way(
            micro_rows=2, layout="shared", checkpoint=True, backends=("fused",), clip=0.01, shard="fsdp_lean"
        ),
    },
    3: {"a rank without rows": Way(prompts=2, shard="fsdp")},
}
QUICK = (
    "sft", "dpo", "reward_model", "grpo", "ppo", "ppo, own critic, entropy, bootstrap", "ppo penalty, exact",
    "grpo with a LoRA",
)  # fmt: skip
CHOSEN = {2: QUICK, 3: ("sft", "ppo", "grpo with a LoRA")}
RUNS = [(name, ranks, way) for ranks, ways in WAYS.items() for way in ways for name in CHOSEN[ranks]]
OTHERS = [name for name in CASES if name not in QUICK and name != "trpo"]  # trpo is refused
Found = dict[int, dict[tuple[str, str], list[Trajectory]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """The quick cases by 2 and by 3 processes."""
    return {ranks: by_ranks(ranks, ways, CHOSEN[ranks]) for ranks, ways in WAYS.items()}


@each(("name", "ranks", "way"), RUNS)
def test_parts_of_the_weights_change_no_weight_and_no_metric(name: str, ranks: int, way: str, found: Found) -> None:
    assert_as_alone(name, WAYS[ranks][way], found[ranks][name, way])
    assert_alike(name, found[ranks][name, way])


@pytest.mark.parametrize("name", ["sft", "grpo", "ppo"])
def test_the_clip_of_these_trajectories_bites(name: str, found: Found) -> None:
    for seen in found[2][name, "gradients never whole"]:
        assert all(m["grad_norm"] > 0.01 for m in seen.metrics)


@pytest.mark.slow
def test_every_other_algorithm_agrees_too() -> None:
    seen = by_ranks(2, {"uneven": UNEVEN}, OTHERS)
    for name in OTHERS:
        assert_as_alone(name, UNEVEN, seen[name, "uneven"])
        assert_alike(name, seen[name, "uneven"])
