"""Rewards: bound by name, a number or invalid with its reason, never a silent zero."""

import functools
import json
import math
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from each import each

from hone.errors import HoneError
from hone.reward.group_scorer import GroupScorer
from hone.reward.outcome import LOCATION, location_of
from hone.reward.score import Reward, combine, score
from hone.types import Outcome, Rollout, Task

torch.set_num_threads(1)


def rollout(text: str = "yes", **extra) -> Rollout:
    task = Task(prompt=[{"role": "user", "content": "q"}], answer="yes", extra={"tests": [1, 2]})
    return Rollout(**{"tokens": [1, 2], "mask": [False, True], "text": text, "task": task, **extra})


def value_of(result) -> Outcome:
    return Reward(lambda completion: result)([rollout()])[0]


@each(
    ("result", "value"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (-3, -3.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (Outcome(value=2), 2.0),
        ({"a": 1, "b": 0.5}, 1.5),
    ],
)
def test_numbers_of_every_kind_are_a_value(result, value):
    outcome = value_of(result)
    assert outcome.value == value
    assert type(outcome.value) is float


@each(
    "result",
    [
        None,
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        torch.tensor(math.nan),
        torch.tensor([1.0]),
        np.array([1.0, 2.0]),
        10**400,
        1 + 2j,
        "1.0",
        "",
        b"1",
        [1.0],
        (),
        {},
        {"a": None},
        {"a": 1.0, "b": math.nan},
        {"a": 1e308, "b": 1e308},
        {"a": "1"},
        object(),
        Outcome(value=math.nan),
        Outcome(value="1"),  # type: ignore[arg-type]
        Outcome(value=1.0, parts={"a": math.nan}),
        Outcome(value=1.0, parts={"a": math.nan}, added={"a": 1.0}),
        (x for x in [1.0]),
    ],
)
def test_what_is_no_finite_number_is_invalid_and_says_why(result):
    outcome = value_of(result)
    assert outcome.value is None
    assert outcome.reason
    assert "\n" not in outcome.reason
    assert len(LOCATION.sub("", outcome.reason)) <= 300


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@each(
    ("error", "reason"),
    [
        (ValueError("bad\n  input"), "ValueError: bad input"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError(), "MemoryError"),
        (RecursionError("deep"), "RecursionError: deep"),
        (HoneError("no judge"), "HoneError: no judge"),
        (Unprintable(), "Unprintable"),
    ],
)
def test_a_crash_is_invalid_with_type_and_message(error, reason):
    def crash(completion):
        raise error

    def crash_all(completions):
        raise error

    for function in (crash, crash_all):
        place = f" ({location_of(function).rpartition(':')[0]}:{function.__code__.co_firstlineno + 1})"
        assert Reward(function)([rollout()] * 3) == [Outcome(value=None, reason=reason + place)] * 3


def test_one_crash_leaves_the_other_rows_alone():
    outcomes = Reward(lambda completion: 1 / len(completion))([rollout("a"), rollout(""), rollout("bb")])
    assert [o.value for o in outcomes] == [1.0, None, 0.5]


def test_an_invalid_outcome_keeps_its_reason_and_a_valid_one_its_parts():
    assert value_of(Outcome(value=None, reason="timed out")).reason == "timed out"
    assert value_of(Outcome(value=None)).reason
    assert value_of(Outcome(value=1.0, parts={"a": 1.0})).parts == {"a": 1.0}
    tensors = value_of(Outcome(value=1.0, parts={"a": torch.tensor(1.0)}, added={"a": torch.tensor(2.0)}))  # type: ignore[arg-type]
    assert [type(x) for x in (*tensors.parts.values(), *tensors.added.values())] == [float, float]
    assert value_of(10**400).reason.startswith("the reward returned int 1000")
    assert value_of({"a": 1, "b": 2}).parts == {"a": 1.0, "b": 2.0}


def test_parameters_are_bound_by_name_in_any_order():
    def reward(task, completion):
        return float(completion == task.answer)

    def whole(rollout):
        return len(rollout.tokens)

    def batched(*, tasks, completions):
        return [float(c == t.answer) for c, t in zip(completions, tasks, strict=True)]

    rows = [rollout("yes"), rollout("no")]
    assert [o.value for o in Reward(reward)(rows)] == [1.0, 0.0]
    assert [o.value for o in Reward(whole)(rows)] == [2.0, 2.0]
    assert [o.value for o in Reward(batched)(rows)] == [1.0, 0.0]


def test_methods_objects_and_partials_are_rewards():
    class Judge:
        def __call__(self, completion):
            return 1

        def by_method(self, completions):
            return [2] * len(completions)

    def scaled(completion, *, scale=1.0):
        return scale

    for function, value in (
        (Judge(), 1),
        (Judge().by_method, 2),
        (functools.partial(scaled, scale=3.0), 3),
        (scaled, 1),
    ):
        assert Reward(function)([rollout()])[0].value == value
    assert Reward(functools.partial(scaled, scale=3.0)).name == "scaled"
    assert Reward(Judge()).name == "Judge"


async def slow(completion):
    return 1.0


class SlowJudge:
    async def __call__(self, completion):
        return 1.0


@each(
    "function",
    [
        lambda: 1,
        lambda text: 1,
        lambda completion, taks: 1,
        lambda completion, taks=None: 1,
        lambda completion, tasks: 1,
        lambda completions, task: 1,
        lambda *args: 1,
        lambda **kwargs: 1,
        lambda completion, **kwargs: 1,
        lambda completion, /: 1,
        lambda completion, *, setting: 1,
        1.0,
        SimpleNamespace(),
    ],
)
def test_wrong_parameters_are_refused_when_wrapped(function):
    with pytest.raises(HoneError, match=r"^reward "):
        Reward(function)


def test_the_error_lists_the_allowed_names():
    def reward(completion, anwser):
        return 1

    with pytest.raises(HoneError, match=re.escape("reward reward has the parameter 'anwser'")) as caught:
        Reward(reward)
    for name in ("completion", "task", "rollout", "completions", "tasks", "rollouts"):
        assert name in str(caught.value)


@each(
    ("result", "says"),
    [
        ([1.0], "a list of 1, expected a list of 2"),
        ([1.0, 2.0, 3.0], "a list of 3, expected"),
        (1.0, "a float, expected"),
        (None, "a NoneType, expected"),
        ("ab", "a str of 2, expected"),
        ({0: 1.0, 1: 2.0}, "a dict, expected"),
        ({1.0, 2.0}, "a set, expected"),
        (iter([1.0, 2.0]), "expected a list of 2"),
        (torch.tensor(1.0), "a Tensor, expected"),
        (np.zeros(3), "a ndarray of 3, expected"),
    ],
)
def test_a_batched_reward_must_return_one_value_for_each(result, says):
    def judge(completions):
        return result

    with pytest.raises(HoneError) as caught:
        Reward(judge)([rollout(), rollout()])
    assert "reward judge returned" in str(caught.value)
    assert says in str(caught.value)


def test_a_batched_reward_may_return_arrays_and_mixed_values():
    def values(result):
        return [o.value for o in Reward(lambda completions: result)([rollout()] * 3)]

    assert values(np.array([1, 0, 2], dtype=np.float32)) == [1.0, 0.0, 2.0]
    assert values(torch.tensor([1.0, math.nan, 2.0])) == [1.0, None, 2.0]
    assert values((True, None, {"a": 2})) == [1.0, None, 2.0]
    assert values([10**400, "x", Outcome(value=1.0)]) == [None, None, 1.0]
    assert values(torch.ones(3, 2)) == [None, None, None]
    assert Reward(lambda completions: 1 / 0)([]) == []


def test_a_reward_can_change_nothing_of_ours():
    def vandal(completion, task, rollout):
        task.extra["tests"].append("forged")
        task.extra["new"] = 1
        task.prompt[0]["content"] = "forged"
        rollout.task.extra.clear()
        for name in ("tokens", "mask"):
            assert isinstance(getattr(rollout, name), tuple)
        return 1.0

    row = rollout()
    before = repr(row)
    (group,) = score([[row]], vandal)
    assert group[0].outcome == Outcome(value=1.0)
    assert repr(row) == before
    with pytest.raises(ValueError, match="no task"):
        Reward(vandal)([rollout(task=None)])


def test_score_fills_outcomes_in_order_and_keeps_all_else():
    groups = [[rollout("a"), rollout("bb")], [], [rollout("ccc")]]
    scored = score(groups, lambda completion: len(completion))
    assert [[r.outcome and r.outcome.value for r in g] for g in scored] == [[1, 2], [], [3]]
    assert [[r.text for r in g] for g in scored] == [["a", "bb"], [], ["ccc"]]
    assert scored[0][0].task is groups[0][0].task
    assert groups[0][0].outcome is None


def test_a_batched_reward_is_called_once_for_all_groups():
    sizes = []

    def judge(completions):
        sizes.append(len(completions))
        return [0.0] * len(completions)

    score([[rollout()] * 3, [rollout()] * 2], judge)
    assert sizes == [5]


def test_combined_rewards_are_a_weighted_sum_with_raw_parts():
    def length(completion):
        return {"chars": len(completion), "words": 1}

    both = combine({"right": (lambda completion: completion == "yes", 2.0), "length": (Reward(length), -0.5)})
    (outcome,) = both([rollout("yes")])
    assert outcome.value == 2.0 * 1 - 0.5 * 4
    assert outcome.parts == {"right": 1.0, "length": 4.0, "length/chars": 3.0, "length/words": 1.0}
    nested = combine({"both": (both, 10.0)})
    assert nested([rollout("yes")])[0].value == 0.0
    assert score([[rollout("yes")]], both)[0][0].outcome == outcome


def test_one_invalid_part_makes_the_sum_invalid_even_at_weight_zero():
    both = combine({"ok": (lambda completion: 1, 1.0), "json": (lambda completion: json.loads(completion), 0.0)})
    assert [o.value for o in both([rollout("1"), rollout("{")])] == [1.0, None]
    assert both([rollout("{")])[0].reason.startswith("json: JSONDecodeError: ")
    huge = combine({"a": (lambda completion: 1e308, 10.0)})
    assert huge([rollout()])[0].value is None


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None])
def test_a_weight_must_be_a_number(weight):
    with pytest.raises(HoneError, match="weight"):
        combine({"a": (lambda completion: 1, weight)})


def test_combining_nothing_is_refused():
    with pytest.raises(HoneError, match="no reward"):
        combine({})


def test_too_many_invalid_rewards_stop_the_run_with_the_commonest_reason():
    def group(reasons):
        outcomes = [Outcome(value=None, reason=r) if r else Outcome(value=0.0) for r in reasons]
        return [rollout(outcome=o) for o in outcomes]

    def check_valid(groups, **settings):
        GroupScorer(reward=Reward(lambda completion: 0.0), **settings).check(groups)

    check_valid([group(["x"] + [""] * 4)])  # 20 % is not more than 20 %
    check_valid([])
    with pytest.raises(HoneError, match=r"3 of 5 rewards are invalid, more than 20%; most often \(2 times\): why:"):
        check_valid([group(["why", "", "x"]), group(["why", ""])])
    check_valid([group(["why", "", "x"])], max_invalid=0.7)
    with pytest.raises(HoneError, match="1 of 9"):
        check_valid([group(["x"] + [""] * 8)], max_invalid=0.0)
    with pytest.raises(ValueError, match="not scored"):
        check_valid([[rollout()]])
