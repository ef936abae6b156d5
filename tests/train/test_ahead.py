"""Rollouts in a checkpoint: what comes back is what went in, whatever it holds, and for any number of ranks."""

import math
from array import array
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from hone.algo import ALGORITHMS
from hone.data.feed.source import Source
from hone.dist import collect
from hone.errors import HoneError
from hone.log.stats import StageTimer
from hone.rollout.rollout_file import pack_rollouts, unpack_rollouts
from hone.rollout.supply import RolloutQueue, check_lag
from hone.storage.names import AHEAD
from hone.types import Group, Outcome, Rollout, Stop, Task


def row(task: Task, *, written: int = 3, **rest: Any) -> Rollout:
    logp = array("d", [0.0, *(-math.pi * (i + 1) / 7 for i in range(written))])
    return Rollout(
        tokens=array("q", range(written + 1)),
        mask=(False,) + (True,) * written,
        gen_logp=logp,
        raw_logp=array("d", (2 * x for x in logp)),
        task=task,
        **rest,
    )


TASKS = [Task(prompt=f"{i}", answer=str(i), extra={"anything": {i}}) for i in range(5)]
ODD: list[Group] = [
    [
        row(
            TASKS[0],
            text='a "lone" \ud800 and 🙂\n\0',
            stop=Stop.STRING,
            limit=9,
            version=4,
            outcome=Outcome(value=0.1),
        ),
        row(TASKS[0], written=1, outcome=Outcome(value=None, reason="ValueError: é")),
    ],
    [row(TASKS[1], outcome=Outcome(value=-0.0, parts={"a": 1, "b/c": 1e-300}), stop=Stop.LENGTH), row(TASKS[1])],
]


def test_what_is_packed_comes_back() -> None:
    tensors, about = pack_rollouts(ODD)
    back = unpack_rollouts(tensors, about, TASKS[:2])
    assert back == ODD
    for r, same in zip(*([r for g in groups for r in g] for groups in (back, ODD)), strict=True):
        assert type(r.tokens) is type(same.tokens)
        assert type(r.mask) is type(same.mask)
    assert math.copysign(1, back[1][0].outcome.value) == -1  # pyright: ignore


def test_parts_of_any_kind_of_number_can_be_saved() -> None:
    parts: Any = {"a": np.float32(0.5), "b": Fraction(1, 4), "c": 2, "d": np.float64(0.1)}
    tensors, about = pack_rollouts([[row(TASKS[0], outcome=Outcome(value=1.0, parts=parts))]])
    outcome = unpack_rollouts(tensors, about, TASKS[:1])[0][0].outcome
    assert outcome is not None
    assert outcome.parts == {"a": 0.5, "b": 0.25, "c": 2, "d": 0.1}


def supply() -> RolloutQueue:
    return RolloutQueue(Source(TASKS, seed=1), lag=1)


def fill(ahead: RolloutQueue, rounds: list[int]) -> Any:
    """Groups of the feed's next tasks, as many as each round asks for."""
    return lambda laps: [[[row(task, version=1)] for task in ahead.feed.take(n)] for n in rounds]


def test_a_resumed_supply_goes_on_with_the_same_rollouts_of_the_same_tasks(tmp_path: Path) -> None:
    one, two = supply(), supply()
    for _ in range(3):
        one.next(fill(one, [2, 1]), StageTimer())
        one.wait(StageTimer())
    (tmp_path / AHEAD).write_bytes(one.saved())
    two.load(tmp_path)
    assert two.saved() == one.saved()
    for _ in range(2):
        found = [ahead.next(fill(ahead, [2, 1]), StageTimer()) for ahead in (one, two)]
        assert found[0] == found[1]
        assert [len(part) for part in found[0]] == [2, 1]
        one.wait(StageTimer())
        two.wait(StageTimer())
    assert one.feed.state() == two.feed.state()


def test_ranks_share_out_what_one_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supply()
    one.next(fill(one, [5]), StageTimer())
    one.wait(StageTimer())
    (tmp_path / AHEAD).write_bytes(one.saved())
    parts = list[Group]()
    for rank in range(2):
        monkeypatch.setattr(collect, "world", lambda rank=rank: (rank, 2))
        two = supply()
        two.load(tmp_path)
        parts += two.next(fill(two, [5]), StageTimer())[0]
        two.wait(StageTimer())
    monkeypatch.undo()
    assert parts == one.next(fill(one, [5]), StageTimer())[0]
    one.wait(StageTimer())


