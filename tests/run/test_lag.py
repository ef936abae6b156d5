"""Rollouts made while the learner updates: which weights wrote them, the same bits every time, and nothing lost."""

import itertools
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience
from small import World, assert_same_run, metrics, recipe

import hone
from hone.algo import ALGORITHMS
from hone.errors import HoneError, Interrupted
from hone.launch import train
from hone.rollout.local import LocalSampler
from hone.storage.files import checkpoints
from hone.types import Group

torch.set_num_threads(1)
AHEAD = ["train.lag=1", "train.mismatch=truncate"]
STRICT = [n for n, make in ALGORITHMS.items() if make().online and (make().on_policy or make().trust_region)]
OFFLINE = [n for n, make in ALGORITHMS.items() if not make().online]


def written(groups: list[Group]) -> list[Any]:
    return [(r.tokens, r.gen_logp, r.task) for g in groups for r in g]


# --- which weights ---


def test_the_first_two_iterations_are_written_by_the_first_weights_and_each_other_by_those_before(world, tmp_path):
    plain = train.prepare(recipe(world, "grpo", tmp_path / "plain"))
    assert plain.roller is not None
    first, second = (written(plain.roller(plain.source.take(3))) for _ in range(2))
    job = train.prepare(recipe(world, "grpo", tmp_path / "run", *AHEAD))
    done = list(itertools.islice(train._iterations(job), 4))
    assert [written(it.groups) for it in done[:2]] == [first, second]
    assert [{r.version for g in it.groups for r in g} for it in done] == [{0}, {0}, {1}, {2}]
    assert [it.metrics["lag"] for it in done] == [0, 1, 1, 1]
    assert done[0].metrics["gen_kl"] == pytest.approx(0, abs=1e-9)
    assert min(it.metrics["gen_kl"] for it in done[1:]) > 1e-6, "the learner has moved on"


def test_the_sampler_has_weights_of_its_own_and_is_given_the_learners_when_they_are_published(world, tmp_path):
    job = train.prepare(recipe(world, "grpo", tmp_path / "run", *AHEAD))
    assert job.roller is not None
    sampler = job.roller.sampler
    assert isinstance(sampler, LocalSampler)
    decoder: Any = sampler.decoder
    start = decoder.state_dict()["lm_head.weight"].clone()
    ours = {p.data_ptr() for p in job.policy.decoder.parameters()}
    assert not ours & {p.data_ptr() for p in decoder.parameters()}
    next(train._iterations(job))
    theirs = job.policy.decoder.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in decoder.state_dict().items())
    assert not torch.equal(start, theirs["lm_head.weight"])


def test_without_a_lag_nothing_is_logged_of_it(world: World, tmp_path: Path):
    folder = tmp_path / "run"
    hone.run(recipe(world, "grpo", folder))
    assert not any("lag" in row for row in metrics(folder))
    assert not list(folder.rglob("ahead.safetensors"))


# --- the same run ---


def test_the_same_run_twice_is_the_same_to_the_bit(world: World, tmp_path: Path):
    """With rewards that take longer than updates, and the other way round."""

    def slow(completion: str) -> float:
        time.sleep(0.002)
        return sum(completion.encode()) % 7 / 7

    def fast(completion: str) -> float:
        return sum(completion.encode()) % 7 / 7

    for name, reward in (("slow", slow), ("fast", fast)):
        hone.run(replace(recipe(world, "grpo", tmp_path / name, *AHEAD, "train.minibatches=3"), reward=reward))
    assert_same_run(tmp_path / "slow", tmp_path / "fast", step=4)


def test_a_run_longer_than_planned_is_the_long_run(world: World, tmp_path: Path):
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    hone.run(recipe(world, "grpo", whole, *AHEAD, "train.steps=6"))
    hone.run(recipe(world, "grpo", grown, *AHEAD, "train.steps=3"))
    hone.run(recipe(world, "grpo", grown, *AHEAD, "train.steps=6"), resume=True)
    assert_same_run(whole, grown, step=6)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_is_resumed_with_the_lag_it_was_saved_with(lag: int, world: World, tmp_path: Path):
    settings = [f"train.lag={lag}", "train.mismatch=truncate"]
    hone.run(recipe(world, "grpo", tmp_path / "run", *settings, "train.steps=2"))
    other = recipe(world, "grpo", tmp_path / "run", f"train.lag={1 - lag}", "train.mismatch=truncate", "train.steps=3")
    with pytest.raises(HoneError, match=rf"train\.lag was {lag} and is {1 - lag}: resume it as it was"):
        hone.run(other, resume=True)


