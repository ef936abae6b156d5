"""Old log-probs that are the sampler's: the same bits as the policy's own pass, and none where that would differ."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from each import each
from torch import Tensor

from hone.algo import ALGORITHMS, Algorithm
from hone.algo.weight import mismatch
from hone.data.collate import collate
from hone.data.feed.source import Source
from hone.dist import collect
from hone.engine.params import SampleParams
from hone.loop import online
from hone.model.kernels.cpp.library import library
from hone.rollout.local import LocalSampler
from hone.rollout.supply import RolloutQueue
from hone.train import annotate as passes
from hone.train.annotate import (
    PROBED,
    add_sampler_logp,
    annotated_minibatches,
    drawn_from_policy,
    forward_in_slices,
    old_logp_from_sampler,
    without_old_logp,
)
from hone.train.learner import Learner
from hone.types import ABSENT, Batch

pytestmark = pytest.mark.skipif(isinstance(library(), str), reason="there is no C++ compiler")
GRPO, LOGP = ALGORITHMS["grpo"](), frozenset({"logp"})
PROMPTS, GROUP = 8, 4
Read = list[tuple[int, bool]]  # rows of each pass of the policy, and whether it is one of an update


def moved(algo: Algorithm = GRPO) -> Learner:
    """Weights of which none is a round number."""
    learner = tiny.learner_for(algo)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for p in parameters_of(learner):
            p.add_(torch.randn_like(p), alpha=0.05)
    return learner


def parameters_of(learner: Learner) -> list[torch.nn.Parameter]:
    return list(decoder_of(learner).parameters())


def decoder_of(learner: Learner) -> Any:
    return learner.policy.decoder  # pyright: ignore[reportAttributeAccessIssue]


def sampled(learner: Learner, *, temperature: float = 1.0, prompts: int = PROMPTS) -> Batch:
    """Unequal rows that the learner's weights wrote."""
    params = SampleParams(max_tokens=8, stop_ids=frozenset({tiny.STOP}), temperature=temperature)
    texts = [[int(t) for t in str(task.prompt).split()] for task in tiny.TASKS[:prompts]]
    groups = LocalSampler(decoder_of(learner)).sample(texts, n=GROUP, params=params)
    batch = collate(tiny.scorer(tiny.share_of_threes)(groups))
    assert len(batch.mask.sum(-1).unique()) > 1
    return batch


def watched(learner: Learner) -> Read:
    """Filled while the policy is read."""
    read: Read = []
    learner.policy.register_forward_pre_hook(  # pyright: ignore
        lambda _, args: read.append((len(args[0]), torch.is_grad_enabled()))
    )
    return read


def own(learner: Learner, batch: Batch) -> Tensor:
    return forward_in_slices(learner.policy, batch, LOGP, rows=len(batch)).logp


def test_they_are_those_of_the_policy_s_own_pass_to_the_bit():
    learner = moved()
    batch = sampled(learner)
    found = old_logp_from_sampler(batch, learner)
    assert found is not None
    assert torch.equal(found, own(learner, batch)), "zero off the mask, too"
    assert len(found[batch.mask].unique()) > 20


def test_after_updates_they_are_those_of_the_weights_as_they_are_now():
    learner = moved()
    run = tiny.run_online(learner, GRPO)
    for _ in range(2):
        next(run)
        batch = sampled(learner)
        found = old_logp_from_sampler(batch, learner)
        assert found is not None
        assert torch.equal(found, own(learner, batch))


def test_few_rows_are_read_and_these_have_been_written_in():
    learner = moved()
    read, batch = watched(learner), sampled(learner)
    assert old_logp_from_sampler(batch, learner) is not None
    assert read == [(PROBED, False)]
    some = torch.zeros(len(batch), 1, dtype=torch.bool)
    some[[3, 17, 30]] = True  # all others have no trained token, as those of an invalid reward
    assert old_logp_from_sampler(replace(batch, mask=batch.mask & some), learner) is not None
    assert read[1:] == [(PROBED, False)]
    assert old_logp_from_sampler(replace(batch, gen_logp=torch.zeros_like(batch.gen_logp)), learner) is None
    assert len(read) == 2, "what is certain tells nothing"


