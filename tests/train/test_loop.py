"""The two loops: what is asked of the sampler, what is counted, and what happens when nothing is left to train on."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from each import each

from hone.algo import (
    ALGORITHMS,
    Algorithm,
    dapo,
    grpo,
    kto,
    online_dpo,
    ppo,
    ppo_penalty,
    reinforce_baseline,
    rloo,
    sft,
)
from hone.algo.weight import mismatch
from hone.data.feed.source import Source
from hone.errors import HoneError
from hone.log.rollouts import rollout_statistics, varied
from hone.loop import hash_seed, offline, online
from hone.reward.group_scorer import GroupScorer
from hone.reward.score import Reward
from hone.train.learner import Learner
from hone.types import Group, Outcome, Rollout, Stop, Task

torch.set_num_threads(1)


class Asked:
    """The real sampler, noting how many tasks it is given at a time."""

    def __init__(self, learner: Learner, *, group: int = 4) -> None:
        self.roll, self.sizes = tiny.Roller(learner.policy.decoder, group=group), list[int]()  # pyright: ignore

    def __call__(self, tasks: list[Task], mine: slice) -> list[Group]:
        self.sizes.append(len(tasks))
        return self.roll(tasks, mine)


def started(
    algo: Algorithm, score: Callable[[list[Group]], list[Group]], **settings: Any
) -> tuple[Learner, Asked, Any]:
    learner = tiny.learner_for(algo, lr=0.01)
    roll = Asked(learner)
    run = online(Source(tiny.TASKS, seed=0), roll, score, learner, algo, **{"prompts": 5, **settings})
    return learner, roll, run


def by_turns(*rewards: Sequence[float | None]) -> Callable[[list[Group]], list[Group]]:
    """The n-th group ever scored has the n-th list of rewards, over and over."""
    turn = itertools.cycle(rewards)

    def score(groups: list[Group]) -> list[Group]:
        return [[replace(r, outcome=Outcome(value=v)) for r, v in zip(g, next(turn), strict=True)] for g in groups]

    return score


EVEN, VARIED, INVALID = [1.0] * 4, [0.0, 1.0, 0.0, 1.0], [None] * 4


def test_refill_asks_for_what_is_still_missing() -> None:
    # of five, groups 1, 3, 5 vary; two are missing, of which one varies; then one, which does not; then one that does
    score = by_turns(VARIED, EVEN, VARIED, EVEN, VARIED, EVEN, VARIED, EVEN, VARIED)
    _, roll, run = started(dapo(overlong="off"), score)
    it = next(run)
    assert roll.sizes == [5, 2, 1, 1]
    assert len(it.groups) == 9
    assert it.metrics["kept"] == pytest.approx(5 / 9)


def test_an_invalid_reward_of_a_small_refill_does_not_end_the_run() -> None:
    values = iter([*VARIED * 4, *EVEN, None, *VARIED[1:]])
    score = GroupScorer(reward=Reward(lambda completions: [next(values) for _ in completions]), max_invalid=0.2)
    _, roll, run = started(dapo(overlong="off"), score)
    assert next(run).metrics["invalid"] == pytest.approx(1 / 24)
    assert roll.sizes == [5, 1]


def test_refill_gives_up_after_its_rounds_and_trains_on_what_there_is() -> None:
    learner, roll, run = started(dapo(overlong="off"), by_turns(VARIED, *[EVEN] * 40), refill_rounds=3)
    it = next(run)
    assert roll.sizes == [5, 4, 4]
    assert it.metrics["kept"] == pytest.approx(1 / 13)
    assert learner.updates == 1


def test_an_algorithm_without_refill_asks_once() -> None:
    _, roll, run = started(online_dpo(), by_turns(EVEN, VARIED, EVEN, EVEN, EVEN))
    assert next(run).metrics["kept"] == pytest.approx(0.2)
    assert roll.sizes == [5]


@pytest.mark.parametrize("make", [dapo, online_dpo])
def test_nothing_kept_is_no_update_but_an_iteration(make: Callable[[], Algorithm]) -> None:
    published = list[int]()
    learner, _, run = started(make(), by_turns(EVEN), publish=published.append, refill_rounds=2)
    before = tiny.parameters_of(learner)
    it = next(run)
    assert "loss" not in it.metrics
    assert (it.number, learner.version, learner.updates, published) == (1, 1, 0, [1])
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


@each("name", [n for n in sorted(ALGORITHMS) if ALGORITHMS[n]().online])
def test_an_iteration_of_invalid_rewards_is_counted_and_does_no_harm(name: str) -> None:
    learner, _, run = started(ALGORITHMS[name](), by_turns(INVALID), refill_rounds=1)
    before = tiny.parameters_of(learner)
    metrics = next(run).metrics
    assert metrics["invalid"] == 1.0
    assert "reward" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


def test_the_running_baseline_is_of_earlier_iterations() -> None:
    algo = reinforce_baseline(decay=0.5)
    learner, _, run = started(algo, by_turns([2.0] * 4))
    assert learner.control == {}
    # 0 -> .5 * 0 + .5 * 2 = 1 -> 1.5; metrics show the number the next iteration starts with
    assert next(run).metrics["baseline"] == pytest.approx(1.0)
    assert next(run).metrics["baseline"] == pytest.approx(1.5)
    _, _, run = started(algo, by_turns(INVALID))
    assert next(run).metrics["baseline"] == 0.0


def test_the_penaltys_coefficient_follows_the_kl_after_the_update() -> None:
    learner, _, run = started(ppo_penalty(kl_target=1e9), by_turns(VARIED))
    metrics = next(run).metrics
    assert metrics["update_kl"] > 0
    assert learner.control["kl_coef"] == 0.05
    learner, _, run = started(ppo_penalty(kl_target=1e-9), by_turns(VARIED))
    next(run)
    assert learner.control["kl_coef"] == 0.2


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 3), (3, 1)])
def test_epochs_times_minibatches_is_the_number_of_updates(epochs: int, minibatches: int) -> None:
    learner, _, run = started(ppo(), by_turns(VARIED), epochs=epochs, minibatches=minibatches)
    next(run)
    assert learner.updates == epochs * minibatches


def test_a_step_that_keeps_fewer_pairs_than_minibatches_takes_no_empty_update() -> None:
    """An empty one would dilute the loss, and would move the weights by Adam's momentum on several ranks alone."""
    learner, _, run = started(online_dpo(), by_turns(EVEN, VARIED, EVEN, EVEN, EVEN), minibatches=4)
    assert next(run).metrics["loss"] == pytest.approx(math.log(2)), "before anything is learned"
    assert learner.updates == 1


