"""What the methods rest on: the best baseline, the performance difference, TRPO's bound and the clip's."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from world import RAGGED, close, expected_gradient, gradient, kl, wave

from hone.algo import a2c, credit, objective, ppo, reinforce_baseline, terms, trpo
from hone.algo.table import assign_credit
from hone.algo.weight import Totals, row_sum, weigh
from hone.types import ABSENT, Batch, Forward

torch.set_num_threads(1)
POLICY = RAGGED.policy(1.0)
OUTCOME = replace(RAGGED, batch=replace(RAGGED.batch, step_reward=ABSENT))
OTHERS = [RAGGED.policy(shift).detach() for shift in range(2, 9)]
NEARBY = [POLICY.detach() + s * wave(RAGGED.states, 3, shift=k) for s in (1e-3, 0.1, 0.4) for k in range(4)]


# --- the variance-optimal baseline ---


def row_gradients(baseline: float) -> Tensor:
    """The gradient that REINFORCE with this baseline takes from each trajectory alone, [N, parameters]."""
    algo, found = reinforce_baseline(), []
    for n in range(15):
        batch = OUTCOME.batch.rows(slice(n, n + 1))
        batch = replace(batch, baseline=torch.tensor([baseline], dtype=torch.float64))
        batch = weigh(assign_credit(batch, algo), algo.weigh, Totals(rows=1, tokens=3))
        logp = OUTCOME.logp(POLICY)[n : n + 1]
        found.append(gradient(objective(Forward(logp=logp), batch, algo.loss), POLICY).flatten())
    return torch.stack(found)


def variance(baseline: float) -> float:
    """E|g|^2 - |E g|^2"""
    g, p = row_gradients(baseline), OUTCOME.chance(POLICY).detach()
    return float((p * g.square().sum(-1)).sum() - (p[:, None] * g).sum(0).square().sum())


def test_the_best_baseline_weighs_returns_by_the_squared_length_of_the_score() -> None:
    # Var(b) = E[|s|^2 (R - b)^2] - |grad J|^2 is a parabola: E|s|^2 (b - b*)^2 above its least value
    score = row_gradients(0.0) / -OUTCOME.batch.reward[:, None]
    length, p = score.square().sum(-1), OUTCOME.chance(POLICY).detach()
    best = float((p * length * OUTCOME.batch.reward).sum() / (p * length).sum())
    mean = float((p * OUTCOME.batch.reward).sum())
    least = variance(best)
    for b in (best + 1, best - 1, best + 1e-2, best - 1e-2, mean, 0.0, 5.0):
        assert variance(b) - least == pytest.approx(float((p * length).sum()) * (b - best) ** 2, abs=1e-9)
    assert variance(mean) > least + 1e-4  # the mean reward is not the best one


def test_no_baseline_moves_the_mean_of_those_gradients() -> None:
    p = OUTCOME.chance(POLICY).detach()[:, None]
    for b in (0.0, 0.3, -7.0):
        close((p * row_gradients(b)).sum(0).view_as(POLICY), OUTCOME.loss_gradient(POLICY))


# --- performance difference ---


def advantage(gamma: float) -> Tensor:
    """A(s, a) of POLICY at each acted token: the TD error of its true value function, by the real GAE."""
    batch = replace(RAGGED.batch, old_value=RAGGED.at(RAGGED.value(POLICY, gamma=gamma)))
    return credit.gae(batch, gamma=gamma, lam=0.0)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
def test_a_policys_gain_on_another_is_the_others_advantage_along_its_own_path(gamma: float) -> None:
    along = (advantage(gamma) * gamma ** RAGGED.age()).sum(-1)
    for new in (*OTHERS, *NEARBY):
        difference = RAGGED.gain(new, gamma=gamma) - RAGGED.gain(POLICY, gamma=gamma)
        close((RAGGED.chance(new) * along).sum(), difference)
    close((RAGGED.chance(POLICY) * along).sum(), torch.tensor(0.0).double())


# --- surrogates ---


def annotated(gamma: float) -> Batch:
    return replace(RAGGED.batch, adv=advantage(gamma), old_logp=RAGGED.logp(POLICY).detach())


def surrogate(term: terms.Term, new: Tensor, gamma: float) -> Tensor:
    """J(old) + E_old[sum_k gamma^k (-term)]: states from pi_old, actions by ratio."""
    gain = -term(Forward(logp=RAGGED.logp(new)), annotated(gamma)) * gamma ** RAGGED.age()
    inside = (RAGGED.chance(POLICY) * torch.where(RAGGED.batch.mask, gain, 0.0).sum(-1)).sum()
    return (RAGGED.gain(POLICY, gamma=gamma) + inside).detach()


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99])
def test_the_return_is_never_below_trpos_bound(gamma: float) -> None:
    # J(new) >= L(new) - C max_s KL(old || new), C = 4 eps gamma / (1 - gamma)^2, eps = max |A|
    c = 4 * float(advantage(gamma).abs().max()) * gamma / (1 - gamma) ** 2
    below = 0
    for new in (*OTHERS, *NEARBY):
        level, true = surrogate(terms.ratio_gradient, new, gamma), RAGGED.gain(new, gamma=gamma)
        assert true >= level - c * kl(POLICY, new).max()
        below += bool(true < level - 1e-9)
    assert below, "the surrogate alone is no bound: some policy falls short of it"


def test_the_surrogate_touches_the_return_at_the_old_policy() -> None:
    # value and gradient agree there, so the distance grows with the square of the step
    gamma = 0.9
    close(surrogate(terms.ratio_gradient, POLICY, gamma), RAGGED.gain(POLICY, gamma=gamma).detach())
    direction = wave(RAGGED.states, 3, shift=9)
    gaps = []
    for scale in (1e-2, 5e-3):
        new = POLICY.detach() + scale * direction
        gaps.append(float(surrogate(terms.ratio_gradient, new, gamma) - RAGGED.gain(new, gamma=gamma)))
    assert gaps[0] / gaps[1] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("term", [terms.ratio_gradient, terms.clipped, partial(terms.clipped, low=0.1, high=0.3)])
def test_at_the_old_policy_the_surrogates_gradient_is_the_policy_gradient(term: terms.Term) -> None:
    algo = replace(a2c(entropy=0.0, lam=0.0), loss=((1.0, term),), weigh=row_sum)
    values = RAGGED.at(RAGGED.value(POLICY))
    close(expected_gradient(algo, RAGGED, POLICY, old_value=values), RAGGED.loss_gradient(POLICY))


@pytest.mark.parametrize("clip", [0.05, 0.2, 0.9])
def test_the_clipped_surrogate_is_a_lower_bound_of_the_unclipped_one(clip: float) -> None:
    clipped, batch = ppo(clip=clip).loss[0][1], annotated(1.0)
    strict = 0
    for new in (*OTHERS, *NEARBY):
        fwd = Forward(logp=RAGGED.logp(new))
        low, high = -clipped(fwd, batch), -trpo().loss[0][1](fwd, batch)
        assert (low <= high).all()
        strict += bool(surrogate(clipped, new, 1.0) < surrogate(terms.ratio_gradient, new, 1.0))
    assert strict > len(OTHERS) / 2
    same = Forward(logp=RAGGED.logp(POLICY).detach())
    assert clipped(same, batch).equal(terms.ratio_gradient(same, batch))


def test_a_dual_clip_bounds_the_loss_of_a_bad_token_and_is_no_lower_bound() -> None:
    batch, above = annotated(1.0), 0
    for new in OTHERS:
        fwd = Forward(logp=RAGGED.logp(new))
        loss = terms.clipped(fwd, batch, dual=1.5)
        above += int((loss < terms.ratio_gradient(fwd, batch) - 1e-9).sum())
        assert (loss <= -1.5 * batch.adv + 1e-12)[batch.adv < 0].all()
        assert (loss <= terms.clipped(fwd, batch)).all()
    assert above
