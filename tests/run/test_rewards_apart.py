"""A run whose reward hangs or takes its interpreter down: those outcomes are invalid, and it goes on."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from patience import patience
from small import World, assert_same_run, metrics, recipe

import hone
from hone.config.recipe import Recipe
from hone.errors import HoneError
from hone.reward.workers.reward_worker import MOST

torch.set_num_threads(1)


def apart(world: World, algo: str, out: Path, *settings: str) -> Recipe:
    """A recipe as a user would have it: a function of a file is called in processes of its own."""
    return recipe(world, algo, out, "train.reward_apart=auto", *settings)


ODD = """\
import os
import time


def hangs(completion):
    if len(completion.encode()) % 3 == 0:
        time.sleep(60)
    return float(len(completion) % 5)


def dies(completion):
    if len(completion.encode()) % 3 == 0:
        os.kill(os.getpid(), 9)
    return float(len(completion) % 5)


def sleeps(completion):
    time.sleep(60)


def always(completion):
    os.kill(os.getpid(), 9)


def where(completion):
    return float(os.getpid())
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "odd_rewards.py"
    path.write_text(ODD)
    return path


@pytest.mark.parametrize("name", ["hangs", "dies"])
def test_the_run_goes_on_without_what_hangs_or_dies(name: str, odd: Path, world: World, tmp_path: Path):
    settings = [
        "train.steps=2",
        "train.max_invalid=0.9",
        f"train.reward_timeout={patience(0.2)}",
        f"reward={odd}:{name}",
    ]
    hone.run(apart(world, "grpo", tmp_path / "run", *settings))
    rows = metrics(tmp_path / "run")
    assert len(rows) == 2
    assert any(0 < row["invalid"] < 1 for row in rows)


def test_a_reward_that_always_dies_stops_the_run_with_the_reason(odd: Path, world: World, tmp_path: Path):
    with pytest.raises(HoneError, match=r"9 of 9 rewards are invalid.* took its process down \(SIGKILL\)"):
        hone.run(apart(world, "grpo", tmp_path / "run", f"reward={odd}:always"))


@pytest.mark.parametrize("lag", [[], ["train.lag=1", "train.mismatch=truncate"]], ids=["", "sampled ahead"])
def test_a_reward_that_always_hangs_is_not_waited_for(lag, odd: Path, world: World, tmp_path: Path, capsys):
    settings = [f"reward={odd}:sleeps", "train.reward_timeout=1", "train.prompts=64", "sample.group=4", *lag]
    start = time.monotonic()
    with pytest.raises(HoneError, match=r"of 256 rewards are invalid, more than 1%.*timed out: reward sleeps"):
        hone.run(apart(world, "grpo", tmp_path / "run", "train.max_invalid=0.01", *settings))
    assert time.monotonic() - start < patience(256 / MOST / 2), "all of them take twice this at the least"
    assert capsys.readouterr().err.count("timed out: reward sleeps took more than 1 s (train.reward_timeout") == 1


def test_where_a_reward_runs_is_a_setting(odd: Path, world: World, tmp_path: Path):
    for how, elsewhere in (("auto", True), ("always", True), ("never", False)):
        settings = [f"train.reward_apart={how}", f"reward={odd}:where"]
        hone.run(apart(world, "reinforce", tmp_path / how, "train.steps=1", *settings))
        assert (metrics(tmp_path / how)[0]["reward"] != os.getpid()) == elsewhere
    calls = list[str]()
    made = apart(world, "reinforce", tmp_path / "python", "train.steps=1")
    hone.run(replace(made, reward=lambda completion: calls.append(completion) or 1.0))
    assert len(calls) == 9  # made in Python, it is called here
    made = apart(world, "reinforce", tmp_path / "sent", "train.steps=1", "train.reward_apart=always")
    hone.run(replace(made, reward=lambda completion: calls.append(completion) or 1.0))
    assert len(calls) == 9


def test_where_it_runs_changes_no_number(world: World, tmp_path: Path):
    for how in ("auto", "never"):
        hone.run(apart(world, "grpo", tmp_path / how, f"train.reward_apart={how}"))
    assert_same_run(tmp_path / "auto", tmp_path / "never", step=4)


def test_a_part_is_added_to_those_of_the_recipe_and_taken_out_by_a_weight_of_0(world: World, tmp_path: Path):
    settings = ["reward={'format': 1, 'exact': 2}", "reward.length:1-3=1.0", "reward.exact=0", "train.steps=1"]
    hone.run(apart(world, "grpo", tmp_path / "run", *settings))
    [row] = metrics(tmp_path / "run")
    assert {name for name in row if name.startswith("reward/")} == {"reward/format", "reward/length:1-3"}


def test_parts_held_out_verifiers_and_schedules_show_in_the_log(world: World, tmp_path: Path):
    settings = ["reward.length:1-3=1.0", "reward.format=0.5", "parts.held_out=regex:[a-z]+", "parts.high.format=0.1"]
    settings += ["parts.schedule.length:1-3=0:1 1:0", "train.steps=2"]
    hone.run(apart(world, "grpo", tmp_path / "run", "reward=format", *settings))
    first, second = metrics(tmp_path / "run")
    assert {"reward/length:1-3", "reward/format", "reward/held_out", "disagreement"} <= set(first)
    assert first["share/length:1-3"] == 1.0
    assert second.get("share/length:1-3", 0.0) == 0.0  # from step 1 on it weighs nothing
