"""Samples: best, worst, random; the same seed picks the same."""

import math
from pathlib import Path

import pytest

from hone.log import sinks
from hone.log.samples import pick, record, write
from hone.types import Group, Outcome, Rollout, Stop, Task


def rollout(name: str, reward: float | None, *, scored: bool = True) -> Rollout:
    outcome = Outcome(value=reward, parts={"math": reward or 0.0}) if scored else None
    return Rollout(tokens=[1, 2, 3], mask=[False, True, True], outcome=outcome, text=name, task=Task(prompt="p"))


def groups() -> list[Group]:
    return [
        [rollout("a", 0.5), rollout("b", None), rollout("c", -1.0)],
        [rollout("d", 2.0), rollout("e", 0.0), rollout("f", 1.0)],
    ]


def names(picked: list[Rollout]) -> list[str]:
    return [r.text for r in picked]


def test_best_then_worst_then_random() -> None:
    assert names(pick(groups(), 2, seed=0)) == ["d", "c"]
    assert names(pick(groups(), 1, seed=0)) == ["d"]
    assert pick(groups(), 0, seed=0) == []
    assert sorted(names(pick(groups(), 99, seed=0))) == list("abcdef"), "all, none twice"


def test_the_seed_decides_and_nothing_else() -> None:
    runs = {tuple(names(pick(groups(), 4, seed=s))) for s in range(20)}
    assert len(runs) > 1
    assert all(pick(groups(), 4, seed=s) == pick(groups(), 4, seed=s) for s in range(20))


def test_invalid_and_unscored_rollouts_are_neither_best_nor_worst() -> None:
    odd = [[rollout("x", None), rollout("n", math.nan), rollout("u", 0.0, scored=False), rollout("y", -5.0)]]
    assert names(pick(odd, 1, seed=0)) == ["y"]
    assert len(pick([[rollout("x", None), rollout("z", None)]], 3, seed=0)) == 2
    assert pick([], 3, seed=0) == []


def test_a_record_says_what_a_reader_wants_to_know() -> None:
    task = Task(prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}])
    cut = Rollout(
        tokens=[1, 2, 3],
        mask=[False, True, True],
        stop=Stop.LENGTH,
        outcome=Outcome(value=1.0, parts={"math": 1.0, "bad": math.nan}),
        text="<answer>2</answer>",
        task=task,
    )
    assert record(7, cut) == {
        "step": 7,
        "prompt": "system: Be brief.\nuser: 1+1?",
        "completion": "<answer>2</answer>",
        "reward": 1.0,
        "parts": {"math": 1.0, "bad": None},
        "stop": "length",
        "length": 2,
    }


def test_an_invalid_reward_is_null_and_never_zero() -> None:
    assert record(1, rollout("x", None))["reward"] is None
    assert record(1, rollout("x", 0.0))["reward"] == 0.0
    assert record(1, Rollout(tokens=[1], mask=[True]))["prompt"] == ""


@pytest.mark.parametrize("torn", ["", '{"step": 1, "prom'])
def test_samples_are_appended_and_truncated_with_the_run(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "run" / "samples.jsonl"
    write(path, 1, pick(groups(), 2, seed=0))
    with path.open("a") as file:
        file.write(torn)
    write(path, 2, pick(groups(), 1, seed=0))
    assert [(row["step"], row["completion"]) for row in sinks.read(path)] == [(1, "d"), (1, "c"), (2, "d")]
    sinks.truncate_after(path, 1)
    assert [row["step"] for row in sinks.read(path)] == [1, 1]
