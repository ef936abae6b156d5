"""Several ranks of one run: one that fails costs no step, and the run goes on with another number of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apart
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from small import World, assert_same_run, metrics, recipe, temporary

import hone
from hone.errors import HoneError
from hone.rollout.supply import Roller
from hone.storage.files import checkpoints

torch.set_num_threads(1)
AHEAD = ("train.lag=1", "train.mismatch=truncate")
Job = tuple[str, str, tuple[str, ...]]  # folder, algorithm, settings


# --- a rank that fails ---

FAILS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("grpo", ()),
    "grpo, weights in parts, sampled ahead": ("grpo", (*AHEAD, "train.shard=fsdp")),
    "dapo, which refills": ("dapo", ()),
}


def broken(world: World, folder: str, jobs: Sequence[Job]) -> list[str]:
    """On one rank: the whole run; one whose second rank fails when it samples for the third step; that one resumed."""
    said, stream = list[str](), Roller.stream

    def fails(roller: Any, *arguments: Any) -> Any:
        if dist.get_rank() == 1 and roller.requests >= 2 * 9:
            raise RuntimeError("the cable")
        return stream(roller, *arguments)

    for name, algo, settings in jobs:
        hone.run(recipe(world, algo, Path(folder) / name / "whole", *settings, "train.steps=3"))
        made = recipe(world, algo, Path(folder) / name / "cut", *settings, "train.steps=3")
        Roller.stream = fails  # pyright: ignore[reportAttributeAccessIssue]
        try:
            hone.run(made)
        except (RuntimeError, HoneError) as error:
            said.append(str(error))
        finally:
            Roller.stream = stream
        hone.resume(Path(made.out))
    return said


@pytest.fixture(scope="module")
def failed(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    folder = tmp_path_factory.mktemp("failed")
    jobs = [(str(i), *how) for i, how in enumerate(FAILS.values())]
    return folder, apart.by_ranks(2, broken, world, str(folder), jobs)


@pytest.mark.parametrize("name", FAILS)
def test_a_sampler_that_raises_on_one_rank_costs_no_step(name: str, failed: tuple[Path, list[list[str]]]) -> None:
    number = list(FAILS).index(name)
    folder, said = failed[0] / str(number), [words[number] for words in failed[1]]
    assert said == ["rank 1 could not go on: RuntimeError: the cable", "the cable"]
    first = min(checkpoints(folder / "cut/checkpoints"))
    assert first == 2 or (name == "dapo, which refills" and 0 < first < 3), "saved when it failed"
    assert_same_run(folder / "whole", folder / "cut", step=3)
    assert temporary(folder / "cut") == []


# --- another number of ranks ---

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "moments of one byte": ("sft", ("optim.bits=8",)),
    "grpo with a LoRA, sampled ahead, KL steered": ("grpo", (*AHEAD, "lora.rank=2", "algo.kl_target=0.001")),
    "moments on the host": ("sft", ("optim.offload=true",)),
    "own critic, minibatches": ("ppo", ("critic.kind=own", "train.minibatches=2", "algo.beta=0.1")),
    "dapo, which refills": ("dapo", ()),
    "reward model": ("reward_model", ()),
    "kto": ("kto", ()),
    "expert iteration": ("expert_iteration", ("algo.threshold=0.1",)),
}
QUICK = ("moments of one byte", "grpo with a LoRA, sampled ahead, KL steered")


def turn(world: World, folder: str, jobs: Sequence[Job]) -> None:
    """Each of these runs, or what is missing of it."""
    for name, algo, settings in jobs:
        hone.run(recipe(world, algo, Path(folder) / name, *settings), resume=True)


def assert_near(one: Path, two: Path, *, step: int) -> None:
    """The same counters and cursors; weights, moments and metrics within the contract's rounding."""
    a, b = (run / f"checkpoints/step-{step:06d}" for run in (one, two))
    states = [json.loads((folder / "state.json").read_text()) for folder in (a, b)]
    for part in ("updates", "version"):
        assert states[0][part] == states[1][part]
    assert states[0]["control"] == pytest.approx(states[1]["control"], rel=1e-4)
    for part in states[0]["parts"].keys() - {"monitor"}:
        assert states[0]["parts"][part] == states[1]["parts"][part]
    for path in sorted(p.relative_to(a) for p in a.rglob("*.safetensors")):
        ours, theirs = load_file(a / path), load_file(b / path)
        assert ours.keys() == theirs.keys()
        for key, x in ours.items():
            if x.is_floating_point():
                torch.testing.assert_close(x, theirs[key], rtol=1e-3, atol=2e-4, msg=f"{path} {key}")
    for ours, theirs in zip(metrics(one), metrics(two), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-4)


def turns(names: Sequence[str], world: World, folder: Path) -> None:
    """Two steps alone and two by two ranks, or the other way round, against four alone."""
    half, full = "train.steps=2", "train.steps=4"
    for name in names:
        algo, settings = KINDS[name]
        turn(world, str(folder), [(f"{name}/whole", algo, (*settings, full))])
        turn(world, str(folder), [(f"{name}/one-two", algo, (*settings, half))])
    more = [(f"{name}/one-two", KINDS[name][0], (*KINDS[name][1], full)) for name in names]
    fresh = [(f"{name}/two-one", KINDS[name][0], (*KINDS[name][1], half)) for name in names]
    apart.by_ranks(2, turn, world, str(folder), [*more, *fresh])
    for name in names:
        algo, settings = KINDS[name]
        turn(world, str(folder), [(f"{name}/two-one", algo, (*settings, full))])
        for other in ("one-two", "two-one"):
            assert_near(folder / name / "whole", folder / name / other, step=4)


def test_a_run_goes_on_with_another_number_of_ranks(world: World, tmp_path: Path) -> None:
    turns(QUICK, world, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name not in QUICK])
def test_every_other_kind_of_run_does_too(name: str, world: World, tmp_path: Path) -> None:
    turns([name], world, tmp_path)


def test_these_comparisons_can_fail(world: World, tmp_path: Path) -> None:
    for name, rate in (("one", "1e-3"), ("two", "2e-3")):
        hone.run(recipe(world, "sft", tmp_path / name, f"optim.lr={rate}"))
    with pytest.raises(AssertionError):
        assert_near(tmp_path / "one", tmp_path / "two", step=4)
