"""What a person reads while a run goes on: held-out numbers, invalid rewards, a reward that tells nothing apart."""

import json
from pathlib import Path

import pytest
import torch
from small import ROWS, World, recipe, write_rows

import hone as package

torch.set_num_threads(1)


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if all(word in line for word in words)]


def test_the_held_out_loss_is_printed_when_it_is_computed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    held_out = write_rows(tmp_path / "held.jsonl", ROWS["answers"][:3])
    package.run(recipe(world, "sft", tmp_path / "run", f"eval_data={held_out}", "train.eval_every=3"))
    rows = {row["step"]: row for row in metrics(tmp_path / "run") if "eval/loss" in row}
    expected = [f"step {n}: held-out loss {rows[n]['eval/loss']:.4g}, nll {rows[n]['eval/nll']:.4g}" for n in (3, 4)]
    assert lines(capsys, "held-out") == expected


def test_held_out_rewards_are_printed_too(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    held_out = write_rows(tmp_path / "held.jsonl", ROWS["problems"][:2])
    package.run(recipe(world, "rloo", tmp_path / "run", f"eval_data={held_out}"))
    (last,) = (row for row in metrics(tmp_path / "run") if "eval/reward" in row)
    (line,) = lines(capsys, "held-out")
    assert line.startswith(f"step 4: held-out reward {last['eval/reward']:.4g}, ")


def test_nothing_is_said_of_what_is_not_held_out(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    package.run(recipe(world, "sft", tmp_path / "run"))
    assert lines(capsys, "held-out") == []


@pytest.mark.parametrize(("algo", "group"), [("grpo", 3), ("reinforce", 1)])
def test_a_reward_that_never_differs_is_said(
    algo: str, group: int, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "dead.py").write_text('"""A reward that gives nothing."""\n\n\ndef zero(completion):\n    return 0.0\n')
    settings = [f"reward={tmp_path / 'dead.py'}:zero", f"sample.group={group}"]
    package.run(recipe(world, algo, tmp_path / "run", *settings))
    assert [row["varied"] for row in metrics(tmp_path / "run")] == [0.0] * 4
    (line,) = lines(capsys, "varied")
    assert line.startswith("step 3: warn: varied 0 below 0.001 for 3 steps: rewards do not differ within any group")


def test_a_reward_that_differs_is_not_blamed(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    package.run(recipe(world, "grpo", tmp_path / "run"))
    assert max(row["varied"] for row in metrics(tmp_path / "run")) > 0
    assert lines(capsys, "varied") == []


def test_invalid_rewards_are_on_the_line(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    body = "    n = sum(completion.encode())\n    return n % 7 if n % 4 else None\n"
    text = f'"""Rewards."""\n\n\ndef some(completion):\n{body}'
    (tmp_path / "holes.py").write_text(text)
    settings = [f"reward={tmp_path / 'holes.py'}:some", "train.max_invalid=1.0", "train.steps=2"]
    package.run(recipe(world, "grpo", tmp_path / "run", *settings))
    shares = [row["invalid"] for row in metrics(tmp_path / "run")]
    assert shares[0] > 0
    printed = [line.split("invalid")[1].split()[0] for line in lines(capsys, "reward", "invalid", "left")]
    assert printed == [f"{share:.0%}" for share in shares]
