"""Tasks of the real package reasoning-gym, where it is installed: made by name, marked as the package does."""

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from hone.data.feed.locate import Reading
from hone.data.rows.record import task_row
from hone.errors import HoneError
from hone.launch.feeds import load_rows
from hone.reward.score import Reward
from hone.reward.verify import VERIFIERS
from hone.types import Rollout, Task

torch.set_num_threads(1)
THERE = importlib.util.find_spec("reasoning_gym") is not None
needed = pytest.mark.skipif(not THERE, reason="reasoning-gym is not installed: make gym")


def mark(task: Task, text: str) -> float | None:
    return Reward(VERIFIERS["gym"])([Rollout(tokens=[1], mask=[True], text=text, task=task)])[0].value


@needed
@pytest.mark.parametrize("name", ["chain_sum", "countdown", "leg_counting", "spell_backward", "basic_arithmetic"])
def test_gold_answers_score_1_and_rubbish_does_not(name: str):
    rows = load_rows(f"gym:{name}:5:7", Reading())
    assert len(rows) == 5
    assert rows == load_rows(f"gym:{name}:5:7", Reading())
    assert rows != load_rows(f"gym:{name}:5:8", Reading())
    for row in rows:
        task = task_row(row)
        assert mark(task, f"<think>hm</think><answer>{task.answer}</answer>") == 1.0
        for wrong in ("", "<answer></answer>", "<answer>rubbish \udcff</answer>", "9^9^9"):
            assert (mark(task, wrong) or 0.0) < 0.5


@needed
def test_a_name_that_the_package_does_not_have():
    with pytest.raises(HoneError, match=r"no dataset 'chain_sums': use one of its .* chain_sum"):
        load_rows("gym:chain_sums", Reading())


@pytest.mark.parametrize("name", ["gym:", "gym:a:b", "gym:a:1:2:3", "gym:a:-1"])
def test_a_name_that_is_not_understood(name: str):
    with pytest.raises(HoneError, match="write gym:NAME, gym:NAME:SIZE or gym:NAME:SIZE:SEED"):
        load_rows(name, Reading())


@needed
def test_one_that_its_name_does_not_describe():
    with pytest.raises(HoneError, match="cannot make composite by its name alone"):
        load_rows("gym:composite:3", Reading())


@needed
def test_words_at_which_the_package_raises_are_a_wrong_answer_and_not_an_invalid_one():
    task = task_row(load_rows("gym:prime_factorization:1:7", Reading())[0])
    assert mark(task, f"<answer>{task.answer}</answer>") == 1.0
    assert mark(task, "<answer>rubbish</answer>") == 0.0
    assert mark(replace(task, answer="rubbish"), "<answer>rubbish</answer>") is None


def test_without_the_package_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(HoneError, match=r'pip install "hone\[gym\]"'):
        load_rows("gym:chain_sum", Reading())


def test_another_task_is_none_of_the_package():
    assert mark(Task(prompt="q", answer="1"), "1") is None
