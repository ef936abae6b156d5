"""Rewards beside the sampler: the same outcomes as afterwards, in less time, and nothing left running."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import tiny
import torch
from patience import patience

from hone.algo import grpo
from hone.data.text.tokenizer import train_bpe
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.log.stats import StageTimer
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.reward.group_scorer import GroupScorer
from hone.reward.score import Reward, combine
from hone.rollout.local import LocalSampler
from hone.rollout.overlap import BackgroundTask, Cancelled, score_while_sampling
from hone.rollout.supply import Roller, sample_and_score
from hone.train.annotate import EarlyPasses
from hone.types import Group, Rollout, Task

torch.set_num_threads(1)
TASKS = [Task(prompt=prompt, answer=str(n)) for n, prompt in enumerate(("one", "three", "by two", "a", "bcd", "e f"))]
GO_ON = threading.Event()  # never set


def roller() -> Roller:
    torch.manual_seed(0)
    tokenizer = train_bpe([], vocab_size=258)
    decoder = Decoder(DecoderConfig(vocab_size=258, hidden_size=16, num_hidden_layers=1, initializer_range=0.2))
    stop_ids = frozenset(range(0, 256, 11)) | tokenizer.stop_ids  # so that completions end at different times
    return Roller(LocalSampler(decoder), tokenizer, SampleParams(max_tokens=24, stop_ids=stop_ids), group=2)


def marker(function: Any, **settings: Any) -> GroupScorer:
    return GroupScorer(reward=Reward(function), **settings)


def beside(score: GroupScorer, roll: Roller) -> list[Group]:
    algo = grpo()
    begin = EarlyPasses(algo, tiny.learner_for(algo), lag=0).start
    return sample_and_score(roll, score, TASKS, StageTimer(), stop=GO_ON, on_sampled=begin)


def row(number: int = 0) -> Rollout:
    return Rollout(tokens=[number], mask=[True])


@dataclass
class Paced:
    """Rollouts that end one after the other, the last task's first; `failure` ends them in the middle."""

    group: int
    seconds: float
    failure: Exception | None = None
    seen: list[str] = field(default_factory=list[str])

    def __call__(self, tasks: list[Task], mine: slice) -> list[Group]:
        raise NotImplementedError

    sample = __call__

    def stream(self, tasks: list[Task], mine: slice) -> Iterator[list[tuple[int, Rollout]]]:
        count = len(tasks[mine]) * self.group
        try:
            for i in reversed(range(count)):
                time.sleep(self.seconds)
                yield []
                yield [(i, row(i))]
                if self.failure is not None and i <= count // 2:
                    raise self.failure
        finally:
            self.seen.append("closed")

    def add_texts(self, groups: Sequence[Group], tasks: Sequence[Task]) -> list[Group]:
        return [[replace(r, task=t, text=str(r.tokens[0])) for r in g] for g, t in zip(groups, tasks, strict=True)]


def paced_scored(
    roll: Paced, score: GroupScorer, *, tasks: int, laps: StageTimer | None = None, **how: Any
) -> list[Group]:
    """All of so many tasks."""
    how = {"stop": GO_ON, "on_sampled": lambda groups, laps: None} | how
    given = [Task(prompt=str(n)) for n in range(tasks)]
    return score_while_sampling(roll, score, laps or StageTimer(), tasks=given, mine=slice(None), **how)


# --- rollouts as they end ---


def test_a_stream_has_the_rollouts_of_a_sample_before_the_last_of_them_has_ended() -> None:
    steps = list(roller().stream(TASKS))
    found = dict(numbered for step in steps for numbered in step)
    groups = [[found[2 * i], found[2 * i + 1]] for i in range(len(TASKS))]
    assert groups == roller().sample(TASKS)
    assert roller().add_texts(groups, TASKS) == roller()(TASKS)
    order = [i for step in steps for i, _ in step]
    assert sorted(order) == list(range(2 * len(TASKS)))
    assert order != sorted(order), "the case is met"
    first = next(n for n, step in enumerate(steps) if step)
    assert first < len(steps) / 2


def test_a_stream_leaves_gradients_to_its_caller() -> None:
    roll = roller()
    decoder: Any = roll.sampler.decoder  # pyright: ignore[reportAttributeAccessIssue]
    decoder.train()
    for _ in roll.stream(TASKS):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert decoder.training


def test_parts_of_the_tasks_are_numbered_from_their_first() -> None:
    whole, roll = roller()(TASKS), roller()
    found = dict(numbered for step in roll.stream(TASKS, slice(2, 5)) for numbered in step)
    same = [r for g in whole[2:5] for r in g]
    assert [found[i].tokens for i in range(6)] == [r.tokens for r in same]
    assert roll.state() == {"requests": 12}, "requests are counted over all ranks"


# --- outcomes ---


def odd(completion: str, task: Task) -> Any:
    """A number, parts, nothing, NaN or an error, by the completion."""
    kind = sum(completion.encode()) % 5
    if kind == 0:
        raise RuntimeError(f"{task.answer}\nno")
    return [None, None, math.nan, {"a": 1, "b": 0.1 * len(completion)}, len(completion) / 7][kind]