def test_what_refills_is_refused_where_ranks_would_have_to_agree_in_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_lag(ALGORITHMS["dapo"](), name="dapo", corrected=True)
    monkeypatch.setattr(collect, "world", lambda: (0, 2))
    check_lag(ALGORITHMS["grpo"](), name="grpo", corrected=True)
    with pytest.raises(HoneError, match=r"dapo asks for prompts until all ranks have enough: set train.lag=0"):
        check_lag(ALGORITHMS["dapo"](), name="dapo", corrected=True)


def test_rollouts_of_other_data_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    one = supply()
    one.next(fill(one, [2]), StageTimer())
    one.wait(StageTimer())
    (tmp_path / AHEAD).write_bytes(one.saved())
    with pytest.raises(HoneError, match="the data's rows was 5 when saved"):
        RolloutQueue(Source(TASKS[:3], seed=1), lag=1).load(tmp_path)
    (tmp_path / AHEAD).write_bytes(one.saved()[:200])
    with pytest.raises(HoneError, match="use an earlier checkpoint"):
        supply().load(tmp_path)


def broken(ahead: RolloutQueue) -> Any:
    def failing(laps: StageTimer) -> Any:
        ahead.feed.take(2)
        raise HoneError("the reward is broken: mend it")

    return failing


class Count:
    """Counts up with every request, as a roller does."""

    def __init__(self) -> None:
        self.requests = 0

    def state(self) -> int:
        return self.requests

    def load(self, state: int) -> None:
        self.requests = state


def test_what_fails_is_owed_and_said_when_it_is_needed(tmp_path: Path) -> None:
    """The iteration beside which it failed is whole; a supply that is resumed there makes what the other would have."""
    count = Count()
    ahead, whole = RolloutQueue(Source(TASKS, seed=1), lag=1, counter=count), supply()

    def counted(laps: StageTimer) -> Any:
        count.requests += 1
        return broken(ahead)(laps)

    for one in (ahead, whole):
        one.next(fill(one, [1]), StageTimer())
        one.wait(StageTimer())
    assert not ahead.must_sample_first
    ahead.next(counted, StageTimer())
    ahead.wait(StageTimer())
    assert ahead.must_sample_first
    assert count.requests == 0
    with pytest.raises(HoneError, match="the reward is broken"):
        ahead.next(fill(ahead, [1]), StageTimer())
    (tmp_path / AHEAD).write_bytes(ahead.saved())
    resumed, published = supply(), list[int]()
    resumed.load(tmp_path)
    assert resumed.must_sample_first
    whole.next(fill(whole, [1]), StageTimer())
    whole.wait(StageTimer())
    assert resumed.next(fill(resumed, [1]), StageTimer(), lambda: published.append(1)) == whole.next(
        fill(whole, [1]), StageTimer(), lambda: published.append(2)
    )
    assert published == [1], "those that were owed are written by the weights before"
    for one in (ahead, resumed, whole):
        one.close()
        assert one.stop.is_set()


def test_what_was_not_learned_from_is_given_again(tmp_path: Path) -> None:
    one, two = supply(), supply()
    one.next(fill(one, [2]), StageTimer())
    one.wait(StageTimer())
    before = one.saved()
    given = one.next(fill(one, [2]), StageTimer())
    one.undo()
    assert one.saved() == before
    (tmp_path / AHEAD).write_bytes(one.saved())
    two.load(tmp_path)
    assert two.next(fill(two, [2]), StageTimer()) == given
    two.close()


def test_without_a_lag_everything_is_made_when_it_is_asked_for() -> None:
    ahead = RolloutQueue(Source(tiny.TASKS, seed=0))
    made = list[int]()

    def counted(laps: StageTimer) -> Any:
        made.append(1)
        return [[]]

    for n in range(3):
        ahead.next(counted, StageTimer())
        ahead.wait(StageTimer())
        assert len(made) == n + 1
