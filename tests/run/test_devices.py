"""The same recipe on a CPU and on a GPU: the same numbers in float32, bfloat16 near them, resume to the bit."""

import json
from pathlib import Path

import pytest
import torch
from small import World, recipe
from test_ranks_go_on import assert_near
from test_resume import assert_same_run, stop

import hone

torch.set_num_threads(1)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
MOVES = [("cpu", "cuda"), ("cuda", "cpu")]
ALGORITHMS = ["sft", "dpo", "grpo", "ppo", "reward_model"]


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_half_precision_follows_full_precision(algo: str, device: str, world: World, tmp_path: Path):
    for dtype in ("float32", "bfloat16"):
        hone.run(recipe(world, algo, tmp_path / dtype, f"train.dtype={dtype}", f"train.device={device}"))
    full, half = logged(tmp_path / "float32"), logged(tmp_path / "bfloat16")
    assert half[0]["loss"] == pytest.approx(full[0]["loss"], rel=0.1, abs=0.05)
    assert all(step["skipped"] == 0 for step in half)


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_in_full_precision_a_gpu_computes_what_a_cpu_does(algo: str, world: World, tmp_path: Path):
    for device in ("cpu", "cuda"):
        hone.run(recipe(world, algo, tmp_path / device, "train.dtype=float32", f"train.device={device}"))
    for ours, theirs in zip(logged(tmp_path / "cpu"), logged(tmp_path / "cuda"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_a_run_in_half_precision_resumes_to_the_bit(algo: str, device: str, world: World, tmp_path: Path, monkeypatch):
    settings = ["train.dtype=bfloat16", f"train.device={device}"]
    hone.run(recipe(world, algo, tmp_path / "whole", *settings))
    stop(recipe(world, algo, tmp_path / "cut", *settings), monkeypatch, step=2)
    hone.resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut", step=4)


@pytest.mark.parametrize(
    ("first", "then"), [("cpu", "cpu"), *(pytest.param(*ends, marks=pytest.mark.gpu) for ends in MOVES)]
)
@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_a_run_goes_on_on_another_device(algo: str, first: str, then: str, world: World, tmp_path: Path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    settings = ["train.dtype=float32"]
    hone.run(recipe(world, algo, whole, *settings, f"train.device={first}"))
    hone.run(recipe(world, algo, moved, *settings, f"train.device={first}", "train.steps=2"))
    hone.resume(moved, settings=[f"train.device={then}", "train.micro_rows=2", "train.steps=4"])
    assert_near(whole, moved, step=4)


def test_a_gpu_that_is_not_there_is_named(world: World, tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(hone.HoneError, match=r"no GPU here: set train\.device=cpu"):
        hone.run(recipe(world, "sft", tmp_path, "train.device=cuda"))


@pytest.mark.parametrize(
    ("setting", "match"), [("train.device=tpu", "train.device"), ("train.device=", "train.device")]
)
def test_a_device_that_does_not_exist_is_named(setting: str, match: str, world: World, tmp_path: Path):
    with pytest.raises(hone.HoneError, match=match):
        hone.run(recipe(world, "sft", tmp_path, setting))


def test_trpo_asks_for_full_precision(world: World, tmp_path: Path):
    with pytest.raises(hone.HoneError, match=r"train\.dtype=float32"):
        hone.run(recipe(world, "trpo", tmp_path, "train.dtype=bfloat16"))
