"""Bad input, one test a kind: what a reward function may do wrong, and what completions and gold answers may be."""

import asyncio
import os
import re
import sys
import time

import pytest
import torch
from each import each
from patience import patience

from hone.errors import HoneError
from hone.reward.group_scorer import GroupScorer, count_invalid
from hone.reward.outcome import LOCATION
from hone.reward.score import Reward, score
from hone.reward.verify import VERIFIERS
from hone.reward.workers.reward_worker import in_workers
from hone.types import Outcome, Rollout, Task

torch.set_num_threads(1)
HERE = os.getpid()


def rollout(text: str = "yes", answer: str | None = "yes", **extra) -> Rollout:
    return Rollout(tokens=[1], mask=[True], text=text, task=Task(prompt="q", answer=answer, extra=extra))


def reason(function, *texts: str) -> str:
    """Why the last of these is invalid."""
    outcome = Reward(function)([rollout(text) for text in texts or ("yes",)])[-1]
    assert outcome.value is None
    return outcome.reason


# --- what a function returns ---


@each(
    ("value", "says"),
    [
        (1.0, "reward batch returned a float, expected a list of 3: return one value for each completion"),
        (None, "reward batch returned a NoneType, expected a list of 3: return one value for each completion"),
        ("111", "reward batch returned a str of 3, expected a list of 3: return one value for each completion"),
        ([1.0] * 2, "reward batch returned a list of 2, expected a list of 3: return one value for each completion"),
        ([], "reward batch returned a list of 0, expected a list of 3: return one value for each completion"),
        (
            torch.tensor(1.0),
            "reward batch returned a Tensor, expected a list of 3: return one value for each completion",
        ),
        ({"a": 1.0}, "reward batch returned a dict, expected a list of 3: return one value for each completion"),
    ],
)
def test_one_value_for_a_batch_or_the_wrong_number_of_them_stops_the_run(value, says: str):
    def batch(completions):
        return value

    for reward in (Reward(batch), *in_workers([batch], seconds=60.0, workers=1)):
        with pytest.raises(HoneError, match=re.escape(says)):
            score([[rollout()] * 3], reward)


@each(
    ("value", "says"),
    [
        (None, "the reward returned NoneType None, expected a finite number"),
        (float("nan"), "the reward returned float nan, expected a finite number"),
        (float("inf"), "the reward returned float inf, expected a finite number"),
        ("1.0", "the reward returned str '1.0', expected a finite number"),
        ([1.0], "the reward returned list [1.0], expected a finite number"),
        ({"a": float("nan")}, "the reward returned the parts {'a': nan}, expected finite numbers"),
        (Outcome(value=None, reason="no \udcff text"), "no \udcff text"),
    ],
)
def test_what_is_no_number_is_invalid_and_says_what_it_was(value, says: str):
    assert LOCATION.sub("", reason(lambda completion: value)) == says
    found = [o.reason for o in Reward(lambda completions: [value, 1.0])([rollout()] * 2)]
    assert [LOCATION.sub("", reason) for reason in found] == [says, ""]


def test_too_many_invalid_ones_stop_the_run_and_say_why():
    marker = GroupScorer(reward=Reward(lambda completion: None if completion else 1.0), max_invalid=0.5)
    with pytest.raises(
        HoneError, match=r"2 of 3 rewards are invalid, more than 50%.*NoneType None.*train\.max_invalid"
    ):
        marker([[rollout("a"), rollout("b"), rollout("")]])
    marker([[rollout("a"), rollout("")]])


def test_the_share_of_invalid_ones_is_of_the_whole_step_with_the_rounds_before():
    marker = GroupScorer(reward=Reward(lambda completion: None if completion else 1.0), max_invalid=0.5)
    first = marker([[rollout(""), rollout(""), rollout("a")]])
    assert len(marker.after(first)([[rollout("b")]])[0]) == 1  # 2 of 4
    with pytest.raises(HoneError, match="3 of 5 rewards are invalid"):
        marker.after(first)([[rollout("b"), rollout("c")]])
    limits = list[float]()

    def noted(completions):
        counter = count_invalid()
        assert counter is not None
        limits.append(counter.max_invalid)
        return [1.0] * len(completions)

    GroupScorer(reward=Reward(noted), max_invalid=0.5).after(first).fill([[rollout()] * 3])
    assert limits == [2.0]  # 3 of 6, of which the step has 1


# --- what a function does ---


def test_what_it_changes_are_copies():
    def greedy(completions, tasks, rollouts):
        completions.clear()
        tasks[0].extra["tests"].append(0)
        rollouts[0].task.extra.clear()
        tasks.pop()
        return [1.0, 1.0]

    rows = [rollout(tests=[1]), rollout(tests=[2])]
    before = repr(rows)
    assert [o.value for o in Reward(greedy)(rows)] == [1.0, 1.0]
    assert repr(rows) == before


def test_what_it_prints_is_no_part_of_the_answer(capfd: pytest.CaptureFixture[str]):
    def loud(completion):
        print('{"outcomes": []}')
        sys.stdout.flush()
        return 1.0

    (made,) = in_workers([loud], seconds=60.0, workers=1)
    assert made([rollout()])[0].value == 1.0
    assert capfd.readouterr() == ("", '{"outcomes": []}\n')


def forks(completion: str) -> float:
    if completion == "fork" and not os.fork():
        return 99.0
    return float(len(completion))


