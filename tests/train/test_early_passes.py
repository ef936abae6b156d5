"""Passes over samples that are still to be scored: when they are begun, and what becomes of what they gave."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from each import each
from patience import patience

from hone.algo import ALGORITHMS, Algorithm, grpo, ppo
from hone.data.collate import collate
from hone.data.feed.source import Source
from hone.data.text.tokenizer import train_bpe
from hone.dist import collect
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.log.stats import StageTimer
from hone.loop import Iteration, online
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.reward.group_scorer import GroupScorer
from hone.reward.score import Reward
from hone.rollout.local import LocalSampler
from hone.rollout.supply import Roller
from hone.train import annotate as early
from hone.train.annotate import EarlyPasses, annotate, may_start_early, number_rows
from hone.train.learner import Learner, minibatch_rows
from hone.train.update import assign_credit, totals, weigh
from hone.types import ABSENT, Group, Outcome, Task

torch.set_num_threads(1)
HOME = {"inputs", "targets", "mask", "real", "group", "place"}  # columns that a batch on a GPU has on the host too
TASKS = [Task(prompt=prompt) for prompt in ("one", "three", "by two", "a")]
FULL: dict[str, Callable[[], Algorithm]] = {
    "grpo": grpo,
    "ppo": partial(ppo, bootstrap=True, beta=0.1),
    "exact": partial(ppo, beta=0.1, kl="loss:exact"),
}


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU counts as a device that computes while the host goes on."""
    monkeypatch.setattr(early, "ASYNCHRONOUS", frozenset({"cpu"}))


def rolled(learner: Learner, *, tasks: int = 5) -> list[Group]:
    roll = tiny.Roller(learner.policy.decoder, group=3)  # pyright: ignore[reportAttributeAccessIssue]
    return roll(tiny.TASKS[:tasks])


def marked(groups: list[Group], *, invalid: int = 0) -> list[Group]:
    """Every so many-th reward is invalid."""
    count = itertools.count()
    values = (None if invalid and n % invalid == 1 else n / 7 for n in count)
    return [[replace(r, outcome=Outcome(value=next(values))) for r in g] for g in groups]


# --- when ---


def test_it_is_begun_where_all_is_learned_from_and_a_gpu_computes_it() -> None:
    learner = tiny.learner_for(grpo())
    assert not may_start_early(grpo(), learner, lag=0), "a CPU would only be waited for"
    assert {"cuda"} == early.ASYNCHRONOUS


@pytest.mark.usefixtures("beside")
def test_it_is_not_begun_where_samples_may_be_left_out_or_others_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {name: may_start_early(make(), tiny.learner_for(make()), lag=0) for name, make in FULL.items()}
    assert begun == dict.fromkeys(FULL, True)
    learner = tiny.learner_for(grpo())
    assert not may_start_early(grpo(), learner, lag=1)
    assert not may_start_early(replace(grpo(), needs=frozenset({"kl_coef"})), learner, lag=0), "no pass is needed"
    for name in ("dapo", "online_dpo", "expert_iteration"):
        assert not may_start_early(ALGORITHMS[name](), learner, lag=0)
    monkeypatch.setattr(collect, "world", lambda: (0, 2))
    assert not may_start_early(grpo(), learner, lag=0)


# --- what is taken over ---


@pytest.mark.usefixtures("beside")
@each("invalid", [0, 4])
@each("name", FULL)
def test_the_batch_is_that_of_annotating_afterwards(name: str, invalid: int) -> None:
    algo = FULL[name]()
    learner = tiny.learner_for(algo, base=tiny.decoder(dtype=torch.float64))
    learner.start_controls(algo)
    begun, laps, groups = EarlyPasses(algo, learner, lag=0), StageTimer(), rolled(learner)
    begun.start(groups, laps)
    assert laps.seconds.keys() == {"annotate"}
    groups = marked(groups, invalid=invalid)
    taken = begun.collate(groups)
    filled = {c for c in early.PASSES & algo.needs if getattr(taken, c) is not ABSENT}
    assert filled == early.PASSES & algo.needs, "nothing is left for later"
    found, after = annotate(taken, algo, learner).columns(), annotate(collate(groups), algo, learner).columns()
    assert found.keys() == after.keys()
    for column, x in after.items():
        assert found[column].dtype == x.dtype, column
        torch.testing.assert_close(found[column], x, rtol=0, atol=1e-12 if invalid else 0)
    assert bool(taken.valid.all()) is not bool(invalid), "the case is met"