@pytest.mark.parametrize("name", [n for n in sorted(ALGORITHMS) if ALGORITHMS[n]().on_policy])
def test_what_is_strictly_on_policy_refuses_a_second_update(name: str) -> None:
    for settings in ({"epochs": 2}, {"minibatches": 2}):
        _, _, run = started(ALGORITHMS[name](), by_turns(VARIED), **settings)
        with pytest.raises(HoneError, match="strictly on policy"):
            next(run)


def test_the_old_policy_is_that_of_the_whole_iteration() -> None:
    # in the second epoch the policy has moved away from it, so the ratio is no longer 1
    for epochs, moved in ((1, False), (2, True)):
        _, _, run = started(ppo(), by_turns(VARIED), epochs=epochs)
        assert (next(run).metrics["old_kl"] > 1e-9) == moved


@pytest.mark.parametrize("algo", [rloo(), grpo(beta=0.0)], ids=["without old_logp", "with it"])
def test_the_samplers_mismatch_can_be_corrected_in_any_algorithm(algo: Algorithm) -> None:
    def off(groups: list[Group]) -> list[Group]:
        """A sampler that claims log-probs far too high for every token."""
        scored = by_turns(VARIED)(groups)
        return [[replace(r, gen_logp=[1.0 if m else 0.0 for m in r.mask]) for r in g] for g in scored]

    learner, _, run = started(algo, off, correct=partial(mismatch, how="mask", cap=2.0))
    before = tiny.parameters_of(learner)
    metrics = next(run).metrics
    assert metrics["gen_gap"] > 1.0
    assert metrics["grad_norm"] == 0.0, "every token is outside the band"
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