def probed(batch: Batch) -> list[int]:
    """Those whose tokens were the least probable together."""
    summed = torch.where(batch.mask, batch.gen_logp, 0.0).sum(-1)
    return summed.argsort(stable=True)[:PROBED].tolist()


@pytest.mark.parametrize("which", range(PROBED))
def test_a_single_number_of_a_row_that_is_read_refuses_all(which: int):
    learner = moved()
    batch = sampled(learner)
    row = probed(batch)[which]
    at = row, int(batch.mask[row].nonzero()[-1])
    other = batch.gen_logp.clone()
    other[at] = torch.nextafter(other[at], torch.tensor(-torch.inf))
    assert old_logp_from_sampler(replace(batch, gen_logp=other), learner) is None
    off = batch.gen_logp.masked_fill(~batch.mask, -3.0)
    assert old_logp_from_sampler(replace(batch, gen_logp=off), learner) is not None, (
        "off the mask there is nothing to compare"
    )


def stale(learner: Learner, batch: Batch) -> Batch:
    with torch.no_grad():
        parameters_of(learner)[-1].mul_(1.001)
    return batch


def warmer(learner: Learner, batch: Batch) -> Batch:
    learner.policy.temperature = 0.9  # pyright: ignore[reportAttributeAccessIssue]
    return batch


def plain(learner: Learner, batch: Batch) -> Batch:
    decoder_of(learner).backends = ()
    return batch


def double(learner: Learner, batch: Batch) -> Batch:
    decoder_of(learner).double()
    return batch


OTHER: dict[str, Callable[[Learner, Batch], Batch]] = {
    "weights that have changed since": stale,
    "a learner's temperature": warmer,
    "a sampler's temperature": lambda learner, _: sampled(learner, temperature=0.9),
    "both at one temperature, which other code computes": lambda learner, _: warmer(
        learner, sampled(learner, temperature=0.9)
    ),
    "torch's own layers": plain,
    "another precision": double,
    "a sampler that tells no log-probs": lambda _, batch: replace(batch, gen_logp=ABSENT),
    "no trained tokens": lambda _, batch: replace(batch, mask=torch.zeros_like(batch.mask)),
    "no rows": lambda _, batch: batch.rows(slice(0)),
}
UNREAD = {
    "torch's own layers",
    "another precision",
    "a sampler that tells no log-probs",
    "no trained tokens",
    "no rows",
}


@each("name", OTHER)
def test_nothing_is_borrowed_with(name: str):
    learner = moved()
    batch = OTHER[name](learner, sampled(learner))
    read = watched(learner)
    assert old_logp_from_sampler(batch, learner) is None
    assert read == ([] if name in UNREAD else [(PROBED, False)])
    assert add_sampler_logp(batch, GRPO, learner) is batch


def test_nothing_is_borrowed_by_several_ranks(monkeypatch: pytest.MonkeyPatch):
    learner = moved()
    batch = sampled(learner)
    monkeypatch.setattr(collect, "world", lambda: (0, 2))  # one could borrow where another makes passes
    assert old_logp_from_sampler(batch, learner) is None


def parts(learner: Learner, batch: Batch, *, fresh: bool) -> Sequence[Batch]:
    """The minibatches, each with the numbers of its rows as baseline."""
    numbered = replace(batch, baseline=torch.arange(len(batch)).double())
    return list(annotated_minibatches(numbered, GRPO, learner, count=4, seed=0, from_sampler=fresh))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("changed", [True, False])
def test_later_minibatches_have_the_bits_of_the_weights_before_the_first(fresh: bool, changed: bool):
    learner = moved()
    batch = sampled(learner)
    batch = stale(learner, batch) if changed else batch
    expected, read = own(learner, batch), watched(learner)
    first, *others = parts(learner, batch, fresh=fresh)
    assert first.old_logp is ABSENT
    for part in others:
        assert torch.equal(part.old_logp, expected[part.baseline.long()])
    rest = sum(map(len, others))
    assert read == [(PROBED, False)] * fresh + [(rest, False)] * (changed or not fresh), (
        "rows not fresh: never borrowed"
    )


@pytest.mark.parametrize("name", ["ppo", "reinforce", "sft"])
def test_what_needs_another_pass_or_none_borrows_nothing(name: str):
    algo = ALGORITHMS[name]()
    learner = moved(algo)
    batch = sampled(learner)
    read = watched(learner)
    assert add_sampler_logp(batch, algo, learner) is batch
    assert read == []


