"""The old log-probs of the first update are those of its own forward pass, unless others read them."""

from dataclasses import replace
from functools import partial

import tiny
import torch
from each import each

from hone.algo import ALGORITHMS, Algorithm, credit
from hone.algo.table import old_logp_from_first_pass
from hone.train.annotate import annotated_minibatches, without_old_logp
from hone.train.learner import Learner
from hone.train.update import update, weigh
from hone.types import ABSENT, Forward


def passes(algo: Algorithm, **how: int) -> list[frozenset[str]]:
    """What the policy is asked for in one iteration, call by call."""
    learner, asked = tiny.learner_for(algo), list[frozenset[str]]()
    learner.policy.register_forward_pre_hook(lambda _, args: asked.append(args[1]))  # pyright: ignore
    next(tiny.run_online(learner, algo, **how))
    return asked


def test_one_update_is_one_pass_of_the_policy():
    assert passes(ALGORITHMS["grpo"]()) == [frozenset({"logp"})]


def test_two_updates_need_a_pass_before_them():
    assert len(passes(ALGORITHMS["grpo"](), epochs=2)) == 3
    assert len(passes(ALGORITHMS["grpo"](), minibatches=2)) == 3


def not_borrowing(algo: Algorithm) -> Learner:
    """Torch's own layers differ from the sampler's by rounding, so that its log-probs cannot be taken over (see
    test_old_logp.py)."""
    learner = tiny.learner_for(algo)
    learner.policy.decoder.backends = ()  # pyright: ignore[reportAttributeAccessIssue]
    return learner


def test_without_the_sampler_s_the_first_of_several_updates_has_no_pass_before_it():
    algo = ALGORITHMS["grpo"]()
    learner, read = not_borrowing(algo), list[tuple[int, bool]]()
    learner.policy.register_forward_pre_hook(  # pyright: ignore
        lambda _, args: read.append((len(args[0]), torch.is_grad_enabled()))
    )
    next(tiny.run_online(learner, algo, minibatches=4))
    before, updates = ([n for n, grad in read if grad is now] for now in (False, True))
    assert len(updates) == 4
    assert sum(before) == sum(updates[1:]) < sum(updates)


def test_without_the_sampler_s_one_pass_of_several_epochs_reads_every_row():
    algo = ALGORITHMS["grpo"]()
    learner, read = not_borrowing(algo), list[tuple[int, bool]]()
    learner.policy.register_forward_pre_hook(  # pyright: ignore
        lambda _, args: read.append((len(args[0]), torch.is_grad_enabled()))
    )
    next(tiny.run_online(learner, algo, minibatches=2, epochs=2))
    assert 2 * sum(n for n, grad in read if not grad) == sum(n for n, grad in read if grad)


def test_the_others_old_log_probs_are_those_before_the_first_update():
    algo = ALGORITHMS["grpo"](beta=0.0)
    learner = tiny.learner_for(algo)
    rows = [r for g in tiny.groups_for(algo, groups=4) for r in g]
    batch = tiny.collated(rows)
    before = learner.policy(batch, frozenset({"logp"})).logp.detach()
    numbered = replace(batch, baseline=torch.arange(len(batch)).double())
    parts = annotated_minibatches(numbered, algo, learner, count=3, seed=0)
    assert next(parts).old_logp is ABSENT
    with torch.no_grad():
        for p in learner.policy.parameters():  # pyright: ignore[reportAttributeAccessIssue]
            p.add_(0.1)
    for part in parts:
        assert torch.allclose(part.old_logp, before[part.baseline.long()])


KEPT = {
    "a KL in the reward": ALGORITHMS["grpo"](kl="reward:k1"),
    "a critic's values": ALGORITHMS["ppo"](),
    "the KL after the update": ALGORITHMS["ppo_penalty"](),
    "a trust region": ALGORITHMS["trpo"](),
    "a credit of one's own": replace(ALGORITHMS["grpo"](), credit=lambda batch: batch.old_logp),
    "one's own, with settings": replace(ALGORITHMS["grpo"](), credit=partial(lambda batch, x: x * batch.old_logp, x=2)),
}


@each("name", KEPT)
def test_what_else_reads_them_keeps_the_pass(name: str) -> None:
    assert without_old_logp(KEPT[name]) == KEPT[name]


CREDITED = {name: make() for name, make in ALGORITHMS.items() if make().credit is not None}


@each("name", [n for n, algo in CREDITED.items() if not credit.reads_log_probs(algo.credit)])
def test_a_credit_that_is_said_not_to_read_them_does_not(name: str) -> None:
    algo = CREDITED[name]
    rows = [r for g in tiny.groups_for(algo) for r in g]
    batch = replace(tiny.collated(rows), kl_coef=torch.ones(len(rows)), baseline=torch.zeros(len(rows)))
    batch = replace(batch, old_value=torch.zeros_like(batch.gen_logp), bootstrap=torch.zeros(len(rows)))
    assert batch.old_logp is ABSENT
    assert algo.credit is not None
    assert algo.credit(batch).shape == batch.mask.shape


def test_a_column_that_is_there_is_left_alone():
    rows = tiny.random_rows(2)
    batch = tiny.collated(rows)
    fwd, algo = Forward(logp=torch.full(batch.mask.shape, -1.0, requires_grad=True)), ALGORITHMS["grpo"]()
    filled = old_logp_from_first_pass(fwd, batch, algo)
    assert filled.old_logp.equal(fwd.logp)
    assert not filled.old_logp.requires_grad
    there = replace(batch, old_logp=torch.zeros(batch.mask.shape))
    assert old_logp_from_first_pass(fwd, there, algo) is there
    assert old_logp_from_first_pass(fwd, batch, ALGORITHMS["sft"]()) is batch


def test_the_gradient_is_the_policy_s_and_the_ratio_is_one():
    # at ratio 1 the clipped surrogate has the gradient of -A log pi
    algo = ALGORITHMS["grpo"](beta=0.0)
    rows = [r for g in tiny.groups_for(algo) for r in g]
    batch = tiny.collated(rows)
    batch = weigh(replace(batch, adv=torch.where(batch.mask, 1.0, 0.0)), algo)
    learner = tiny.learner_for(algo)
    stats = update(learner, batch, algo)
    assert stats.means()["ratio"] == 1.0
    other = tiny.learner_for(algo)
    update(other, batch, replace(ALGORITHMS["reinforce"](), weigh=algo.weigh))
    for a, b in zip(tiny.parameters_of(learner), tiny.parameters_of(other), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_annotated_batch_keeps_every_other_need():
    for name in sorted(ALGORITHMS):
        algo = ALGORITHMS[name]()
        assert algo.needs - without_old_logp(algo).needs <= {"old_logp"}