@pytest.mark.usefixtures("beside")
def test_what_was_begun_is_used_once_and_for_the_same_tokens_only() -> None:
    algo = grpo()
    learner = tiny.learner_for(algo)
    one, two = rolled(learner, tasks=2), rolled(learner, tasks=3)
    begun = EarlyPasses(algo, learner, lag=0)
    begun.start(one, StageTimer())
    begun.start(two, StageTimer())  # as where the reward of the first has failed
    assert begun.collate(marked(two)).ref_logp is not ABSENT
    assert begun.collate(marked(two)).ref_logp is ABSENT
    for other in (
        two[:2],
        two[::-1],
        [[replace(r, tokens=[*r.tokens]) for r in g] for g in two],
        [[r for g in two for r in g]],
    ):
        begun.start(two, StageTimer())
        batch = begun.collate(marked(other))
        assert batch.ref_logp is ABSENT
        assert batch.inputs.tolist() == collate(other).inputs.tolist()
    begun.start([], StageTimer())
    assert len(begun.collate([])) == 0


@pytest.mark.usefixtures("beside")
def test_a_pass_that_runs_out_of_memory_is_made_in_halves() -> None:
    algo = grpo(beta=0.1)
    learner = tiny.learner_for(algo)
    groups = rolled(learner)
    whole = EarlyPasses(algo, learner, lag=0)
    whole.start(groups, StageTimer())
    expected, real, sizes = whole.collate(marked(groups)), learner.reference, list[int]()

    def small(batch: Any, want: Any) -> Any:
        sizes.append(len(batch))
        if len(batch) > 4:
            raise torch.OutOfMemoryError("out of memory")
        assert real is not None
        return real(batch, want)

    learner.reference = small
    whole.start(groups, StageTimer())
    assert max(sizes) > 4
    torch.testing.assert_close(whole.collate(marked(groups)).ref_logp, expected.ref_logp)


# --- in the loop ---


