"""The KL-regularised optimum, pi* = ref exp(r / beta) / Z: DPO, policy gradients and Q-learning all get there."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor
from world import RAGGED, close, coefficient, expected_gradient, gradient, visits, wave, weighed

from hone.algo import Algorithm, assign_credit, dpo, klq, objective, reinforce, rloo
from hone.algo.prefer import reference_gain
from hone.types import Batch, Forward

torch.set_num_threads(1)
BETA = 0.7
REF = RAGGED.policy(2.0).detach()
REWARD = RAGGED.rewards().sum(-1)
COEF = coefficient(RAGGED, BETA)


def optimum(reward: Tensor = REWARD) -> Tensor:
    """ref(y) exp(r(y) / beta) / Z of each trajectory, [N]"""
    return (RAGGED.chance(REF).log() + reward / BETA).softmax(-1)


def newton(loss: Callable[[Tensor], Tensor], x: Tensor, *, steps: int = 40) -> Tensor:
    """The minimum, by damped Newton steps; directions along which the loss is flat stay as they are."""
    x = x.detach()
    for _ in range(steps):
        g = torch.autograd.functional.jacobian(loss, x).flatten()
        h = cast(Tensor, torch.autograd.functional.hessian(loss, x)).reshape(len(g), len(g))
        size, basis = torch.linalg.eigh(h)
        along = (basis.T @ g) / size.abs().clamp(min=1e-8)
        step = -(basis @ torch.where(size.abs() > 1e-9, along, 0.0)).view_as(x)
        now, scale = loss(x), 1.0
        while loss(x + scale * step) > now + 1e-15 and scale > 1e-6:
            scale /= 2
        x = x + scale * step
        if g.norm() < 1e-14:
            break
    return x


# --- preferences ---


def all_pairs() -> tuple[Batch, Tensor]:
    """Every ordered pair, chosen first, weighed by its Bradley-Terry probability; and which trajectories they are."""
    n = len(RAGGED.batch)
    chosen, rejected = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    keep = chosen != rejected
    index = torch.stack([chosen[keep], rejected[keep]], dim=-1)
    told = (REWARD[index[:, 0]] - REWARD[index[:, 1]]).sigmoid()
    shown = RAGGED.chance(RAGGED.policy(4.0)).detach()[index].prod(-1)  # any sampler that shows everything
    weight = (shown * told / (shown * told).sum()).repeat_interleave(2) / 2
    batch = replace(RAGGED.batch, ref_logp=RAGGED.logp(REF)).rows(index.flatten())
    batch = replace(batch, row_weight=weight, token_weight=torch.zeros_like(batch.ref_logp))
    return batch, index.flatten()


def dpo_optimum(algo: Algorithm, start: Tensor) -> Tensor:
    batch, index = all_pairs()
    return newton(lambda logits: objective(Forward(logp=RAGGED.logp(logits)[index]), batch, algo.loss), start)


@pytest.fixture(scope="module")
def by_dpo() -> Tensor:
    return dpo_optimum(dpo(beta=BETA), REF)


def test_dpo_on_all_pairs_reaches_the_optimum(by_dpo: Tensor) -> None:
    close(RAGGED.chance(by_dpo), optimum())


def test_dpos_implicit_reward_is_the_reward_but_for_a_constant(by_dpo: Tensor) -> None:
    batch = replace(RAGGED.batch, ref_logp=RAGGED.logp(REF))
    implicit = BETA * reference_gain(Forward(logp=RAGGED.logp(by_dpo)), batch)
    close(implicit - implicit[0], REWARD - REWARD[0], atol=1e-9)


def test_smoothed_labels_move_the_optimum() -> None:
    # the margin that a share e of wrong labels leaves: logit((1-e) p + e (1-p)), nearer to 0 than the reward's
    found, ref = RAGGED.chance(dpo_optimum(dpo(beta=BETA, smoothing=0.1), REF)), RAGGED.chance(REF)
    assert float((found - optimum()).abs().sum()) == pytest.approx(0.279634, abs=1e-6)
    assert (found * (found / ref).log()).sum() < (optimum() * (optimum() / ref).log()).sum()


# --- policy gradients with the KL in the reward ---


def natural_step(algo: Algorithm, logits: Tensor, size: int) -> Tensor:
    """One natural-gradient step of length 1 / beta: the gradient at (s, a) is -d(s) pi(a|s) A(s, a)."""
    found = expected_gradient(algo, RAGGED, logits, size=size, ref=REF, kl_coef=COEF)
    once = torch.ones(RAGGED.states, dtype=torch.float64, requires_grad=True)
    reached = gradient(visits(RAGGED, logits, once), once)  # d(s)
    adv = -found / (reached[:, None] * logits.detach().softmax(-1))
    return (logits.detach() + adv / BETA).requires_grad_()


def by_policy_gradient(algo: Algorithm, size: int, steps: int = 4) -> Tensor:
    """The last state is right after one step, the one before it after two."""
    logits = RAGGED.policy(1.0)
    for _ in range(steps):
        logits = natural_step(algo, logits, size)
    return logits


ALGOS = [(reinforce(beta=BETA), 1), (rloo(beta=BETA), 2)]


@pytest.mark.parametrize(("algo", "size"), ALGOS, ids=["reinforce", "rloo"])
def test_regularised_policy_gradients_reach_the_optimum_and_rest_there(algo: Algorithm, size: int) -> None:
    logits = by_policy_gradient(algo, size)
    close(RAGGED.chance(logits), optimum())
    rest = expected_gradient(algo, RAGGED, logits, size=size, ref=REF, kl_coef=COEF)
    close(rest, torch.zeros_like(rest))
    moved = expected_gradient(algo, RAGGED, RAGGED.policy(1.0), size=size, ref=REF, kl_coef=COEF)
    assert moved.norm() > 0.1


@pytest.mark.parametrize(("algo", "size"), ALGOS, ids=["reinforce", "rloo"])
def test_dpo_and_policy_gradients_agree(algo: Algorithm, size: int, by_dpo: Tensor) -> None:
    close(by_policy_gradient(algo, size).softmax(-1), by_dpo.softmax(-1), atol=1e-9)


def test_the_optimum_is_worth_beta_log_z() -> None:
    logits = by_policy_gradient(reinforce(beta=BETA), 1).detach()
    cost = BETA * (RAGGED.logp(logits) - RAGGED.logp(REF))
    log_z = (RAGGED.chance(REF).log() + REWARD / BETA).logsumexp(-1)
    close(RAGGED.gain(logits, cost=cost), BETA * log_z)


# --- KL-regularised Q-learning ---


def q_loss(flat: Tensor, batch: Batch, algo: Algorithm) -> Tensor:
    logits, values = flat[:, :-1], flat[:, -1]
    return objective(Forward(logp=RAGGED.logp(logits), value=RAGGED.at(values)), batch, algo.loss)


def annotated(flat: Tensor, algo: Algorithm) -> Batch:
    """Samples of the policy as it is, with the lambda-returns of its own critic."""
    logits, values = flat[:, :-1], flat[:, -1]
    batch = replace(
        RAGGED.batch, old_logp=RAGGED.logp(logits), ref_logp=RAGGED.logp(REF), kl_coef=COEF, old_value=RAGGED.at(values)
    )
    return weighed(assign_credit(batch, algo), algo, 1, RAGGED.chance(logits))


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_q_learning_reaches_the_optimum_and_rests_there(lam: float) -> None:
    algo = klq(beta=BETA, lam=lam)
    flat = torch.cat([RAGGED.policy(1.0).detach(), wave(RAGGED.states, 1, shift=3)], dim=-1)
    for _ in range(4):  # the last state is right after one regression, the one before it after two
        batch = annotated(flat, algo)
        flat = newton(lambda x, b=batch: q_loss(x, b, algo), flat)
    close(RAGGED.chance(flat[:, :-1]), optimum(), atol=1e-9)
    log_z = (RAGGED.chance(REF).log() + REWARD / BETA).logsumexp(-1)
    assert float(flat[0, -1]) == pytest.approx(float(BETA * log_z), abs=1e-9)
    rest = annotated(flat, algo)
    assert float(q_loss(flat, rest, algo)) == pytest.approx(0.0, abs=1e-14)


def test_at_the_optimum_every_single_q_error_is_zero_for_every_lam() -> None:
    logits = by_policy_gradient(reinforce(beta=BETA), 1).detach()
    cost = BETA * (RAGGED.logp(logits) - RAGGED.logp(REF))
    values = RAGGED.value(logits, cost=cost)
    for lam in (0.0, 0.5, 1.0):
        algo = klq(beta=BETA, lam=lam)
        batch = annotated(torch.cat([logits, values[:, None]], dim=-1), algo)
        term = algo.loss[0][1](Forward(logp=RAGGED.logp(logits), value=RAGGED.at(values)), batch)
        close(term[batch.mask], torch.zeros_like(term[batch.mask]), atol=1e-18)