# --- at the same time ---


def test_rewards_are_given_while_the_learner_updates(world: World, tmp_path: Path):
    """Neither side can go on before the other has come."""
    met, seen = threading.Event(), list[bool]()

    def waits(completion: str) -> float:
        if threading.current_thread() is not threading.main_thread():
            seen.append(met.wait(patience(30)))
        return float(len(completion))

    job = train.prepare(replace(recipe(world, "grpo", tmp_path / "run", *AHEAD), reward=waits))
    job.learner.optimizer.register_step_post_hook(lambda *_: met.set())
    next(train._iterations(job))
    assert seen == [True] * 9


# --- what goes wrong ---


def broken_after(calls: int) -> Any:
    """A reward that works for so many calls."""
    count = itertools.count()

    def reward(completion: str) -> float:
        if next(count) >= calls:
            raise RuntimeError("no more")
        return float(len(completion))

    return reward


def test_what_fails_beside_the_update_ends_the_run_with_its_words(world: World, tmp_path: Path):
    before = set(threading.enumerate())
    made = replace(recipe(world, "grpo", tmp_path / "run", *AHEAD, "save.every=1"), reward=broken_after(18))
    with pytest.raises(HoneError, match=r"9 of 9 rewards are invalid, more than 20%.*RuntimeError: no more"):
        hone.run(made)
    assert list(checkpoints(tmp_path / "run/checkpoints")) == [1, 2], "what failed was the third step's"
    assert set(threading.enumerate()) <= before


def test_two_signals_end_the_run_and_what_was_being_made(world: World, tmp_path: Path, monkeypatch):
    count, before, answered = itertools.count(), set(threading.enumerate()), threading.Event()
    monkeypatch.setattr("hone.launch.signals._print_stopping", lambda number: answered.set())

    def rude(completion: str) -> float:
        if next(count) == 20:
            os.kill(os.getpid(), signal.SIGINT)
            assert answered.wait(patience(30)), "two at once would be one"
            os.kill(os.getpid(), signal.SIGINT)
        return float(len(completion))

    made = replace(recipe(world, "grpo", tmp_path / "run", *AHEAD, "train.steps=9", "save.every=1"), reward=rude)
    with pytest.raises(Interrupted):
        hone.run(made)
    assert set(threading.enumerate()) <= before
    saved = list(checkpoints(tmp_path / "run/checkpoints"))
    assert saved == [1], "the second step was not finished"
    hone.run(made, resume=True)
    assert list(checkpoints(tmp_path / "run/checkpoints"))[-1] == 9


@pytest.mark.parametrize("algo", STRICT)
def test_what_learns_from_its_own_samples_only_is_refused(algo: str, world: World, tmp_path: Path):
    with pytest.raises(HoneError, match=f"{algo} learns from the policy's own samples only: set train.lag=0"):
        hone.run(recipe(world, algo, tmp_path / "run", *AHEAD))


@pytest.mark.parametrize("algo", OFFLINE)
def test_what_samples_nothing_is_refused(algo: str, world: World, tmp_path: Path):
    with pytest.raises(HoneError, match=f"{algo} is offline and samples nothing: set train.lag=0"):
        hone.run(recipe(world, algo, tmp_path / "run", *AHEAD))


def test_credit_for_older_samples_has_to_be_corrected(world: World, tmp_path: Path):
    with pytest.raises(HoneError, match=r"older weights' samples: set train.mismatch=truncate"):
        hone.run(recipe(world, "grpo", tmp_path / "run", "train.lag=1"))


def test_more_than_one_step_is_not_offered(world: World, tmp_path: Path):
    with pytest.raises(HoneError, match="lag"):
        recipe(world, "grpo", tmp_path / "run", "train.lag=2")
