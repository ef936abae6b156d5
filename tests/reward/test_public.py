"""What a user composes rewards from, by the names in `hone.reward`."""

import inspect

import pytest

from hone import reward
from hone.config.recipe import REWARDS
from hone.errors import HoneError
from hone.reward.score import as_scorer
from hone.types import Rollout, Task

BY_HAND = [  # name, completion, gold answer, value
    ("math", r"2 + 2 is \boxed{4}.", "4", 1.0),
    ("math", r"2 + 2 is \boxed{5}.", "4", 0.0),
    ("choice", "The answer is B.", "B", 1.0),
    ("exact", "<answer>yes</answer>", "yes", 1.0),
    ("f1", "red blue", "blue green", 0.5),
]


def test_a_verifier_takes_the_gold_answer_or_a_task():
    for name, completion, gold, value in BY_HAND:
        verifier = getattr(reward, name)
        assert verifier(completion, gold).value == value, (name, completion)
        assert verifier(completion, Task(prompt="q", answer=gold)).value == value, (name, completion)


def test_a_gold_answer_that_is_no_text_is_refused():
    for name, completion, gold in (
        ("math", r"\boxed{42}", 42),
        ("choice", "B", None),
        ("exact", "4", ["4"]),
        ("f1", "", 1),
    ):
        with pytest.raises(HoneError, match="give a Task, or the gold answer as text"):
            getattr(reward, name)(completion, gold)
    with pytest.raises(HoneError, match=r"the task is \{'gym': 'x'\}: give a Task"):
        reward.gym("4", {"gym": "x"})  # pyright: ignore[reportArgumentType]


def test_a_task_without_a_gold_answer_is_not_told_as_one_with_the_answer_none():
    for verifier in (reward.math, reward.choice, reward.exact, reward.f1, reward.numeric("1%")):
        outcome = verifier("4", Task(prompt="q"))
        assert not outcome.valid
        assert "None" not in outcome.reason


def test_makers_give_verifiers():
    assert reward.numeric("1%")("3.14", "3.1416").value == 1.0
    assert reward.numeric("0.001")("3.14", "3.1416").value == 0.0
    assert reward.regex("[ab]+")("abba") == 1.0
    assert reward.tags("plan,answer")("<plan>p</plan><answer>4</answer>") == 1.0
    assert reward.format("<think>p</think><answer>4</answer>") == 1.0


def test_public_verifiers_combine_into_one_reward():
    both = reward.combine({"math": (reward.math, 1.0), "format": (reward.format, 0.5)})
    rollout = Rollout(tokens=[1, 2], mask=[False, True], text=r"\boxed{4}", task=Task(prompt="q", answer="4"))
    (outcome,) = both([rollout])
    assert (outcome.value, outcome.added) == (1.0, {"math": 1.0, "format": 0.0})


def test_code_runs_the_tests_of_a_task():
    task = Task(prompt="Write add.", extra={"test_list": ["assert add(1, 2) == 3"]})
    assert reward.code("```python\ndef add(a, b):\n    return a + b\n```", task).value == 1.0
    assert reward.code("```python\ndef add(a, b):\n    return a - b\n```", task).value == 0.0


def test_every_verifier_that_a_recipe_can_name_is_public():
    names = {name.partition(":")[0] for name in REWARDS} - {"judge", "model", "FILE.py"}
    assert names <= {*reward.__all__}, names - {*reward.__all__}


def test_every_public_name_is_there_and_documented():
    for name in reward.__all__:
        assert inspect.getdoc(getattr(reward, name)), name
    assert dir(reward) == reward.__all__


def test_a_public_verifier_is_a_reward_for_a_recipe():
    for name in ("math", "choice", "exact", "f1", "code", "gym", "format"):
        assert as_scorer(getattr(reward, name)).one_by_one, name


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'maths'"):
        _ = reward.maths  # pyright: ignore[reportAttributeAccessIssue]