def test_what_annotation_was_to_read_is_lent():
    learner = moved()
    batch = sampled(learner)
    found = add_sampler_logp(batch, GRPO, learner).old_logp
    assert torch.equal(found, own(learner, batch))
    assert add_sampler_logp(batch, without_old_logp(GRPO), learner) is batch, "the first update's own pass gives it"


# --- runs ---


def run(learner: Learner, how: dict[str, int], *, lag: int = 0, corrected: bool = False) -> list[dict[str, float]]:
    """Two iterations and their metrics, without the times."""
    roll = tiny.Roller(decoder_of(learner), group=GROUP, copy=lag > 0)
    correct = partial(mismatch, how="truncate", cap=1.5) if corrected else None
    tasks = RolloutQueue(Source(tiny.TASKS, seed=0), lag=lag)
    made = online(
        tasks, roll, tiny.scorer(tiny.share_of_threes), learner, GRPO,
        prompts=PROMPTS, correct=correct, publish=roll.sampler.publish, **how,
    )  # fmt: skip
    found = [x.metrics for x in itertools.islice(made, 2)]
    return [{k: v for k, v in m.items() if not k.startswith(("seconds", "tokens_per_second"))} for m in found]


def before_updates(read: Read) -> list[int]:
    return [rows for rows, updating in read if not updating]


@pytest.mark.parametrize("how", [{"minibatches": 4}, {"epochs": 2}, {"epochs": 2, "minibatches": 2}], ids=str)
def test_a_run_reads_few_rows_and_ends_with_the_bits_of_one_that_reads_all(
    how: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    one, two, start = moved(), moved(), tiny.parameters_of(moved())
    few, metrics = watched(one), run(one, how)
    assert before_updates(few) == [PROBED, PROBED]
    monkeypatch.setattr(passes, "old_logp_from_sampler", lambda batch, learner: None)
    every, others = watched(two), run(two, how)
    assert sum(before_updates(every)) >= 2 * PROMPTS * GROUP * 3 // 4
    assert metrics == others
    for x, y, z in zip(tiny.parameters_of(one), tiny.parameters_of(two), start, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, z)


@each("lag", [0, 1])
@each("how", [{}, {"minibatches": 4}, {"epochs": 2}], ids=str)
def test_a_run_that_corrects_the_sampler_s_mismatch_reads_every_row(how: dict[str, int], lag: int):
    # it compares what the sampler said with what the learner says
    learner = moved()
    read = watched(learner)
    run(learner, how, lag=lag, corrected=True)
    assert before_updates(read) == [PROMPTS * GROUP] * 2


def test_tokens_that_were_not_drawn_from_the_whole_distribution_are_not_borrowed_from():
    texts = [[int(t) for t in str(task.prompt).split()] for task in tiny.TASKS[:2]]
    plain = SampleParams(max_tokens=8, stop_ids=frozenset({tiny.STOP}))
    sampler = LocalSampler(decoder_of(moved()))
    assert drawn_from_policy(sampler.sample(texts, n=4, params=plain))
    for change in ({"top_p": 0.8}, {"top_k": 2}, {"temperature": 0.7}, {"repetition_penalty": 1.5}):
        groups = sampler.sample(texts, n=4, params=replace(plain, **change))
        assert not drawn_from_policy(groups), change
    written = sampler.sample(texts, n=1, params=plain)
    assert not drawn_from_policy([[replace(r, raw_logp=()) for r in g] for g in written]), "nobody can tell"
    assert not drawn_from_policy([[replace(r, gen_logp=(), raw_logp=()) for r in g] for g in written])


def test_too_few_groups_for_the_threads_are_not_borrowed_from():
    learner = moved()
    before = torch.get_num_threads()
    try:
        for threads, found in ((1, True), (2, False)):
            torch.set_num_threads(threads)
            assert (old_logp_from_sampler(sampled(learner, prompts=3), learner) is not None) is found
    finally:
        torch.set_num_threads(before)


def test_layers_that_are_computed_again_are_no_reason_to_read_rows():
    learner = moved()
    read = watched(learner)
    learner.policy.checkpoint_layers = True  # pyright: ignore[reportAttributeAccessIssue]
    assert old_logp_from_sampler(sampled(learner), learner) is None
    assert read == []
