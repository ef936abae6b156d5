"""The KL estimators: value and gradient, on and off policy, in the loss and in the reward (specification 6)."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from each import each
from torch import Tensor
from world import (
    RAGGED,
    close,
    coefficient,
    cosine,
    error,
    expected_gradient,
    gradient,
    kl,
    visits,
    wave,
)

from hone.algo import Algorithm, a2c, credit, dr_grpo, grpo, ppo_penalty, reinforce, rloo, terms
from hone.algo.weight import row_mean, row_sum
from hone.errors import HoneError
from hone.types import ABSENT, Batch, sequence_sum

torch.set_num_threads(1)
BETA = 0.3
POLICY, OLD, REF = RAGGED.policy(1.0), RAGGED.policy(5.0).detach(), RAGGED.policy(3.0).detach()
SILENT = replace(RAGGED, batch=replace(RAGGED.batch, reward=torch.zeros(15).double(), step_reward=ABSENT))
COEF = coefficient(RAGGED, BETA)


def per_state(sampler: Tensor, *, towards: bool = False) -> Tensor:
    """BETA grad of E[sum over states KL(pi || ref)], or of KL(ref || pi), with the states of `sampler` held fixed."""
    divergence = kl(REF, POLICY) if towards else kl(POLICY, REF)
    return BETA * gradient(visits(RAGGED, sampler, divergence), POLICY)


def sequence_kl() -> Tensor:
    """BETA grad KL(pi(y) || ref(y)) of whole responses."""
    chance, log_ref = RAGGED.chance(POLICY), RAGGED.logp(REF).sum(-1)
    return BETA * gradient((chance * (chance.log() - log_ref)).sum(), POLICY)


def penalty(estimator: str, *, sampler: Tensor | None = None, through_ratio: bool = False) -> Tensor:
    """The expected gradient of the penalty term alone."""
    term = partial(terms.kl_penalty, estimator=estimator, through_ratio=through_ratio)
    algo = Algorithm(loss=((1.0, term),), weigh=row_sum)
    return expected_gradient(algo, SILENT, POLICY, sampler=sampler, ref=REF, kl_coef=COEF)


def value_of(estimator: str, sampler: Tensor, *, through_ratio: bool = False) -> float:
    batch = replace(SILENT.batch, old_logp=SILENT.logp(sampler), ref_logp=SILENT.logp(REF), kl_coef=COEF)
    term = terms.kl_penalty(SILENT.forward(POLICY, ref=REF), batch, estimator=estimator, through_ratio=through_ratio)
    return float((SILENT.chance(sampler) * sequence_sum(term, batch.mask)).sum().detach())


# --- values ---


def test_on_policy_k1_k3_and_exact_have_the_value_of_the_kl_and_k2_is_off() -> None:
    true = BETA * float(visits(RAGGED, POLICY, kl(POLICY, REF)).detach())
    for estimator in ("k1", "k3", "exact"):
        assert value_of(estimator, POLICY) == pytest.approx(true, abs=1e-12)
    assert value_of("k2", POLICY) / true == pytest.approx(1.5017724089, abs=1e-9)


def test_off_policy_the_ratio_puts_the_values_right() -> None:
    # on samples of pi_old, with the states pi_old visits
    true = BETA * float(visits(RAGGED, OLD, kl(POLICY, REF)).detach())
    assert value_of("exact", OLD) == pytest.approx(true, abs=1e-12)
    for estimator, plain in (("k1", 1.0852936429), ("k3", 1.1827744100)):
        assert value_of(estimator, OLD, through_ratio=True) == pytest.approx(true, abs=1e-12)
        assert value_of(estimator, OLD) / true == pytest.approx(plain, abs=1e-9)


# --- in the loss, on policy ---


def test_k1_in_the_loss_has_no_expected_gradient_and_is_refused() -> None:
    close(penalty("k1"), torch.zeros_like(POLICY))
    with pytest.raises(HoneError, match="zero expected gradient"):
        dr_grpo(beta=BETA, kl="loss:k1")


def test_k2_and_exact_in_the_loss_have_the_gradient_of_kl_policy_to_reference() -> None:
    close(penalty("k2"), per_state(POLICY))
    close(penalty("exact"), per_state(POLICY))


def test_k3_in_the_loss_has_the_gradient_of_the_other_kl() -> None:
    close(penalty("k3"), per_state(POLICY, towards=True))
    # how far that is from the gradient of the KL that k3's value estimates
    assert cosine(penalty("k3"), per_state(POLICY)) == pytest.approx(0.9052489041, abs=1e-9)
    assert error(penalty("k3"), per_state(POLICY)) == pytest.approx(0.5109958407, abs=1e-9)


def test_in_the_loss_the_future_is_left_out_of_the_gradient() -> None:
    # a token that leads to states far from the reference is not charged for them
    assert error(per_state(POLICY), sequence_kl()) == pytest.approx(0.1186747402, abs=1e-9)


@each("setting", ["loss:k2", "loss:k3", "loss:exact", "loss:k1*ratio", "loss:k2*ratio", "loss:k3*ratio"])
def test_the_factories_add_the_term_that_the_setting_names(setting: str) -> None:
    estimator, _, ratio = setting.removeprefix("loss:").partition("*")
    algo = dr_grpo(beta=BETA, kl=setting)  # one row a group: no advantage; divided by the limit, 3
    found = expected_gradient(algo, RAGGED, POLICY, sampler=OLD, ref=REF, kl_coef=COEF)
    close(3 * found, penalty(estimator, sampler=OLD, through_ratio=bool(ratio)))


# --- in the loss, off policy ---


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_weighed_by_the_ratio_each_has_the_gradient_of_kl_policy_to_reference(estimator: str) -> None:
    close(penalty(estimator, through_ratio=True), per_state(POLICY))
    close(penalty(estimator, sampler=OLD, through_ratio=True), per_state(OLD))


def test_off_policy_the_exact_kl_needs_no_ratio() -> None:
    close(penalty("exact", sampler=OLD), per_state(OLD))


@pytest.mark.parametrize(("estimator", "bias"), [("k1", 0.9480346521), ("k2", 0.3310255914), ("k3", 0.5979648525)])
def test_off_policy_without_the_ratio_none_has_it(estimator: str, bias: float) -> None:
    assert error(penalty(estimator, sampler=OLD), per_state(OLD)) == pytest.approx(bias, abs=1e-9)


def test_the_penalty_to_the_old_policy_is_unbiased_in_value_and_gradient() -> None:
    true = BETA * visits(RAGGED, OLD, kl(OLD, POLICY))
    batch = replace(SILENT.batch, old_logp=SILENT.logp(OLD), kl_coef=COEF)
    fwd = SILENT.forward(POLICY, old=OLD)
    for exact in (False, True):
        assert ppo_penalty(exact=exact).loss[1][1](fwd, batch).equal(terms.old_penalty(fwd, batch, exact=exact))
        term = terms.old_penalty(fwd, batch, exact=exact)
        found = (SILENT.chance(OLD) * sequence_sum(term, batch.mask)).sum()
        close(found, true)
        again = BETA * visits(RAGGED, OLD, kl(OLD, POLICY))
        (grad,) = torch.autograd.grad(found, POLICY, retain_graph=True)
        close(grad, gradient(again, POLICY))


# --- in the reward ---


def whole_row(batch: Batch) -> Tensor:
    return torch.where(batch.mask, credit.row_rewards(batch, kl="k1")[:, None], 0.0)


@pytest.mark.parametrize(
    ("algo", "size"),
    [
        (reinforce(beta=BETA), 1),
        (replace(reinforce(beta=BETA), credit=whole_row), 1),
        (rloo(beta=BETA), 2),
        (replace(a2c(beta=BETA, entropy=0.0), weigh=row_sum), 1),
    ],
    ids=["to go", "whole row", "leave one out", "actor and critic"],
)
def test_k1_in_the_reward_has_the_gradient_of_the_sequence_kl(algo: Algorithm, size: int) -> None:
    values = RAGGED.at(wave(RAGGED.states, shift=3))
    found = expected_gradient(algo, RAGGED, POLICY, size=size, ref=REF, kl_coef=COEF, old_value=values)
    close(found, RAGGED.loss_gradient(POLICY) + sequence_kl())


def test_k2_of_the_summed_difference_has_the_gradient_of_the_sequence_kl_too() -> None:
    d = sequence_sum(RAGGED.logp(POLICY) - RAGGED.logp(REF), RAGGED.batch.mask)
    loss = BETA * (RAGGED.chance(POLICY).detach() * terms.ESTIMATORS["k2"](d)).sum()
    close(gradient(loss, POLICY), sequence_kl())


def in_reward(estimator: str) -> Tensor:
    """The gradient that the refused setting would have."""
    algo = replace(reinforce(beta=BETA), credit=partial(credit.reward_to_go, kl=estimator))
    ref_kl = RAGGED.at(kl(POLICY, REF)).detach()
    return expected_gradient(algo, SILENT, POLICY, ref=REF, kl_coef=COEF, ref_kl=ref_kl)


def test_the_exact_kl_in_the_reward_is_the_future_alone_and_is_refused() -> None:
    # it is the same for every action of a state, so it lacks exactly what the exact KL in the loss has
    close(in_reward("exact") + penalty("exact"), sequence_kl())
    with pytest.raises(HoneError, match="only k1"):
        grpo(beta=BETA, kl="reward:exact")


@pytest.mark.parametrize(("estimator", "angle"), [("k2", 0.9366667763), ("k3", 0.8787128748)])
def test_k2_and_k3_in_the_reward_have_another_gradient_and_are_refused(estimator: str, angle: float) -> None:
    close(in_reward("k1"), sequence_kl())
    assert cosine(in_reward(estimator), sequence_kl()) == pytest.approx(angle, abs=1e-9)
    with pytest.raises(HoneError, match="only k1"):
        grpo(beta=BETA, kl=f"reward:{estimator}")


def test_k2_and_k3_in_the_reward_make_what_is_too_rare_rarer_still() -> None:
    d = RAGGED.logp(POLICY).detach() - RAGGED.logp(REF)
    last = RAGGED.batch.mask & (RAGGED.age() == 2)
    n, t = divmod(int(torch.where(last, d, 9.0).argmin()), d.shape[1])  # no token after it: its own cost is all
    cell = (int(RAGGED.state[n, t]), int(RAGGED.batch.targets[n, t]))
    assert d[n, t] < 0
    assert in_reward("k1")[cell] < 0, "descent must raise it"
    assert in_reward("k2")[cell] > 0
    assert in_reward("k3")[cell] > 0


def test_off_policy_k1_in_the_reward_is_the_kl_to_the_reference_less_the_kl_to_the_old_policy() -> None:
    # the reward holds log(old/ref): E_pi[log old/ref] = KL(pi || ref) - KL(pi || old)
    ratio = partial(terms.ratio_gradient, ratio=terms.trajectory_ratio)
    algo = Algorithm(loss=((1.0, ratio),), credit=partial(credit.leave_one_out, kl="k1"), weigh=row_mean)
    found = expected_gradient(algo, SILENT, POLICY, size=2, sampler=OLD, ref=REF, kl_coef=COEF)
    chance, log_old = RAGGED.chance(POLICY), RAGGED.logp(OLD).sum(-1)
    to_old = BETA * gradient((chance * (chance.log() - log_old)).sum(), POLICY)
    close(found, sequence_kl() - to_old)
