"""Checkpoints by the clock, as every recipe has them: a kill costs little, and no number of the run changes."""

import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import apart
import pytest
import torch
import torch.distributed as dist
from small import World, arguments, assert_same_run, contents, metrics, recipe, start_hone, temporary

import hone
from hone.checkpoint.saver import Saver, Timer
from hone.cli import main
from hone.config.recipe import Recipe
from hone.storage.files import checkpoints, latest

torch.set_num_threads(1)
AHEAD = ("train.lag=1", "train.mismatch=truncate")
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pretrain": ("pretrain", ()),
    "sft with a LoRA": ("sft", ("lora.rank=2",)),
    "dpo": ("dpo", ()),
    "kto": ("kto", ()),
    "reward_model, moments of a byte": ("reward_model", ("optim.bits=8",)),
    "ppo, own critic, minibatches": ("ppo", ("critic.kind=own", "train.minibatches=2", "train.epochs=2")),
    "grpo in bfloat16, reference refreshed": ("grpo", ("train.dtype=bfloat16", "train.reference_refresh=2")),
    "grpo, sampled ahead": ("grpo", AHEAD),
    "dapo, sampled ahead": ("dapo", AHEAD),
}


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that is so many seconds later whenever it is looked at."""
    calls = count()
    return lambda: seconds * next(calls)


def timed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Runs go by such a clock, and a checkpoint that is due is not put off because the last is being written."""
    monkeypatch.setattr("hone.launch.job.Timer", partial(Timer, clock=ticking(seconds)))
    monkeypatch.setattr(Saver, "busy", False)


def test_a_recipe_saves_by_the_clock_unless_it_is_told_not_to():
    assert (Recipe().save.minutes, Recipe().save.keep) == (5.0, 2)


@pytest.mark.parametrize("name", KINDS)
def test_saving_by_the_clock_changes_no_number_of_a_run(name: str, world: World, tmp_path: Path, monkeypatch):
    algo, settings = KINDS[name]
    whole, clock = tmp_path / "whole", tmp_path / "clock"
    hone.run(recipe(world, algo, whole, *settings, "train.steps=6"))
    timed(monkeypatch, 200.0)
    hone.run(recipe(world, algo, clock, *settings, "train.steps=6", "save.minutes=5"))
    assert len(checkpoints(clock / "checkpoints")) >= 4, "several of the steps were saved"
    assert_same_run(whole, clock, step=6)
    assert contents(whole / "start") == contents(clock / "start")


def test_the_last_two_are_kept(world: World, tmp_path: Path, monkeypatch):
    timed(monkeypatch, 400.0)
    hone.run(recipe(world, "sft", tmp_path / "run", "train.steps=7", "save.minutes=5", "save.keep=2"))
    assert list(checkpoints(tmp_path / "run/checkpoints")) == [6, 7]
    assert temporary(tmp_path / "run") == []


def test_those_that_a_rollback_needs_are_not_displaced(world: World, tmp_path: Path, monkeypatch):
    timed(monkeypatch, 400.0)
    settings = ["train.steps=7", "save.minutes=5", "save.every=3", "save.keep=2", "train.rollback=1000"]
    hone.run(recipe(world, "sft", tmp_path / "run", *settings))
    assert list(checkpoints(tmp_path / "run/checkpoints")) == [3, 6, 7]


@pytest.mark.parametrize(
    ("algo", "settings"),
    [pytest.param("sft", (), id="sft"), pytest.param("grpo", AHEAD, id="sampled ahead", marks=pytest.mark.slow)],
)
def test_a_run_as_it_is_by_default_outlives_a_kill(algo: str, settings, world: World, tmp_path: Path):
    out = tmp_path / "run"
    made = arguments(recipe(world, algo, out, "train.steps=100000"), world)
    with start_hone(*(text for text in made if not text.startswith("save.")), *settings) as process:
        try:
            assert process.stderr is not None
            while not (out / "checkpoints/latest").exists():
                assert process.stderr.readline(), "the run ended"
        finally:
            process.send_signal(signal.SIGKILL)
    saved = latest(out / "checkpoints")
    assert saved is not None
    steps = int(saved.name.removeprefix("step-")) + 3
    assert main(["resume", str(out), f"train.steps={steps}"]) == 0
    hone.run(recipe(world, algo, tmp_path / "whole", *settings, f"train.steps={steps}"))
    assert_same_run(tmp_path / "whole", out, step=steps)


def test_a_run_that_goes_on_saves_by_the_clock_too(world: World, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    hone.run(recipe(world, "sft", out, "train.steps=2"))
    timed(monkeypatch, 400.0)
    hone.resume(out, settings=["train.steps=6", "save.minutes=5"])
    assert set(checkpoints(out / "checkpoints")) >= {3, 4, 5}


def test_with_no_minutes_only_the_end_is_saved(world: World, tmp_path: Path, monkeypatch):
    timed(monkeypatch, 4000.0)
    hone.run(recipe(world, "sft", tmp_path / "run", "save.minutes=0"))
    assert list(checkpoints(tmp_path / "run/checkpoints")) == [4]


def disagree(world: World, folder: str) -> list[list[int]]:
    """On one rank: runs whose ranks have clocks of their own; which steps they saved."""
    found = list[list[int]]()
    for quick in (0, 1):
        clock = ticking(400.0) if dist.get_rank() == quick else lambda: 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hone.launch.job.Timer", partial(Timer, clock=clock))
            patch.setattr("hone.launch.job.process_age", lambda: 0.0)
            patch.setattr(
                "hone.checkpoint.saver.SHARE", 1e-9
            )  # a save is never cheap: the first is due after the minutes
            patch.setattr(Saver, "busy", False)
            out = Path(folder) / str(quick)
            hone.run(recipe(world, "sft", out, "train.steps=5", "save.minutes=5"))
        found.append(list(checkpoints(out / "checkpoints")))
    return found


def test_the_first_ranks_clock_decides_and_the_others_follow(world: World, tmp_path: Path):
    hone.run(recipe(world, "sft", tmp_path / "whole", "train.steps=5"))
    first, other = apart.by_ranks(2, disagree, world, str(tmp_path))
    assert first == other == [[1, 5], [5]]
    for quick in ("0", "1"):
        losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in ("whole", quick)]
        assert losses[0] == pytest.approx(losses[1])


def test_a_real_clock_is_looked_at(world: World, tmp_path: Path):
    """Some ten saves would fit into a second of these minutes: their cost alone puts them off."""
    began = time.monotonic()
    hone.run(recipe(world, "sft", tmp_path / "run", "train.steps=40", "save.minutes=0.001"))
    saved = checkpoints(tmp_path / "run/checkpoints")
    assert 40 in saved
    assert 2 <= len(saved) <= 3 + 10 * (time.monotonic() - began)
