"""Importance sampling: the exact expectation of each correction off policy, and the bias of those that truncate."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from world import RAGGED, close, cosine, error, expected_gradient, gradient, make, row_return

from hone.algo import Algorithm, cispo, credit, dapo, grpo, reinforce, terms
from hone.algo.weight import mismatch, row_mean

torch.set_num_threads(1)
POLICY, SAMPLER = RAGGED.policy(1.0), RAGGED.policy(5.0).detach()
TRUE = RAGGED.loss_gradient(POLICY)
ONE = make(limit=1, stops=False)  # one token: no state depends on an action
ONE_POLICY, ONE_SAMPLER = ONE.policy(1.0), ONE.policy(5.0).detach()
EARNED = ONE.rewards().sum(-1)  # by each token
CAP = 1.25


# --- pi / pi_old in the loss ---


def test_the_trajectorys_ratio_is_unbiased_off_policy() -> None:
    whole = partial(terms.ratio_gradient, ratio=terms.trajectory_ratio)
    algo = Algorithm(loss=((1.0, whole),), credit=row_return, weigh=row_mean)
    close(expected_gradient(algo, RAGGED, POLICY, sampler=SAMPLER), TRUE)
    loo = replace(algo, credit=credit.leave_one_out)
    close(expected_gradient(loo, RAGGED, POLICY, sampler=SAMPLER, size=2), TRUE)


def surrogate_gradient(sampler: Tensor) -> Tensor:
    """-grad of E[Q_sampler(s, a)] with states of the sampler and actions of POLICY: the CPI surrogate's."""
    values = RAGGED.value(sampler)
    q = RAGGED.rewards() + after(values)
    ratio = (RAGGED.logp(POLICY) - RAGGED.logp(sampler)).exp()
    inside = torch.where(RAGGED.batch.mask, ratio * q, 0.0).sum(-1)
    return gradient(-(RAGGED.chance(sampler).detach() * inside).sum(), POLICY)


def after(values: Tensor) -> Tensor:
    """V of the state that each acted token leads to, 0 behind the last one, [N, T]"""
    out = torch.zeros_like(RAGGED.at(values))
    for n, row in enumerate(RAGGED.batch.mask.tolist()):
        acted = [t for t, on in enumerate(row) if on]
        for t, following in itertools.pairwise(acted):
            out[n, t] = values[RAGGED.state[n, following]]
    return out


def test_the_tokens_ratio_corrects_the_action_and_neither_the_states_nor_what_follows() -> None:
    algo = replace(reinforce(), loss=((1.0, terms.ratio_gradient),))
    found = expected_gradient(algo, RAGGED, POLICY, sampler=SAMPLER)
    close(found, surrogate_gradient(SAMPLER))
    assert error(found, TRUE) == pytest.approx(0.2010550887, abs=1e-9)
    assert cosine(found, TRUE) == pytest.approx(0.9807114735, abs=1e-9)


def test_without_a_ratio_the_policy_gradient_is_not_the_true_one_off_policy() -> None:
    found = expected_gradient(reinforce(), RAGGED, POLICY, sampler=SAMPLER)
    assert error(found, TRUE) == pytest.approx(0.4698346440, abs=1e-9)


def test_the_rows_ratio_is_biased_off_policy() -> None:
    # the geometric mean is no density ratio; for rows of one token it is
    rows = partial(terms.ratio_gradient, ratio=terms.row_ratio)
    algo = Algorithm(loss=((1.0, rows),), credit=row_return, weigh=row_mean)
    mean = expected_gradient(replace(reinforce(), credit=row_return, weigh=row_mean), RAGGED, POLICY)
    found = expected_gradient(algo, RAGGED, POLICY, sampler=SAMPLER)
    assert error(found, mean) == pytest.approx(0.1509353314, abs=1e-9)
    close(expected_gradient(algo, ONE, ONE_POLICY, sampler=ONE_SAMPLER), ONE.loss_gradient(ONE_POLICY))


# --- truncated: each case as a sum over three tokens ---


def per_token(world_policy: Tensor, weight: Tensor) -> Tensor:
    """-sum_a weight(a) r(a) grad log pi(a), the expectation written out."""
    logp = world_policy.log_softmax(-1)[0]
    return gradient(-(weight * EARNED * logp).sum(), world_policy)


def ratio() -> tuple[Tensor, Tensor]:
    """pi / sampler and the sampler's probability of each token."""
    p, q = ONE_POLICY.detach().softmax(-1)[0], ONE_SAMPLER.softmax(-1)[0]
    return p / q, q


