"""Held-out numbers by hand, and random numbers that training never draws."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import World, decoder

from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.launch.measure import evaluate_tasks, sample_groups, summarise
from hone.reward.score import Reward
from hone.rollout.local import LocalSampler
from hone.rollout.supply import Roller
from hone.types import Outcome, Rollout, Stop, Task

torch.set_num_threads(1)

TASKS = [Task(prompt=f"{a}+{a}=", answer=str(2 * a), id=str(a)) for a in range(4)]


def row(value: float | None, *, length: int = 3, stop: Stop = Stop.TOKEN, text: str = "no") -> Rollout:
    return Rollout(
        tokens=range(length + 1), mask=[False] + [True] * length, stop=stop, text=text, outcome=Outcome(value=value)
    )


def test_the_summary_by_hand():
    right = "<think>x</think><answer>1</answer>"
    groups = [
        [row(1.0, text=right), row(0.0, length=5)],
        [row(1.5, stop=Stop.STRING), row(1.0, stop=Stop.LENGTH)],
        [row(0.0), row(None, length=1)],
    ]
    found = summarise(groups)
    # problems: 0.5, 1.25, 0.0: mean 0.58333, sample std 0.62915, error std/sqrt(3)
    assert found["reward"] == pytest.approx(1.75 / 3)
    assert found["reward_error"] == pytest.approx(0.629153 / 3**0.5, rel=1e-5)
    assert "pass@1" not in found  # a reward of 1.5 is no yes or no
    assert found["format"] == pytest.approx(1 / 6)
    assert found["length"] == pytest.approx((3 + 5 + 3 + 3 + 3 + 1) / 6)
    assert found["truncated"] == pytest.approx(1 / 6)
    assert found["invalid"] == pytest.approx(1 / 6)
    assert found["problems"] == 3


def test_pass_at_k_counts_what_the_verifier_accepts():
    found = summarise([[row(1.0), row(0.0)], [row(1.0), row(1.0)], [row(0.0), row(None)]])
    assert found["pass@1"] == pytest.approx(0.5)  # of 1/2, 2/2, 0/1
    assert "pass@2" not in found  # the third problem has one valid sample
    # in a weighted sum the verifier's own part decides, not the sum: a well-formed wrong answer has not passed
    for verifier in ("math", "choice", "exact", "code"):
        tidy = Outcome(value=1.1, parts={verifier: 0.0, "format": 1.0})
        right = Outcome(value=0.5, parts={verifier: 1.0, "format": 0.0})
        assert summarise([[replace(row(1.0), outcome=tidy), replace(row(1.0), outcome=right)]])["pass@1"] == 0.5


def test_a_problem_without_a_valid_reward_is_left_out_of_the_mean_and_counted():
    found = summarise([[row(1.0)], [row(None)]])
    assert (found["reward"], found["pass@1"], found["invalid"]) == (1.0, 1.0, 0.5)
    with pytest.raises(HoneError, match="no completion got a valid reward"):
        summarise([[row(None)], [row(None)]])


def test_one_problem_has_no_error_bar():
    assert summarise([[row(1.0), row(0.0)]])["reward_error"] == 0.0


def test_evaluation_never_draws_what_training_draws(world: World):
    model, tokenizer = decoder(258), world.tokenizer
    params = SampleParams(max_tokens=8, stop_ids=tokenizer.stop_ids, seed=5)
    trained = Roller(LocalSampler(model), tokenizer, params, group=3)(TASKS)
    examined = sample_groups(model, tokenizer, TASKS, params=params, samples=3)
    again = sample_groups(model, tokenizer, TASKS, params=params, samples=3)
    assert [[r.tokens for r in g] for g in examined] == [[r.tokens for r in g] for g in again]
    pairs = zip((r for g in trained for r in g), (r for g in examined for r in g), strict=True)
    assert all(list(a.tokens) != list(b.tokens) for a, b in pairs)
    largest = replace(params, seed=2**64 - 1)
    assert len(sample_groups(model, tokenizer, TASKS, params=largest, samples=1)) == 4


def test_measuring_is_sampling_scoring_and_summing_up(world: World):
    def reward(completion: str, task: Task) -> float:
        return float(len(completion) > int(task.id))

    model, tokenizer = decoder(258), world.tokenizer
    params = SampleParams(max_tokens=4, stop_ids=tokenizer.stop_ids)
    found = evaluate_tasks(model, tokenizer, TASKS, Reward(reward), params=params, samples=2)
    groups = sample_groups(model, tokenizer, TASKS, params=params, samples=2)
    by_hand = [sum(reward(r.text, t) for r in g) / 2 for g, t in zip(groups, TASKS, strict=True)]
    assert found["reward"] == pytest.approx(sum(by_hand) / 4)


# --- the roller ---


def test_the_text_is_what_was_written_without_the_stop_token(world: World):
    tokenizer = world.tokenizer
    params = SampleParams(max_tokens=12, stop_ids=frozenset(range(0, 258, 9)) | tokenizer.stop_ids)
    groups = Roller(LocalSampler(decoder(258)), tokenizer, params, group=6)(TASKS)
    stops = {r.stop for g in groups for r in g}
    assert stops == {Stop.TOKEN, Stop.LENGTH}
    for task, group in zip(TASKS, groups, strict=True):
        prompt = tokenizer.encode(str(task.prompt))
        for r in group:
            assert r.task is task
            assert list(r.tokens[: len(prompt)]) == prompt
            assert list(r.mask) == [False] * len(prompt) + [True] * (len(r.tokens) - len(prompt))
            written = list(r.tokens[len(prompt) :])
            assert (written[-1] in params.stop_ids) == (r.stop is Stop.TOKEN)
            assert r.text == tokenizer.decode(written[:-1] if r.stop is Stop.TOKEN else written)


def test_a_roller_goes_on_where_its_state_was_taken(world: World):
    def roller() -> Roller:
        params = SampleParams(max_tokens=6, stop_ids=world.tokenizer.stop_ids, seed=1)
        return Roller(LocalSampler(decoder(258)), world.tokenizer, params, group=3)

    def tokens(roll: Roller) -> list[list[int]]:
        return [list(r.tokens) for g in roll(TASKS) for r in g]

    whole = roller()
    first, second = tokens(whole), tokens(whole)
    assert first != second
    half = roller()
    assert tokens(half) == first
    other = roller()
    other.load(half.state())
    assert half.state() == {"requests": 12}
    assert tokens(other) == second


def test_no_tasks_are_no_groups(world: World, tmp_path: Path):
    params = SampleParams(max_tokens=6, stop_ids=world.tokenizer.stop_ids)
    assert Roller(LocalSampler(decoder(258)), world.tokenizer, params, group=3)([]) == []
