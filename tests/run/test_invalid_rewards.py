"""A reward that raises on some completions: why, where and how often is told, logged, kept and shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import Wire, World, arguments, assert_same_run, interrupt, recipe, watched

import hone
from hone.cli import main
from hone.errors import HoneError, Interrupted
from hone.log.invalid import read_totals
from hone.log.sinks import read
from hone.storage.names import INVALID

torch.set_num_threads(1)
REWARDS = """\
import json
from fractions import Fraction


def deep(text):
    return json.loads(text)  # raises in the library, called from line 6


def some(completion, task):
    if task.prompt.startswith("3"):
        return deep("{")
    if task.prompt.startswith("4"):
        return None
    return sum(completion.encode()) % 7 / 7


async def waits(completion, task):
    return some(completion, task)


def batch(completions, tasks):
    return [1.0 / len(c) if not t.prompt.startswith("3") else float("nan") for c, t in zip(completions, tasks)]
"""
SETTINGS = ("train.max_invalid=1", "train.steps=5")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


def lines(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


@pytest.mark.parametrize("name", ["some", "waits"])
@pytest.mark.parametrize("where", ["always", "never"])
def test_the_users_line_is_told_once_counted_and_kept(
    name: str, where: str, file: Path, world: World, tmp_path, capsys
):
    out = tmp_path / "run"
    made = recipe(world, "grpo", out, *SETTINGS, f"reward={file}:{name}", f"train.reward_apart={where}")
    hone.run(made)
    err = capsys.readouterr().err
    raised = f"JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) ({file}:6)"
    assert len(lines(err, f": warn: no reward for 3 completions: {raised}")) == 1
    begins = REWARDS.splitlines().index(f"def {name}(completion, task):".replace("def w", "async def w")) + 1
    returned = f"the reward returned NoneType None, expected a finite number ({file}:{begins})"
    assert len(lines(err, returned)) == 2, "when it is first seen, and at the end"
    found = {total.kind: total for total in read_totals(out / INVALID)}
    assert set(found) == {f"JSONDecodeError ({file}:6)", returned}
    shares = [row["invalid"] for row in read(out / "metrics.jsonl")]
    assert sum(total.count for total in found.values()) == round(sum(shares) * 9)
    last = lines(err, "rewards were invalid")
    assert len(last) == 1
    assert f"{found[returned].count} x {returned}" in last[0]
    kept = [row for row in read(out / "samples.jsonl") if row["reward"] is None]
    assert {row["reason"] for row in kept} == {raised, returned}
    assert {row["step"] for row in kept} == {i + 1 for i, share in enumerate(shares) if share}, "one of each such step"
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "<h2>Invalid rewards</h2>" in page
    for total in found.values():
        assert f'<th scope="row">{total.kind}</th><td data-name="count"><span>{total.count}</span>' in page


def test_too_many_of_them_end_the_run_with_the_line(file: Path, world: World, tmp_path: Path):
    with pytest.raises(
        HoneError, match=r"rewards are invalid, more than 1%; .*\(.*mine\.py:[69]\): correct the reward"
    ):
        hone.run(recipe(world, "grpo", tmp_path / "run", "train.max_invalid=0.01", f"reward={file}:some"))


def test_a_resumed_run_has_counted_the_same(file: Path, world: World, tmp_path: Path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = (*SETTINGS, f"reward={file}:some", "train.reward_apart=never")
    hone.run(recipe(world, "grpo", whole, *settings))
    with pytest.raises(Interrupted):
        watched(lambda: hone.run(recipe(world, "grpo", cut, *settings)), Wire(3, 5, interrupt), monkeypatch)
    with (cut / INVALID).open("a") as rows:
        rows.write(json.dumps({"step": 4, "kind": "x", "count": 1, "reason": "of a step that is done again"}) + "\n")
    hone.resume(cut)
    assert_same_run(whole, cut, step=5)
    assert (whole / INVALID).read_bytes() == (cut / INVALID).read_bytes()


def test_parts_evaluations_and_held_out_verifiers_tell_theirs(file: Path, world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    made = recipe(world, "grpo", out, *SETTINGS, "train.steps=2", f"eval_data={world.data('problems')}",
                  f"parts.held_out={file}:some", "train.reward_apart=never")  # fmt: skip
    hone.run(replace(made, reward={f"{file}:batch": 1.0, "math": 0.1}))
    err = capsys.readouterr().err
    kinds = [total.kind for total in read_totals(out / INVALID)]
    place = f"({file}:{REWARDS.splitlines().index('def batch(completions, tasks):') + 1})"
    nan = f"{file}:batch: the reward returned float nan, expected a finite number {place}"
    assert f"held-out: {nan}" in kinds
    assert len(lines(err, "parts.held_out has no verdict: the reward returned NoneType")) == 1
    told = [line for line in lines(err, "warn: no reward for") if nan in line]
    assert ["held-out completion" in line for line in told] == [False, True], "in training, then in the evaluation"


def test_eval_lists_each_kind(file: Path, world: World, tmp_path: Path, capsys):
    model, data = world / "model", world.data("problems")
    assert main(["eval", model, data, "--reward", f"{file}:some", "--max-tokens", "4", "--temperature", "1"]) == 0
    err = capsys.readouterr().err
    assert "2 of 7 rewards are invalid, most often (1 time): " in err
    assert len(lines(err, f"({file}:6)")) >= 1
    assert len(lines(err, "NoneType None, expected a finite number")) == 1


def test_a_run_whose_rewards_are_all_valid_says_nothing_of_it(world: World, tmp_path: Path, capsys):
    assert main([*arguments(recipe(world, "grpo", tmp_path / "run"), world)]) == 0
    assert "no reward for" not in capsys.readouterr().err
    assert not (tmp_path / "run" / INVALID).exists()