def test_the_world_of_one_token_is_capped_somewhere_and_not_everywhere() -> None:
    r, _ = ratio()
    assert 0 < (r > CAP).sum() < 3


@pytest.mark.parametrize("cap", [CAP, 100.0])
def test_truncated_is_the_true_gradient_less_what_lies_above_the_cap(cap: float) -> None:
    # E_q[min(r, c) f] = E_p[f] - E_q[(r - c)+ f]
    algo = replace(reinforce(), loss=((1.0, partial(terms.truncated, max_ratio=cap)),))
    found = expected_gradient(algo, ONE, ONE_POLICY, sampler=ONE_SAMPLER)
    r, q = ratio()
    excess = per_token(ONE_POLICY, q * (r - cap).clamp(min=0))
    close(found, ONE.loss_gradient(ONE_POLICY) - excess)
    if cap > float(r.max()):
        close(found, ONE.loss_gradient(ONE_POLICY))
    else:
        assert error(found, ONE.loss_gradient(ONE_POLICY)) == pytest.approx(0.1934260171, abs=1e-9)


def unclipped(r: Tensor, low: float, high: float) -> Tensor:
    """The ratio where the clip leaves the gradient alone, 0 where it cuts it off."""
    return torch.where((EARNED > 0) & (r > high) | (EARNED < 0) & (r < low), 0.0, r)


def test_cispo_caps_the_weight_and_the_clip_drops_the_token() -> None:
    r, q = ratio()
    for loss, kept in (
        (cispo(max_ratio=CAP).loss, r.clamp(max=CAP)),
        (grpo(clip=0.2, beta=0.0).loss, unclipped(r, 0.8, 1.2)),
        (dapo(low=0.1, high=0.9).loss, unclipped(r, 0.9, 1.9)),
        (dapo(low=0.3, high=0.1).loss, unclipped(r, 0.7, 1.1)),
    ):
        found = expected_gradient(replace(reinforce(), loss=loss), ONE, ONE_POLICY, sampler=ONE_SAMPLER)
        close(found, per_token(ONE_POLICY, q * kept))


# --- the sampler's mismatch: samples of pi_gen, learnt from as if they were pi_old's ---


def corrected(how: str, cap: float) -> Tensor:
    """REINFORCE's expected gradient in the world of one token, samples of ONE_SAMPLER corrected."""
    old, gen = ONE.logp(ONE_POLICY).detach(), ONE.logp(ONE_SAMPLER)
    correct = partial(mismatch, how=how, cap=cap)
    return expected_gradient(
        reinforce(), ONE, ONE_POLICY, sampler=ONE_SAMPLER, correct=correct, old_logp=old, gen_logp=gen
    )


def test_uncapped_the_correction_of_a_single_token_is_exact() -> None:
    close(corrected("truncate", 1e9), ONE.loss_gradient(ONE_POLICY))


@pytest.mark.parametrize(("how", "bias"), [("truncate", 0.1934260171), ("mask", 0.9326392227)])
def test_capped_it_is_biased_by_what_the_cap_takes_away(how: str, bias: float) -> None:
    r, q = ratio()
    kept = r.clamp(max=CAP) if how == "truncate" else ((r <= CAP) & (r >= 1 / CAP)).double()
    found = corrected(how, CAP)
    close(found, per_token(ONE_POLICY, q * kept))
    assert error(found, ONE.loss_gradient(ONE_POLICY)) == pytest.approx(bias, abs=1e-9)


def test_over_several_tokens_the_correction_leaves_the_states_and_the_future_to_the_sampler() -> None:
    old, gen = RAGGED.logp(POLICY).detach(), RAGGED.logp(SAMPLER)
    found = expected_gradient(
        reinforce(), RAGGED, POLICY, sampler=SAMPLER, correct=partial(mismatch, how="truncate", cap=1e9),
        old_logp=old, gen_logp=gen,
    )  # fmt: skip
    close(found, surrogate_gradient(SAMPLER))
    assert error(found, TRUE) == pytest.approx(0.2010550887, abs=1e-9)


@pytest.mark.parametrize("how", ["truncate", "mask"])
def test_a_sampler_that_agrees_is_left_alone(how: str) -> None:
    same = RAGGED.logp(POLICY).detach()
    correct = partial(mismatch, how=how, cap=CAP)
    close(expected_gradient(reinforce(), RAGGED, POLICY, correct=correct, gen_logp=same), TRUE)