def started(reward: Any, *, events: list[str], group: int = 2, **how: Any) -> tuple[Iterator[Iteration], Learner]:
    """GRPO by a run's own roller and marker; the reference's passes and rewards are noted in order."""
    algo, tokenizer = grpo(), train_bpe([], vocab_size=258)
    config = DecoderConfig(vocab_size=258, hidden_size=16, num_hidden_layers=1, initializer_range=0.2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = Decoder(config)
    learner = tiny.learner_for(algo, base=base)
    learner.reference.register_forward_pre_hook(lambda *_: events.append("pass"))  # pyright: ignore
    stop_ids = frozenset(range(0, 256, 11)) | tokenizer.stop_ids
    roll = Roller(LocalSampler(base), tokenizer, SampleParams(max_tokens=12, stop_ids=stop_ids), group=group)
    score = GroupScorer(reward=Reward(reward), **how)
    return online(Source(TASKS, seed=0), roll, score, learner, algo, prompts=4), learner


def one_by_one(events: list[str]) -> Any:
    def reward(completion: str) -> float:
        events.append("reward")
        return len(completion) % 3

    return reward


def all_at_once(events: list[str]) -> Any:
    return lambda completions: [one_by_one(events)(completion) for completion in completions]


@pytest.mark.parametrize("by", [one_by_one, all_at_once])
def test_a_run_is_the_same_to_the_bit_and_its_passes_come_before_the_last_reward(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[Any]()
    for devices in (frozenset[str](), frozenset({"cpu"})):
        monkeypatch.setattr(early, "ASYNCHRONOUS", devices)
        events = list[str]()
        run, learner = started(by(events), events=events)
        done = list(itertools.islice(run, 2))
        first = events[: events.count("pass") // 2 + events.count("reward") // 2]
        assert (first[-1] == "reward") is bool(devices)
        assert first.count("reward") == 8
        timed = ("seconds", "tokens_per_second")
        metrics = [{k: v for k, v in it.metrics.items() if not k.startswith(timed)} for it in done]
        found.append((tiny.parameters_of(learner), metrics, [it.groups for it in done]))
        for it in done:
            stages = sum(it.metrics[f"seconds_{n}"] for n in ("sample", "score", "annotate", "update", "publish"))
            assert stages == pytest.approx(it.metrics["seconds"], abs=patience(0.05))
    assert found[0][1:] == found[1][1:]
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert all(r.text or not r.written()[:-1] for groups in found[1][2] for g in groups for r in g)
    assert all(r.task in TASKS for groups in found[1][2] for g in groups for r in g)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("failure", [KeyboardInterrupt, HoneError], ids=["Ctrl-C", "too many invalid"])
def test_what_stops_a_reward_stops_the_step_before_anything_has_moved(failure: type[BaseException]) -> None:
    events = list[str]()

    def reward(completion: str) -> float:
        events.append("reward")
        if events.count("reward") >= (16 if failure is KeyboardInterrupt else 9):
            raise KeyboardInterrupt if failure is KeyboardInterrupt else ValueError
        return len(completion) % 3

    run, learner = started(reward, events=events)
    next(run)
    before = tiny.parameters_of(learner)
    with pytest.raises(failure):
        next(run)
    assert events.count("pass") == 2, "the second step's was begun"
    assert not learner.moved
    assert (learner.version, learner.updates) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


@pytest.mark.usefixtures("beside")
def test_an_iteration_of_invalid_rewards_changes_nothing() -> None:
    run, learner = started(lambda completion: None, events=[], max_invalid=1.0)
    before = tiny.parameters_of(learner)
    metrics = next(run).metrics
    assert metrics["invalid"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


def test_credit_weights_and_cuts_read_the_host_and_wait_for_no_pass() -> None:
    algo = grpo()
    batch = number_rows(collate(groups := marked(rolled(tiny.learner_for(algo)))), [groups])
    home = replace(batch, **dict.fromkeys(batch.columns().keys() - HOME, ABSENT))
    unread = {name: torch.full_like(getattr(batch, name), 77) for name in ("group", "place")}
    device = replace(batch, host_copy=home, **unread)
    assert torch.equal(assign_credit(device, algo).adv, assign_credit(batch, algo).adv)
    assert totals(replace(device, mask=torch.zeros_like(batch.mask))) == totals(batch)
    for ours, theirs in zip(*(minibatch_rows(b, count=3, unit=1, seed=1) for b in (device, batch)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_waited_for_between_the_passes_and_the_update(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "ASYNCHRONOUS", frozenset({device}))
    algo = grpo()
    groups, learner = rolled(tiny.learner_for(algo)), tiny.learner_for(algo, base=tiny.decoder().to(device))
    learner.start_controls(algo)
    begun = EarlyPasses(algo, learner, lag=0)
    assert begun.on
    for waits in ("default", "error"):  # the first time, memory is taken
        begun.start(groups, StageTimer())
        with no_waiting(waits if device == "cuda" else ""):
            batch = annotate(number_rows(begun.collate(marked(groups, invalid=4)), [groups]), algo, learner)
            batch = weigh(assign_credit(batch, algo), algo)
    after = annotate(collate(marked(groups, invalid=4)).to(device), algo, learner)
    torch.testing.assert_close(batch.ref_logp, after.ref_logp)
    assert torch.equal(batch.mask, after.mask)
    assert torch.equal(batch.host.mask, after.host.mask)


@contextmanager
def no_waiting(mode: str) -> Iterator[None]:
    """What torch does where the host waits for the GPU; "": there is none."""
    if mode:
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode("default")
