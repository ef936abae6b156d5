"""Potential-based shaping, r' = r + gamma Phi(s') - Phi(s), leaves the optimal policy and every advantage alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from each import each
from torch import Tensor
from world import RAGGED, TOKENS, World, close, error, expected_gradient, gradient, wave

from hone.algo import credit, dr_grpo, reinforce, rloo
from hone.types import Batch

torch.set_num_threads(1)
POLICY = RAGGED.policy(1.0)
PHI = 3 * wave(RAGGED.states, shift=6)  # of each state
BEHIND = wave(15, shift=8)  # Phi after the last token of each row, for those that were cut off


def next_potential(world: World, phi: Tensor, behind: Tensor) -> Tensor:
    """Phi(s') at each acted token: that of the next acted token's state, and `behind` after the last one."""
    out = torch.zeros_like(world.at(phi))
    for n, row in enumerate(world.batch.mask.tolist()):
        acted = [t for t, on in enumerate(row) if on]
        for t, after in itertools.pairwise(acted):
            out[n, t] = phi[world.state[n, after]]
        out[n, acted[-1]] = behind[n]
    return out


def shaped(world: World, gamma: float, *, behind: Tensor | None = None) -> World:
    """Phi is 0 behind the last token unless given."""
    behind = torch.zeros(len(world.batch)).double() if behind is None else behind
    extra = gamma * next_potential(world, PHI, behind) - world.at(PHI)
    steps = torch.where(world.batch.mask, world.batch.step_reward.nan_to_num(0.0) + extra, torch.nan)
    return replace(world, batch=replace(world.batch, step_reward=steps))


def returns_of_every_sure_policy(world: World, gamma: float) -> Tensor:
    """The discounted return of each policy that takes one action a state, [3^7]"""
    actions = torch.tensor(list(itertools.product(range(TOKENS), repeat=world.states)))
    takes = ((actions[:, world.state] == world.batch.targets) | ~world.batch.mask).all(-1)
    assert (takes.sum(-1) == 1).all()
    return takes.double() @ (world.rewards() * gamma ** world.age()).sum(-1)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
def test_every_policys_return_moves_by_the_first_states_potential_and_the_best_stays_the_best(gamma: float) -> None:
    before, after = (returns_of_every_sure_policy(w, gamma) for w in (RAGGED, shaped(RAGGED, gamma)))
    close(after, before - PHI[0])
    best = before > before.max() - 1e-9
    assert 0 < best.sum() < 3**7
    assert best.equal(after > after.max() - 1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_every_rows_discounted_sum_moves_by_the_first_states_potential(gamma: float) -> None:
    first = RAGGED.batch.mask.int().argmax(-1, keepdim=True)
    before, after = (
        credit.reward_to_go(w.batch, gamma=gamma).gather(-1, first) for w in (RAGGED, shaped(RAGGED, gamma))
    )
    close(after, before - PHI[0])


def test_the_expected_gradient_stays_and_the_advantages_do_not() -> None:
    # the return to go loses Phi(s_t), which is a baseline of the state
    other = shaped(RAGGED, 1.0)
    close(expected_gradient(reinforce(), other, POLICY), RAGGED.loss_gradient(POLICY))
    before, after = credit.reward_to_go(RAGGED.batch), credit.reward_to_go(other.batch)
    close(after, before - RAGGED.at(PHI))


def with_values(world: World, values: Tensor, bootstrap: Tensor) -> Batch:
    return replace(world.batch, old_value=world.at(values), bootstrap=bootstrap)


@each("lam", [0.0, 0.7, 1.0])
@each("gamma", [1.0, 0.9])
def test_a_truncated_state_keeps_its_potential_and_gae_sees_no_shaping_at_all(gamma: float, lam: float) -> None:
    # the value function of the shaped rewards is V - Phi, behind the last token too
    truncated = RAGGED.batch.truncated
    values, behind = wave(RAGGED.states, shift=2), torch.where(truncated, wave(15, shift=9), 0.0)
    phi_behind = torch.where(truncated, BEHIND, 0.0)
    plain = credit.gae(with_values(RAGGED, values, behind), gamma=gamma, lam=lam)
    other = with_values(shaped(RAGGED, gamma, behind=phi_behind), values - PHI, behind - phi_behind)
    close(credit.gae(other, gamma=gamma, lam=lam), plain)
    # taken for a finished one, its last token is wrong by gamma Phi(s_{T+1})
    wrong = with_values(shaped(RAGGED, gamma), values - PHI, behind - phi_behind)
    last = RAGGED.batch.mask & (RAGGED.batch.mask.flip(-1).cumsum(-1).flip(-1) == 1)
    off = (credit.gae(wrong, gamma=gamma, lam=lam) - plain)[last]
    close(off, -gamma * phi_behind)


def test_a_potential_that_is_not_zero_at_the_end_changes_what_is_best() -> None:
    other = shaped(RAGGED, 1.0, behind=3 * BEHIND)
    true, found = RAGGED.loss_gradient(POLICY), expected_gradient(reinforce(), other, POLICY)
    assert error(found, true) > 1
    extra = gradient(-(RAGGED.chance(POLICY) * 3 * BEHIND).sum(), POLICY)
    close(found, true + extra)  # it is an outcome reward


def test_summed_over_a_row_shaping_is_a_constant_of_the_group_and_does_nothing() -> None:
    other = shaped(RAGGED, 1.0)
    close(credit.row_rewards(other.batch), credit.row_rewards(RAGGED.batch) - PHI[0])
    for batch_credit in (credit.group_centred, credit.group_zscore, credit.leave_one_out):
        one_group = torch.zeros(15).long()
        before, after = (batch_credit(replace(w.batch, group=one_group)) for w in (RAGGED, other))
        close(after, before)
    for algo in (rloo(), dr_grpo()):
        before, after = (expected_gradient(algo, w, POLICY, size=2) for w in (RAGGED, other))
        close(after, before)
