"""Parts put together: weights, bounds, schedules, what each added, a memory by content, async functions."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch
from each import each
from patience import patience

from hone.config.recipe import PartsSpec, Recipe, TrainSpec, check_parts
from hone.errors import HoneError
from hone.launch.rewards import scorer, start_reward_processes
from hone.reward.group_scorer import GroupScorer
from hone.reward.outcome import LOCATION
from hone.reward.score import Reward, RewardPart, cached, combine, read_schedule
from hone.reward.workers.reward_worker import in_workers
from hone.types import Outcome, Rollout, Task

torch.set_num_threads(1)


def rollout(text: str, *, version: int = 0, **extra) -> Rollout:
    task = Task(prompt="q", answer="yes", extra=extra)
    return Rollout(tokens=[1], mask=[True], text=text, task=task, version=version)


def length(completion: str) -> float:
    return float(len(completion))


def test_a_part_is_clipped_scheduled_and_weighed_in_this_order():
    # at step 5, half way from 1 to 0: 2 x 0.5 x min(7, 4) = 4, beside 1 x 7
    part = RewardPart(reward=length, weight=2.0, low=1.0, high=4.0, schedule=((0, 1.0), (10, 0.0)))
    both = combine({"short": part, "long": (length, 1.0)})
    (outcome,) = both([rollout("x" * 7, version=5)])
    assert outcome == Outcome(value=11.0, parts={"short": 7.0, "long": 7.0}, added={"short": 4.0, "long": 7.0})
    values = [both([rollout("", version=step)])[0].value for step in (0, 5, 10, 500)]
    assert values == [2.0, 1.0, 0.0, 0.0]
    assert [both.without_schedules()([rollout("", version=step)])[0].value for step in (0, 500)] == [2.0, 2.0]


@each("text", ["", "x", "0", "0:a", "5:1 5:2", "5:1 0:2", "-1:1", "0:nan", "0:inf", "0:1:2"])
def test_a_schedule_that_is_none_is_refused(text: str):
    with pytest.raises(HoneError, match=r"parts\.schedule\.format .* as in '0:1 200:0\.1'"):
        read_schedule(text, name="format")


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(HoneError, match=r"parts\.low below parts\.high"):
        combine({"a": RewardPart(reward=length, low=1.0, high=0.0)})


def test_settings_of_a_recipe_reach_the_parts():
    how = PartsSpec(high={"format": 0.5}, schedule={"exact": "0:0 10:1"}, cache={"exact": 5})
    made = scorer({"exact": 1.0, "format": 0.1}, parts=how)
    (outcome,) = made([rollout("<think></think><answer>yes</answer>", version=4)])
    assert outcome.value == pytest.approx(0.4 + 0.05)
    assert outcome.added == pytest.approx({"exact": 0.4, "format": 0.05})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("math", "a time of their own: leave it out"),
        ("code:fraction", "set seconds in a code:FILE.yaml"),
        ("judge:j.yaml", "a timeout of its own: set it there"),
        ("model:a", "the run's own process: leave it out"),
    ],
)
def test_parts_that_end_by_themselves_take_no_timeout(name: str, says: str):
    with pytest.raises(HoneError, match=says):
        check_parts(PartsSpec(timeout={name: 1.0}), {name: 1.0})


def test_a_timeout_without_processes_is_refused():
    how = PartsSpec(timeout={"regex:a": 1.0})
    recipe = Recipe(data="x", reward={"regex:a": 1.0}, parts=how, train=TrainSpec(reward_apart="never"))
    with pytest.raises(HoneError, match=r"leave out train\.reward_apart=never"):
        start_reward_processes(recipe)


def test_a_held_out_verifier_is_noted_and_adds_nothing():
    scorer = GroupScorer(reward=Reward(length), held_out=Reward(lambda completion: completion == "yes" or None))
    (group,) = scorer([[rollout("yes"), rollout("no")]])
    assert [r.outcome for r in group] == [Outcome(value=3.0, parts={"held_out": 1.0}), Outcome(value=2.0)]
    assert scorer.one_by_one
    batch = Reward(lambda completions: [0.0] * len(completions))
    assert not GroupScorer(reward=Reward(length), held_out=batch).one_by_one


# --- a memory by content ---


def counted() -> tuple[Reward, list[str]]:
    calls = list[str]()

    def slow(completion: str, task: Task):
        calls.append(completion)
        return None if completion == "odd" else float(len(completion))

    return cached(Reward(slow), size=2), calls


def test_equal_completions_of_equal_tasks_are_judged_once():
    reward, calls = counted()
    texts = ["a", "bb", "a", "a"]
    assert [o.value for o in reward([rollout(t) for t in texts])] == [1.0, 2.0, 1.0, 1.0]
    assert [o.value for o in reward([rollout("bb"), rollout("a")])] == [2.0, 1.0]
    assert calls == ["a", "bb"]
    reward([rollout("a", tests=[1]), replace(rollout("a"), task=Task(prompt="q", answer="no"))])
    assert calls == ["a", "bb", "a", "a"]
    reward([rollout("a")])  # of which only the last two are remembered
    assert len(calls) == 5


def test_what_is_invalid_or_cannot_be_told_apart_is_not_remembered():
    reward, calls = counted()
    for _ in range(2):
        assert reward([rollout("odd")])[0].value is None
        assert [o.value for o in reward([rollout("x", f=object()), rollout("yy", f=object())])] == [1.0, 2.0]
    assert calls == ["odd", "x", "yy"] * 2
    assert reward([]) == []


def test_a_reward_that_reads_more_cannot_be_remembered():
    for function in (lambda completions: [1.0], lambda rollout: 1.0):
        with pytest.raises(HoneError, match=r"leave out parts\.cache"):
            cached(Reward(function), size=5)


# --- async functions ---


async def slow(completion: str) -> float:
    if completion == "hang":
        await asyncio.sleep(60)
    if completion == "block":
        time.sleep(60)
    if completion == "raise":
        raise RuntimeError("no")
    if completion == "exit":
        raise SystemExit(3)
    await asyncio.sleep(0.2)
    return float(len(completion))


async def all_of(completions: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(c)) for c in completions][: None if "cut" not in completions else -1]


class Judge:
    async def __call__(self, completion: str) -> float:
        return 7.0


def test_async_functions_wait_together_and_keep_their_order():
    start = time.perf_counter()
    found = Reward(slow)([rollout("x" * (i % 5)) for i in range(30)])
    assert [o.value for o in found] == [float(i % 5) for i in range(30)]
    assert time.perf_counter() - start < patience(3)  # one after the other they take 6 s
    assert [o.value for o in Reward(all_of)([rollout("a"), rollout("bb")])] == [1.0, 2.0]
    assert Reward(Judge())([rollout("")])[0].value == 7.0


def test_async_functions_fail_as_plain_ones_do():
    seconds = patience(0.5)
    found = Reward(slow, seconds=seconds)([rollout(t) for t in ("raise", "a", "exit", "hang")])
    assert [o.value for o in found] == [None, 1.0, None, None]
    assert [LOCATION.sub("", o.reason) for o in found if o.reason] == [
        "RuntimeError: no",
        "SystemExit: 3",
        f"timed out: reward slow took more than {seconds:g} s (train.reward_timeout, parts.timeout)",
    ]
    with pytest.raises(HoneError, match="returned a list of 1, expected a list of 2"):
        Reward(all_of)([rollout("cut"), rollout("b")])


def test_async_functions_in_processes_are_ended_where_they_block():
    waits, batch = in_workers([slow, all_of], seconds=[patience(0.5), 60.0], workers=2)
    found = waits([rollout(t) for t in ("a", "hang", "bb", "c")])
    assert [o.value for o in found] == [1.0, None, 2.0, 1.0]
    blocked = waits([rollout(t) for t in ("a", "block", "bb", "c")])
    assert [o.valid for o in blocked] == [False, False, True, True]  # a worker's share waits with it
    assert "timed out" in blocked[1].reason
    assert [o.value for o in batch([rollout("a"), rollout("bb")])] == [1.0, 2.0]