def test_a_child_that_it_forks_never_comes_back(capfd: pytest.CaptureFixture[str]):
    assert [o.value for o in Reward(forks)([rollout("fork"), rollout("a")])] == [4.0, 1.0]
    assert os.getpid() == HERE
    (made,) = in_workers([forks], seconds=60.0, workers=1)
    texts = ["fork", "a", "bb", "fork", "ccc"]
    assert [o.value for o in made([rollout(t) for t in texts])] == [4.0, 1.0, 2.0, 4.0, 3.0]
    end = time.monotonic() + patience(20)
    said = ""
    while said.count("\n") < 3 and time.monotonic() < end:
        said += capfd.readouterr().err
        time.sleep(0.01)
    assert said == "reward forks forked: end the child with os._exit before it returns\n" * 3


def test_sys_exit_is_a_crash_of_one_completion():
    def leaves(completion):
        return sys.exit("enough") if completion == "go" else 1.0

    assert LOCATION.sub("", reason(leaves, "go")) == "SystemExit: enough"
    for reward in (Reward(leaves), *in_workers([leaves], seconds=60.0, workers=1)):
        assert [o.value for o in reward([rollout("go"), rollout("stay")])] == [None, 1.0]


class Own(BaseException):
    """What is no Exception, as cancelling is."""


def raises(error: BaseException):
    def plain(completion):
        if completion == "go":
            raise error
        return 1.0

    async def waits(completion):
        await asyncio.sleep(0)
        return plain(completion)

    return plain, waits


@pytest.mark.parametrize("error", [Own("mine"), asyncio.CancelledError("mine"), SystemExit("mine")], ids=repr)
def test_what_is_no_exception_is_a_crash_of_one_completion_too(error: BaseException):
    for function in raises(error):
        for reward in (Reward(function), *in_workers([function], seconds=60.0, workers=1)):
            first, second = reward([rollout("go"), rollout("stay")])
            assert (first.value, LOCATION.sub("", first.reason)) == (None, f"{type(error).__name__}: mine")
            assert second.value == 1.0


def test_ctrl_c_is_ours():
    for function in raises(KeyboardInterrupt()):
        with pytest.raises(KeyboardInterrupt):
            Reward(function)([rollout("go")])


def test_a_function_that_stops_the_loop_or_cancels_all_in_it_is_not_waited_for():
    async def stops(completion):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return 1.0

    async def cancels(completion):
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(60)

    assert [o.value for o in Reward(stops)([rollout(), rollout()])] == [1.0, 1.0]
    assert LOCATION.sub("", reason(cancels, "a", "b")) == "CancelledError: cancelled by a function that ran beside it"
    assert Reward(stops)([rollout()])[0].value == 1.0


class NoList:
    def tolist(self):
        raise ValueError("it has none")


class NoLength(list):
    def __len__(self):
        raise ValueError("it has none")


@pytest.mark.parametrize("value", [NoList(), NoLength([1.0])], ids=["list", "length"])
def test_what_cannot_be_counted_is_invalid(value):
    def batch(completions):
        return value

    for reward in (Reward(batch), *in_workers([batch], seconds=60.0, workers=1)):
        assert [LOCATION.sub("", o.reason) for o in reward([rollout()] * 2)] == ["ValueError: it has none"] * 2


def test_what_it_raises_can_hold_anything():
    def raises(completion):
        raise ValueError("\udcff\x00" + "x" * 10_000)

    said = reason(raises)
    assert said.startswith("ValueError: ?\x00x")
    assert len(LOCATION.sub("", said)) == 300
    said.encode()


# --- completions and gold answers ---

ODD = {
    "empty": "",
    "blank": " \n\t\u2003\u200b",
    "enormous": "<answer>" + "12 " * 1_000_000,
    "surrogates": "\ud800 <answer>\udcff</answer>",
    "nulls": "\x00" * 1000 + "<answer>\x00</answer>",
    "not utf-8": b"\xff\xfe<answer>\x80</answer>".decode("utf-8", "replace"),
    "right to left": "\u202e<answer>B</answer>\u202c",
    "nested": "<answer>" * 5000 + "B" + "</answer>" * 5000,
    "boxes": r"\boxed{" * 5000,
    "formats": "{} {0} %s {{x}} ${x}",
    "code": "__import__('os')._exit(1)",
    "one character": "\u0301",
}


@each("kind", ODD)
@each("name", sorted(set(VERIFIERS) - {"code", "gym"}))  # they need more than a gold answer
def test_any_completion_gets_a_verdict_and_none_of_these_is_right(name: str, kind: str):
    start = time.perf_counter()
    (outcome,) = Reward(VERIFIERS[name])([rollout(ODD[kind], answer="C" if name == "choice" else "41")])
    assert outcome.value == 0.0
    assert time.perf_counter() - start < patience(5)


@each("name", ["choice", "exact", "f1", "math"])
@each("answer", [None, "", "  \n"])
def test_without_a_gold_answer_there_is_no_verdict(name: str, answer: str | None):
    outcome = Reward(VERIFIERS[name])([rollout("<answer>B</answer>", answer=answer)])[0]
    assert outcome.value is None
    assert "gold answer" in outcome.reason


@each("answer", ["K", "Paris", "AB", "A or B", "1", "\udcff", "A" * 100_000])
def test_a_gold_answer_that_is_malformed_says_so(answer: str):
    outcome = Reward(VERIFIERS["choice"])([rollout("<answer>B</answer>", answer=answer)])[0]
    assert outcome.value is None
    assert "is not a letter A to J" in outcome.reason
    assert len(outcome.reason) <= 300
