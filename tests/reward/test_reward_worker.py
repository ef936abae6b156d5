"""Rewards in processes of their own: whatever becomes of one, the others' outcomes are there, in order."""

import ctypes
import faulthandler
import gc
import math
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from each import each
from patience import eventually, patience, running

from hone.errors import HoneError
from hone.reward.outcome import LOCATION
from hone.reward.score import Reward, combine, score
from hone.reward.workers.reward_worker import WorkerPool, WorkerReward, in_workers
from hone.types import Outcome, Rollout, Task

torch.set_num_threads(1)
SECONDS = 0.4  # on a quiet machine, see patience


def rollout(text: str, **extra) -> Rollout:
    return Rollout(tokens=[1], mask=[True], text=text, task=Task(prompt="q", answer="yes", **extra))


def odd(completion: str, task: Task):
    """Does what the completion says."""
    if completion == "hang":
        time.sleep(100)
    if completion == "busy":
        while True:
            pass
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "segfault":
        faulthandler.disable()  # pytest has it on
        ctypes.string_at(0)
    if completion == "exit":
        os._exit(3)
    if completion == "sys.exit":
        sys.exit("enough")
    if completion == "interrupt":
        raise KeyboardInterrupt
    if completion == "raise":
        raise RuntimeError("no")
    if completion == "nan":
        return math.nan
    if completion == "parts":
        return {"a": 1, "b": 0.5}
    return len(completion) + float(task.answer == "yes")


@pytest.fixture(scope="module")
def reward() -> WorkerReward:
    (made,) = in_workers([odd], seconds=patience(SECONDS), workers=2)
    assert isinstance(made, WorkerReward)
    return made


def outcomes(reward: Reward, *texts: str) -> list[Outcome]:
    return reward([rollout(text) for text in texts])


def test_outcomes_are_those_of_the_function_in_order(reward: Reward):
    texts = ["x" * (i % 7) for i in range(40)] + ["nan", "raise", "parts", "sys.exit"]
    rollouts = [rollout(text) for text in texts]
    assert reward(rollouts) == Reward(odd)(rollouts)
    assert reward([]) == []
    assert reward.name == "odd"
    assert reward.one_by_one


