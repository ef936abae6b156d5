"""The expected gradient of each method is the gradient of the expected return, or off by a stated bias."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from each import each
from torch import Tensor
from world import (
    RAGGED,
    SQUARE,
    close,
    coefficient,
    credited,
    error,
    expected_gradient,
    gradient,
    row_return,
    visits,
    wave,
    weighed,
)

from hone.algo import Algorithm, a2c, credit, objective, ppo, ppo_penalty, reinforce, reinforce_baseline, terms, trpo
from hone.algo.weight import row_mean, row_sum
from hone.types import Forward

torch.set_num_threads(1)
POLICY, SQUARE_POLICY = RAGGED.policy(1.0), SQUARE.policy(1.0)


def test_the_world_has_every_trajectory() -> None:
    assert len(RAGGED.batch) == 15
    assert len(SQUARE.batch) == 9
    assert RAGGED.batch.mask.sum(-1).unique().tolist() == [1, 2, 3]
    assert RAGGED.batch.truncated.sum() == 8
    for world, policy in ((RAGGED, POLICY), (SQUARE, SQUARE_POLICY)):
        close(world.chance(policy).sum(), torch.tensor(1.0).double())
        assert gradient(world.gain(policy), policy).norm() > 0.1


# --- REINFORCE ---


def test_reinforce_is_unbiased() -> None:
    close(expected_gradient(reinforce(), RAGGED, POLICY), RAGGED.loss_gradient(POLICY))


def test_the_whole_return_and_the_return_to_go_have_the_same_expected_gradient() -> None:
    # rewards before a token have no part in its gradient's mean, only in its variance
    whole = replace(reinforce(), credit=row_return)
    found = expected_gradient(whole, RAGGED, POLICY)
    close(found, expected_gradient(reinforce(), RAGGED, POLICY))
    assert not torch.allclose(credit.reward_to_go(RAGGED.batch), row_return(RAGGED.batch))


@pytest.mark.parametrize("baseline", [0.0, 5.0, -3.25, 1e3])
def test_a_baseline_of_the_prompt_does_not_change_the_mean(baseline: float) -> None:
    column = torch.full((15,), baseline, dtype=torch.float64)
    found = expected_gradient(reinforce_baseline(), RAGGED, POLICY, baseline=column)
    close(found, RAGGED.loss_gradient(POLICY))


@each("shift", range(6))
def test_a_baseline_of_the_state_does_not_change_the_mean(shift: int) -> None:
    values = RAGGED.at(10 * wave(RAGGED.states, shift=shift))
    algo = replace(a2c(lam=1.0, entropy=0.0), weigh=row_sum)
    close(expected_gradient(algo, RAGGED, POLICY, old_value=values), RAGGED.loss_gradient(POLICY))


def test_a_baseline_of_the_action_does() -> None:
    values = torch.where(RAGGED.batch.mask, wave(15, 6, shift=2), 0.0)
    algo = replace(a2c(lam=1.0, entropy=0.0), weigh=row_sum)
    found, true = expected_gradient(algo, RAGGED, POLICY, old_value=values), RAGGED.loss_gradient(POLICY)
    assert error(found, true) > 0.1


def test_a_discount_is_short_of_gamma_to_the_age_of_the_token() -> None:
    # the gradient of E[sum gamma^k r_k] weighs token k by gamma^k, which nobody's implementation does
    gamma = 0.8
    true = RAGGED.loss_gradient(POLICY, gamma=gamma)
    found = expected_gradient(reinforce(gamma=gamma), RAGGED, POLICY)
    assert error(found, true) == pytest.approx(0.0929561776, abs=1e-9)
    aged = expected_gradient(
        reinforce(gamma=gamma), RAGGED, POLICY, correct=lambda b: gamma ** (b.mask.cumsum(-1) - 1).double()
    )
    close(aged, true)


# --- actor and critic ---


@each("lam", [0.0, 0.5, 0.95, 1.0])
@each("bootstrap", [False, True])
def test_a2c_with_the_true_value_function_is_unbiased_for_every_lam(lam: float, bootstrap: bool) -> None:
    # bootstrapped, what lies behind a truncated row's last token is part of what is maximised
    behind = torch.where(RAGGED.batch.truncated, wave(15, shift=4), 0.0) if bootstrap else torch.zeros(15).double()
    world = replace(RAGGED, batch=replace(RAGGED.batch, reward=RAGGED.batch.reward + behind))
    true, values = world.loss_gradient(POLICY), RAGGED.at(world.value(POLICY))
    algo = replace(a2c(lam=lam, entropy=0.0, bootstrap=bootstrap), weigh=row_sum)
    close(expected_gradient(algo, RAGGED, POLICY, old_value=values, bootstrap=behind), true)


def test_with_a_wrong_critic_the_bias_grows_as_lam_falls() -> None:
    true, values = RAGGED.loss_gradient(POLICY), RAGGED.at(RAGGED.value(POLICY) + wave(RAGGED.states, shift=3))
    errors = []
    for lam in (1.0, 0.95, 0.5, 0.0):
        algo = replace(a2c(lam=lam, entropy=0.0), weigh=row_sum)
        errors.append(error(expected_gradient(algo, RAGGED, POLICY, old_value=values), true))
    assert errors == pytest.approx([0.0, 0.0532657679, 0.5223032635, 1.0245341853], abs=1e-9)


@pytest.mark.parametrize("weight", [0.3, 2.0])
def test_the_entropy_bonus_has_the_gradient_of_each_states_entropy(weight: float) -> None:
    # with the states held fixed, as for a KL in the loss
    algo = replace(a2c(entropy=weight), weigh=row_sum)
    log = POLICY.log_softmax(-1)
    bonus = gradient(weight * visits(RAGGED, POLICY, -(log.exp() * log).sum(-1)), POLICY)
    found = expected_gradient(algo, RAGGED, POLICY, old_value=RAGGED.at(wave(RAGGED.states)))
    close(found, RAGGED.loss_gradient(POLICY) - bonus)


@pytest.mark.parametrize(("lam", "share"), [(0.0, 0.5), (0.9, 0.5), (1.0, 2.0)])
def test_the_critic_is_drawn_to_the_true_value_function_and_rests_there(lam: float, share: float) -> None:
    true, chance = RAGGED.value(POLICY), RAGGED.chance(POLICY).detach()
    algo = replace(a2c(lam=lam, value=share), weigh=row_sum)
    for critic in (true, true + wave(RAGGED.states, shift=4)):
        values = critic.clone().requires_grad_()
        batch = replace(RAGGED.batch, old_value=RAGGED.at(true))  # the targets' own critic is right
        batch = weighed(credited(batch, algo, 1), algo, 1, chance)
        found = gradient(objective(Forward(value=RAGGED.at(values)), batch, algo.loss[1:2]), values)
        pull = gradient(share * visits(RAGGED, POLICY, (values - true).square() / 2), values)
        close(found, pull)


ON_POLICY = {
    "a2c": a2c(entropy=0.0),
    "trpo": trpo(),
    "ppo": ppo(),
    "ppo_dual": ppo(dual=3.0),
    "ppo_penalty": ppo_penalty(),
    "ppo_penalty_exact": ppo_penalty(exact=True, beta=2.0),
}


@each("name", ON_POLICY)
def test_at_ratio_one_every_actor_critic_has_the_true_gradient_a_token(name: str) -> None:
    # two tokens a row, so the token mean is half of the row's sum; the penalty's gradient at pi_old is zero
    algo = replace(ON_POLICY[name], whiten=False)
    values, beta = SQUARE.at(SQUARE.value(SQUARE_POLICY)), coefficient(SQUARE, 2.0)
    for size in (1, 2):
        found = expected_gradient(algo, SQUARE, SQUARE_POLICY, size=size, old_value=values, kl_coef=beta)
        close(found, SQUARE.loss_gradient(SQUARE_POLICY) / 2)


SURROGATES = {
    "cpi": terms.ratio_gradient,
    "clipped": terms.clipped,
    "dual": partial(terms.clipped, dual=2.0),
    "cispo": terms.truncated,
}


@pytest.mark.parametrize("name", SURROGATES)
def test_at_ratio_one_every_surrogate_has_the_policy_gradients_gradient(name: str) -> None:
    algo = replace(reinforce(), loss=((1.0, SURROGATES[name]),))
    close(expected_gradient(algo, RAGGED, POLICY), RAGGED.loss_gradient(POLICY))


@pytest.mark.parametrize("term", [terms.ratio_gradient, terms.clipped])
def test_at_ratio_one_the_trajectorys_ratio_has_the_true_gradient_and_the_rows_that_of_a_mean(
    term: Callable[..., Tensor],
) -> None:
    # one ratio stands on each of the row's tokens, so the row mean counts it once; the geometric mean divides by length
    for ratio, weigh in ((terms.trajectory_ratio, row_sum), (terms.row_ratio, row_mean)):
        algo = Algorithm(loss=((1.0, partial(term, ratio=ratio)),), credit=row_return, weigh=row_mean)
        plain = Algorithm(loss=((1.0, terms.policy_gradient),), credit=row_return, weigh=weigh)
        close(expected_gradient(algo, RAGGED, POLICY), expected_gradient(plain, RAGGED, POLICY))
    algo = Algorithm(loss=((1.0, partial(term, ratio=terms.trajectory_ratio)),), credit=row_return, weigh=row_mean)
    close(expected_gradient(algo, RAGGED, POLICY), RAGGED.loss_gradient(POLICY))
