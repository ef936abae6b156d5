"""Hone from Python: rows in memory, a reward that is any function, an algorithm that is a value."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import ROWS, World, metrics, recipe

import hone
from hone.algo import Algorithm
from hone.errors import HoneError
from hone.inference.defaults import Sampling
from hone.inference.rank import Rank, evaluate_ranked
from hone.log import progress

torch.set_num_threads(1)


def made(world: World, out: Path, **changes: Any) -> hone.Recipe:
    """A recipe as a reader of the README would write it."""
    settings = {
        "name": "mine",
        "out": str(out),
        "model": hone.ModelSpec(path=world / "model"),
        "data": [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}],
        "reward": lambda completion, task: float(task.answer in completion),
        "algo": hone.algo.grpo(beta=0.0),
        "sample": hone.SampleSpec(group=4, max_tokens=5),
        "train": hone.TrainSpec(steps=2, prompts=2),
    }
    return hone.Recipe(**(settings | changes))


def test_rows_a_lambda_and_an_algorithm_in_memory(world: World, tmp_path: Path):
    folder = hone.run(made(world, tmp_path / "run"))
    assert folder == tmp_path / "run/checkpoints/step-000002"
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    about = json.loads((tmp_path / "run/config.json").read_text())
    assert about["python"] == ["data", "reward", "algo"]
    assert about["recipe"]["data"] == "2 rows in memory"
    assert about["recipe"]["algo"]["name"] == "grpo"


def test_a_run_leaves_the_settings_of_torch_as_they_were(world: World, tmp_path: Path):
    def settings() -> tuple[Any, ...]:
        filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), filled

    assert not torch.are_deterministic_algorithms_enabled()  # else another test has left them on
    before = settings()
    hone.run(made(world, tmp_path / "run", train=hone.TrainSpec(steps=1, prompts=2, threads=2)))
    assert settings() == before
    with pytest.raises(HoneError, match="rewards are invalid"):
        hone.run(made(world, tmp_path / "other", reward=lambda completion: None))
    assert settings() == before


def test_the_package_and_a_recipe_do_not_wait_for_torch():
    code = "import sys, hone; hone.Recipe(algo=hone.Choice('grpo')); print('torch' in sys.modules, callable(hone.run))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


def test_every_name_is_there_from_the_package():
    assert hone.Choice("grpo").name == "grpo"
    assert hone.algo.dapo(high=0.3).refill
    assert callable(hone.run)
    assert callable(hone.resume)
    assert callable(hone.evaluate)


def test_tasks_reach_the_reward_as_they_were_written(world: World, tmp_path: Path):
    seen = dict[str, hone.Task]()

    def reward(completion: str, task: hone.Task) -> float:
        seen[task.id] = task
        return float(len(completion))

    tasks = [
        hone.Task(prompt="1+1=", answer="2", id="first", extra={"level": 3}),
        hone.Task(prompt="2+2="),  # a reward may need no answer
    ]
    hone.run(made(world, tmp_path / "run", data=tasks, reward=reward))
    assert seen["first"] == tasks[0]
    assert seen["2"] == replace(tasks[1], id="2")


def test_a_column_of_a_task_cannot_replace_its_prompt(world: World, tmp_path: Path):
    seen = set[str]()

    def reward(task: hone.Task) -> float:
        seen.add(str(task.prompt))
        return 0.0

    tasks = [hone.Task(prompt="1+1=", extra={"prompt": "other", "answer": "9"}, answer="2")]
    hone.run(made(world, tmp_path / "run", data=tasks, reward=reward))
    assert seen == {"1+1="}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": ["1+1="]}, "data row 1 is str: write each row as {column: value} or a hone.Task"),
        ({"data": [{"prompt": "1+1="}, 3]}, "data row 2 is int"),
        ({"data": []}, "there is no data"),
        ({"eval_data": [None]}, "data row 1 is NoneType"),
        ({"data": [{"prompt": "1+1=", "answer": [1]}]}, 'data row 1: column "answer" is list'),
        ({"reward": 3}, "reward: expected"),
        ({"reward": len}, "reward len has the parameter"),
        ({"algo": "grpo"}, "algo is 'grpo': use Choice('grpo') or hone.algo.grpo()"),
        ({"train": {"steps": 2}}, "train: expected"),
        ({"sample": hone.SampleSpec(group=1)}, "set sample.group to 2 or more"),
        ({"reward": {"math": 0.0}}, "there is no reward"),
    ],
)
def test_what_python_can_get_wrong(changes: dict[str, Any], says: str, world: World, tmp_path: Path):
    with pytest.raises(HoneError) as caught:
        hone.run(made(world, tmp_path / "run", **changes))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_offline_algorithms_take_rows_in_memory_but_no_tasks(world: World, tmp_path: Path):
    for name, rows in (("sft", "answers"), ("dpo", "pairs"), ("kto", "labels")):
        hone.run(made(world, tmp_path / name, data=ROWS[rows], algo=hone.Choice(name)))
    with pytest.raises(HoneError, match="data has tasks, sft reads rows"):
        hone.run(made(world, tmp_path / "run", data=[hone.Task(prompt="1")], algo=hone.Choice("sft")))


@pytest.mark.parametrize("value", [hone.algo.ppo(beta=0.1), hone.algo.sft(), hone.algo.kto(), hone.algo.reward_model()])
def test_an_algorithm_as_a_value_is_the_one_by_name(value: Algorithm, world: World, tmp_path: Path):
    settings = {"beta": 0.1} if value.name in ("ppo", "kto") else {}
    named = recipe(world, value.name, tmp_path / "named", "train.steps=2", **settings)
    hone.run(named)
    hone.run(replace(named, algo=value, out=str(tmp_path / "value")))
    assert metrics(tmp_path / "named") == metrics(tmp_path / "value")


def test_a_reward_may_take_the_whole_batch(world: World, tmp_path: Path):
    def reward(completions: list[str], tasks: list[hone.Task]) -> list[float]:
        assert len(completions) == len(tasks) == 8
        return [float(len(text) + len(task.prompt)) for text, task in zip(completions, tasks, strict=True)]

    hone.run(made(world, tmp_path / "run", reward=reward))
    assert metrics(tmp_path / "run")[0]["reward"] > 4


def test_an_outcome_may_say_invalid_and_is_left_out(world: World, tmp_path: Path):
    calls = [0]

    def reward(completion: str) -> hone.Outcome:
        calls[0] += 1
        good = calls[0] % 8 != 0
        return hone.Outcome(value=float(len(completion)) if good else None, reason="" if good else "no answer")

    hone.run(made(world, tmp_path / "run", reward=reward))
    assert [row["invalid"] for row in metrics(tmp_path / "run")] == [0.125, 0.125]


def test_evaluation_takes_rows_and_functions(world: World):
    found = hone.evaluate(world / "model", ROWS["problems"], reward=lambda completion: 1.0, samples=2, max_tokens=3)
    assert (found["reward"], found["reward_error"], found["pass@2"]) == (1.0, 0.0, 1.0)
    again = hone.evaluate(world / "model", ROWS["problems"], reward=lambda completion: 1.0, samples=2, max_tokens=3)
    assert again == found


@pytest.mark.parametrize("judge", ["", "scorer"])
def test_evaluation_says_why_some_rewards_are_invalid(judge: str, world: World, capsys):
    def sometimes(completion, task):
        return 1 / int(task.answer[-1])  # the answers are 0, 2, 4, ..., 12

    if judge:
        rank, how = Rank(judge=world / judge), Sampling(samples=2, max_tokens=2)
        evaluate_ranked(world / "model", ROWS["problems"], rank, reward=sometimes, how=how, say=progress.say)
    else:
        hone.evaluate(world / "model", ROWS["problems"], reward=sometimes, samples=2, max_tokens=2)
    said = capsys.readouterr().err
    assert "4 of 14 rewards are invalid, most often (4 times): ZeroDivisionError: division by zero" in said
    assert judge or "the first completion (invalid: ZeroDivisionError: division by zero (" in said