def test_the_sampler_agrees_with_the_learner() -> None:
    _, _, run = started(ppo(), by_turns(VARIED))
    assert next(run).metrics["gen_gap"] < 1e-4


def test_the_exact_penalty_runs_through_the_loop() -> None:
    learner, _, run = started(ppo_penalty(exact=True), by_turns(VARIED), epochs=2)
    before = tiny.parameters_of(learner)
    next(run)
    next(run)
    assert not all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


# --- what is counted ---


def finished(tokens: list[int], value: float | None, *, stop: Stop = Stop.TOKEN) -> Rollout:
    outcome = Outcome(value=value, parts={"format": 0.5} if value is not None else {})
    return Rollout(tokens=[1, *tokens], mask=[False] + [True] * len(tokens), stop=stop, outcome=outcome)


def test_describe_averages_what_is_valid_and_counts_what_is_not() -> None:
    groups = [
        [finished([2, 2, 2, 2, 2], 1.0), finished([3], None)],
        [finished([4, 5], 0.0, stop=Stop.LENGTH), finished([6, 7, 8], 0.5, stop=Stop.STRING)],
    ]
    means = rollout_statistics([groups], [groups[:1]]).means()
    # repetition: of the 4-grams there are two, both (2, 2, 2, 2)
    assert means == {
        "reward": pytest.approx(0.5), "invalid": 0.25, "length": 11 / 4, "truncated": 0.25, "kept": 0.5, "tokens": 11.0,
        "repetition": 0.5, "varied": 0.5, "reward/format": 0.5,
    }  # fmt: skip


def test_rewards_vary_where_a_group_has_two_valid_values() -> None:
    def rows(*values: float | None) -> list[Rollout]:
        return [finished([2], value) for value in values]

    assert varied([rows(0, 0), rows(1, 1), rows(0, 1), rows(None, 1), rows(None, 0, 1)]) == (2, 5)
    assert varied([rows(0, 0), rows(1)]) == (0, 1), "a single rollout has nothing to be compared with"
    assert varied([rows(0), rows(1), rows(0)]) == (1, 1), "singles are compared with each other"
    assert varied([rows(0), rows(0)]) == (0, 1)
    assert varied([rows(0)]) == varied([]) == (0, 0)


def test_a_seed_depends_on_every_part_and_on_their_order() -> None:
    seeds = [hash_seed(a, b, c) for a, b, c in itertools.product(range(20), repeat=3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in (*seeds, hash_seed(2**62, 2**62)))


# --- offline ---


def test_offline_takes_so_many_rows_a_step_and_counts_their_tokens() -> None:
    algo = sft()
    rows = tiny.groups_for(algo)
    learner = tiny.learner_for(algo)
    run, taken = offline(Source(rows, seed=0), learner, algo, size=5), Source(rows, seed=0).take(5)
    first = next(run)
    assert first.groups == taken
    assert first.metrics["tokens"] == sum(sum(r.mask) for g in taken for r in g)
    assert [next(run).number, next(run).number] == [2, 3]
    assert learner.updates == learner.version == 3


def test_ktos_mismatched_pairs_are_cut_to_the_context() -> None:
    # context 24: a long prompt with a short answer and the other way round; crossed, one pair has 15 + 15 tokens
    def labelled(prompt: int, answer: int) -> Group:
        mask = [False] * prompt + [True] * answer
        return [Rollout(tokens=[1] * (prompt + answer), mask=mask, label=1.0)]

    algo = kto()
    rows = [labelled(15, 2), labelled(2, 15)]
    with pytest.raises(HoneError, match="context is 24"):
        next(offline(Source(rows, seed=0), tiny.learner_for(algo), algo, size=2))
    metrics = next(offline(Source(rows, seed=0), tiny.learner_for(algo), algo, size=2, context=24)).metrics
    assert metrics["skipped"] == 0.0