@each(
    ("text", "says"),
    [
        ("hang", "timed out: reward odd took more than {seconds:g} s (train.reward_timeout, parts.timeout)"),
        ("busy", "timed out: reward odd took more than {seconds:g} s (train.reward_timeout, parts.timeout)"),
        ("kill", "crashed: reward odd took its process down (SIGKILL)"),
        ("segfault", "crashed: reward odd took its process down (SIGSEGV)"),
        ("exit", "crashed: reward odd took its process down (exit code 3)"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_what_hangs_or_dies_is_invalid_with_its_reason_and_the_rest_is_not(text: str, says: str, reward: WorkerReward):
    start = time.monotonic()
    before, bad, after = outcomes(reward, "one", text, "three")
    assert (before.value, after.value) == (4.0, 6.0)
    assert (bad.value, LOCATION.sub("", bad.reason)) == (None, says.format(seconds=reward.seconds))
    assert LOCATION.search(bad.reason), "the reward's file and line are named"
    assert outcomes(reward, "four")[0].value == 5.0  # by another worker
    assert time.monotonic() - start < patience(4)


def test_many_hang_at_once_and_the_run_of_calls_still_ends(reward: Reward):
    found = outcomes(reward, *["hang", "ok"] * 4)
    assert [o.value for o in found] == [None, 3.0] * 4


def test_what_is_given_up_is_no_later_calls_answer():
    read, write = os.pipe()

    def slow(seconds: float) -> float:
        if seconds == 0.3:
            os.read(read, 1)  # until the call was given up
        time.sleep(seconds)
        return seconds

    pool, asked = WorkerPool([slow], workers=2), list[int]()

    def enough(number: int, answer: object) -> None:
        asked.append(number)
        raise ValueError("enough")

    calls = [pickle.dumps((0, seconds)) for seconds in (0.3, 0.0, 0.0)]
    with pytest.raises(ValueError, match="enough"):
        pool.map(calls, seconds=60.0, on_answer=enough)
    assert asked == [1], "the others were not waited for"
    os.write(write, b".")
    for _ in range(3):
        found = pool.map([pickle.dumps((0, x)) for x in (0.1, 0.2, 0.4)], seconds=60.0)
        assert [content for _, content in found] == [b"0.1", b"0.2", b"0.4"]
    pool.close()
    os.close(read)
    os.close(write)


def test_a_batched_function_has_the_time_of_all_its_completions_and_crashes_as_one():
    seconds = patience(SECONDS / 2)

    def batch(completions):
        if "die" in completions:
            os._exit(1)
        time.sleep(600 if "hang" in completions else 1.5 * seconds)
        return [1.0] * (len(completions) - ("short" in completions))

    (made,) = in_workers([batch], seconds=seconds, workers=1)
    assert [o.value for o in made([rollout("a")] * 3)] == [1.0] * 3
    assert [o.valid for o in made([rollout("hang"), rollout("a")])] == [False, False]
    assert [o.valid for o in made([rollout("die"), rollout("a")])] == [False, False]
    with pytest.raises(HoneError, match="returned a list of 2, expected a list of 3"):
        made([rollout("short"), rollout("a"), rollout("a")])
    assert not made.one_by_one


def test_several_rewards_share_a_pool_and_are_weighed_as_ever():
    one, two = in_workers([lambda completion: 1.0, lambda completion: float(len(completion))], seconds=60.0, workers=1)
    assert isinstance(one, WorkerReward)
    assert isinstance(two, WorkerReward)
    assert one.pool is two.pool
    groups = score([[rollout("abc")]], combine({"one": (one, 0.5), "two": (two, 2.0)}))
    added = {"one": 0.5, "two": 6.0}
    assert groups[0][0].outcome == Outcome(value=6.5, parts={"one": 1.0, "two": 3.0}, added=added)


def test_what_a_worker_says_runs_nothing_here():
    """A worker that a completion has taken over may answer anything."""
    (made,) = in_workers([odd], seconds=1.0, workers=1)
    assert isinstance(made, WorkerReward)
    rows = ("", '{"value": "x"}', '{"value": NaN}', '{"value": 1, "parts": 3}', "3", "{}")
    for said in (b"", b"[]", b"7", b"{}", b"\xff", *(f'{{"outcomes": [{row}]}}'.encode() for row in rows)):
        found = made._read({"completion": ["x"], "task": [None]}, (0.0, said))
        assert [o.value for o in found] == [None]
        assert found[0].reason


def test_a_task_that_cannot_be_sent_is_said_with_the_remedy(reward: Reward):
    with pytest.raises(HoneError, match=r"cannot be sent there .* set train\.reward_apart=never"):
        reward([rollout("x", extra={"f": lambda: 0})])
    assert outcomes(reward, "four")[0].value == 5.0


def test_the_task_is_a_copy(reward: Reward):
    def greedy(task):
        task.extra["seen"] = True
        return 1.0

    (made,) = in_workers([greedy], seconds=60.0, workers=1)
    one = rollout("x", extra={"a": 1})
    assert made([one])[0].value == 1.0
    assert one.task is not None
    assert one.task.extra == {"a": 1}


def test_no_time_at_all_is_refused():
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(HoneError, match="give a number above 0"):
            in_workers([odd], seconds=seconds)


# --- processes ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_supervisor_that_is_ended_takes_its_worker_with_it(number: int, tmp_path: Path):
    def slow(completion):
        (tmp_path / completion).write_text(str(os.getpid()))
        time.sleep(60)

    (made,) = in_workers([slow], seconds=60.0, workers=1)
    assert isinstance(made, WorkerReward)
    ((_, supervisor),) = made.pool._supervisors
    thread = threading.Thread(target=made, args=([rollout("pid")],), daemon=True)
    thread.start()
    assert eventually((tmp_path / "pid").exists)
    assert eventually(lambda: (tmp_path / "pid").read_text() != "")
    worker = int((tmp_path / "pid").read_text())
    assert running(worker)
    os.kill(supervisor, number)
    thread.join(patience(5))
    assert not thread.is_alive()
    assert eventually(lambda: not running(worker))


def test_a_pool_that_is_dropped_ends_its_processes():
    pool = WorkerPool([len], workers=2)
    supervisors = [number for _, number in pool._supervisors]
    assert all(running(k) for k in supervisors)
    other = os.fork()
    if not other:  # a child that has a copy of the pool
        del pool
        gc.collect()
        os._exit(0)
    os.waitpid(other, 0)
    assert all(running(k) for k in supervisors)
    del pool
    gc.collect()
    assert not any(running(k) for k in supervisors)


def test_a_killed_program_takes_supervisors_and_workers_with_it():
    read, write = os.pipe()
    program = os.fork()
    if not program:
        os.close(read)
        (made,) = in_workers([lambda completion: os.write(write, b"%d\n" % os.getpid()) and time.sleep(60)],
                        seconds=60.0, workers=1)  # fmt: skip
        made([rollout("x")])
        os._exit(0)
    os.close(write)
    worker = int(os.read(read, 100))
    os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)
    assert eventually(lambda: not running(worker))
    os.close(read)


def test_a_worker_that_dies_between_two_calls_costs_no_outcome():
    (made,) = in_workers([lambda completion: os.getpid()], seconds=60.0, workers=1)
    (worker,) = outcomes_of(made, "one")
    assert worker is not None
    os.kill(int(worker), signal.SIGKILL)
    assert eventually(lambda: not running(int(worker)))
    assert outcomes_of(made, "two")[0] not in (None, worker)


def outcomes_of(reward: Reward, *texts: str) -> list[float | None]:
    return [o.value for o in reward([replace(rollout(t), task=None) for t in texts])]


def test_supervisors_ended_from_outside_are_done_without_and_with_none_left_it_is_said():
    (made,) = in_workers([lambda completion: float(len(completion))], seconds=60.0, workers=2)
    assert isinstance(made, WorkerReward)
    first, second = (number for _, number in made.pool._supervisors)
    os.kill(first, signal.SIGKILL)
    found = [o for _ in range(3) for o in outcomes_of(made, "a", "bb")]
    assert found.count(None) == 1
    os.kill(second, signal.SIGKILL)
    assert None in outcomes_of(made, "a")
    with pytest.raises(HoneError, match="ended from outside: resume the run"):
        outcomes_of(made, "a")


def test_a_process_that_does_not_come_to_life_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("hone.reward.workers.reward_worker.STARTS", patience(1.0))
    marks = [tmp_path / "hung"]

    def hangs() -> None:  # as a child does that waits for a lock which a thread of its parent held
        for mark in marks:
            mark.touch()
            time.sleep(600)

    os.register_at_fork(after_in_child=hangs, after_in_parent=marks.clear)  # the first child alone
    pool = WorkerPool([len], workers=1)
    assert pool.map([pickle.dumps((0, "four"))], seconds=60.0) == [(0.0, b"4")]
    assert (tmp_path / "hung").exists()
    pool.close()