@pytest.mark.parametrize("pause", [0.0, 0.004], ids=["after", "beside"])
def test_outcomes_are_those_of_scoring_afterwards(pause: float) -> None:
    def reward(completion: str, task: Task) -> Any:
        time.sleep(pause)
        return odd(completion, task)

    found = beside(marker(reward, max_invalid=1.0), roller())
    assert found == marker(reward, max_invalid=1.0)(roller()(TASKS))
    kinds = {(r.outcome.valid, bool(r.outcome.parts)) for g in found for r in g if r.outcome}
    assert len(kinds) == 3, "the case is met"


def test_too_many_invalid_ones_are_refused_with_the_same_words() -> None:
    said = list[str]()
    score = marker(odd, max_invalid=0.1)
    for make in (lambda: beside(score, roller()), lambda: score(roller()(TASKS))):
        with pytest.raises(HoneError, match="rewards are invalid, more than 10%") as caught:
            make()
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["after", "beside"])
def test_a_reward_is_called_in_the_callers_thread_in_the_order_in_which_rollouts_end(pause: float) -> None:
    calls = list[tuple[str, bool]]()

    def reward(completion: str) -> float:
        calls.append((completion, threading.current_thread() is threading.main_thread()))
        time.sleep(pause)
        return 0.0

    groups = paced_scored(Paced(2, 0.005), marker(reward), tasks=3)
    assert [[r.text for r in g] for g in groups] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert [{r.task.prompt for r in g if r.task} for g in groups] == [{"0"}, {"1"}, {"2"}]
    assert calls == [(str(i), True) for i in (5, 4, 3, 2, 1, 0)]


def test_a_reward_that_sees_all_completions_gets_them_in_one_call() -> None:
    sizes = list[int]()

    def batched(completions: list[str]) -> list[float]:
        sizes.append(len(completions))
        return [float(len(c)) for c in completions]

    found = beside(marker(batched), roller())
    assert sizes == [12]
    assert found == marker(lambda completion: float(len(completion)))(roller()(TASKS))
    assert not combine({"odd": (odd, 1.0), "batched": (batched, 1.0)}).one_by_one
    assert combine({"odd": (odd, 1.0), "again": (odd, 1.0)}).one_by_one


@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["after", "beside"])
def test_what_begins_when_the_last_has_ended_is_given_all_in_order_before_the_last_is_scored(pause: float) -> None:
    calls, laps = list[Any](), StageTimer()

    def reward(completion: str) -> float:
        calls.append(completion)
        time.sleep(pause)
        return 0.0

    def begin(groups: list[Group], now: StageTimer) -> None:
        assert now is laps
        calls.append([[r.tokens[0] for r in g] for g in groups])
        time.sleep(0.2)
        now("annotate")

    start = time.perf_counter()
    paced_scored(Paced(2, 0.005), marker(reward), tasks=3, laps=laps, on_sampled=begin)
    spent = time.perf_counter() - start
    at = calls.index([[0, 1], [2, 3], [4, 5]])
    assert at <= 5, "the last is not scored yet"
    assert [c for c in calls if isinstance(c, str)] == ["5", "4", "3", "2", "1", "0"]
    stages = {name: laps.seconds[name] for name in ("sample", "annotate", "score")}
    assert stages["sample"] >= 0.03
    assert 0.2 <= stages["annotate"] < patience(0.3)
    assert sum(stages.values()) == pytest.approx(spent, abs=patience(0.05))


# --- time ---


def test_a_reward_that_waits_costs_little_beside_the_sampler() -> None:
    def slow(completion: str) -> float:
        time.sleep(0.1)  # long beside what else runs on the machine
        return 0.0

    laps, start = StageTimer(), time.perf_counter()
    paced_scored(Paced(2, 0.1), marker(slow), tasks=5, laps=laps)
    spent, metrics = time.perf_counter() - start, laps.metrics()
    both = metrics["seconds_sample"] + metrics["seconds_scoring"]
    assert metrics["seconds_scoring"] >= 1.0
    assert metrics["seconds_score"] < 0.5 * metrics["seconds_scoring"], "only what was left when sampling ended"
    assert spent < 0.8 * both


# --- what goes wrong ---


def test_what_stops_the_sampler_is_raised_to_the_caller() -> None:
    roll, begun = Paced(1, 0.0, HoneError("the model diverged: lower optim.lr")), list[Any]()
    with pytest.raises(HoneError, match="the model diverged"):
        paced_scored(roll, marker(lambda completion: 0.0), tasks=4, on_sampled=lambda *given: begun.append(given))
    assert not begun


def test_what_stops_a_reward_stops_the_sampler() -> None:
    def interrupted(completion: str) -> float:
        raise KeyboardInterrupt

    before, roll, start = set(threading.enumerate()), Paced(1, 0.01), time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        paced_scored(roll, marker(interrupted), tasks=1000)
    assert roll.seen == ["closed"]
    assert set(threading.enumerate()) <= before
    assert time.perf_counter() - start < patience(5)


def test_a_loop_that_has_ended_stops_the_sampler() -> None:
    stop, roll = threading.Event(), Paced(1, 0.01)

    def slow(completion: str) -> float:
        stop.set()
        time.sleep(0.05)
        return 0.0

    work = BackgroundTask(lambda: paced_scored(roll, marker(slow), tasks=1000, stop=stop))
    work.join()
    assert roll.seen == ["closed"]
    with pytest.raises(Cancelled):
        work.result()
