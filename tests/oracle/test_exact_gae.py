"""GAE against its definition written out, for every mask of eight tokens."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from each import each
from torch import Tensor
from world import close, wave

from hone.algo import a2c, credit, ppo
from hone.algo.prefer import last_value
from hone.algo.table import assign_credit
from hone.types import ABSENT, Batch, Forward

torch.set_num_threads(1)
WIDTH = 8
MASKS = torch.tensor([m for m in itertools.product([False, True], repeat=WIDTH) if any(m)])
ROWS = len(MASKS)
DISCOUNTS = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.5, 1.0), (0.0, 0.5), (1.0, 0.0)]


def every_mask() -> Batch:
    """Rows of eight tokens and the input after them, every third one truncated; rubbish wherever nothing is acted."""
    mask = torch.cat([MASKS, torch.zeros(ROWS, 1, dtype=torch.bool)], dim=-1)
    shape = (ROWS, WIDTH + 1)
    real = torch.ones(shape, dtype=torch.bool)
    truncated = torch.arange(ROWS) % 3 == 0
    value = torch.where(mask, wave(*shape, shift=1), 1e6)
    value[:, -1] = wave(ROWS, shift=2)  # the value after the last token
    step = torch.where(wave(*shape, shift=3) > 0.2, wave(*shape, shift=4), torch.nan)
    batch = Batch(
        inputs=mask.long(), targets=mask.long(), mask=mask, real=real, group=torch.arange(ROWS),
        reward=wave(ROWS, shift=5), valid=torch.ones(ROWS, dtype=torch.bool), truncated=truncated,
        step_reward=torch.where(mask, step, 1e7), old_value=value, kl_coef=torch.full((ROWS,), 0.3).double(),
        old_logp=torch.where(mask, wave(*shape, shift=6), -1e8), ref_logp=torch.where(mask, wave(*shape, shift=7), 1e8),
    )  # fmt: skip
    return replace(batch, bootstrap=torch.where(truncated, last_value(Forward(value=value), batch), 0.0))


BATCH = every_mask()


def episode(batch: Batch, row: int, kl: bool) -> tuple[list[int], list[float], list[float]]:
    """Positions of the acted tokens, their rewards, and the values before each and after the last."""
    at = [t for t in range(WIDTH + 1) if batch.mask[row, t]]
    rewards = [0.0 if batch.step_reward is ABSENT else float(batch.step_reward[row, t].nan_to_num(0.0)) for t in at]
    rewards[-1] += float(batch.reward[row])
    if kl:
        costs = [float(batch.kl_coef[row] * (batch.old_logp[row, t] - batch.ref_logp[row, t])) for t in at]
        rewards = [r - c for r, c in zip(rewards, costs, strict=True)]
    behind = 0.0 if batch.bootstrap is ABSENT else float(batch.bootstrap[row])
    values = [0.0 if batch.old_value is ABSENT else float(batch.old_value[row, t]) for t in at]
    return at, rewards, [*values, behind]


def by_td_errors(batch: Batch, *, gamma: float, lam: float, kl: bool = False) -> Tensor:
    """A_t = sum_l (gamma lam)^l delta_{t+l}"""
    out = torch.zeros(ROWS, WIDTH + 1, dtype=torch.float64)
    for row in range(ROWS):
        at, r, v = episode(batch, row, kl)
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(at))]
        for i, t in enumerate(at):
            out[row, t] = math.fsum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(at)))
    return out


def by_n_step_returns(batch: Batch, *, gamma: float, lam: float) -> Tensor:
    """A_t = (1-lam) sum_n lam^(n-1) G_t^(n) + lam^(N-1) G_t^(N) - V_t, G^(n) the n-step return and N the last one."""
    out = torch.zeros(ROWS, WIDTH + 1, dtype=torch.float64)
    for row in range(ROWS):
        at, r, v = episode(batch, row, False)
        for i, t in enumerate(at):
            left = len(at) - i
            n_step = [
                math.fsum(gamma**k * r[i + k] for k in range(n)) + gamma**n * v[i + n] for n in range(1, left + 1)
            ]
            mixed = math.fsum((1 - lam) * lam ** (n - 1) * n_step[n - 1] for n in range(1, left))
            out[row, t] = mixed + lam ** (left - 1) * n_step[-1] - v[i]
    return out


def test_there_is_a_row_for_every_mask() -> None:
    assert ROWS == 255
    assert BATCH.bootstrap.count_nonzero() == 85


@each(("gamma", "lam"), DISCOUNTS)
@each("missing", [(), ("bootstrap",), ("step_reward",), ("old_value",), ("old_value", "bootstrap")])
def test_gae_is_the_sum_of_td_errors_for_every_mask(gamma: float, lam: float, missing: tuple[str, ...]) -> None:
    batch = replace(BATCH, **dict.fromkeys(missing, ABSENT))
    close(credit.gae(batch, gamma=gamma, lam=lam), by_td_errors(batch, gamma=gamma, lam=lam))


@each(("gamma", "lam"), DISCOUNTS)
def test_gae_is_the_mixture_of_n_step_returns_for_every_mask(gamma: float, lam: float) -> None:
    close(credit.gae(BATCH, gamma=gamma, lam=lam), by_n_step_returns(BATCH, gamma=gamma, lam=lam))


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS[:3])
def test_the_kl_is_charged_token_by_token_for_every_mask(gamma: float, lam: float) -> None:
    expected = by_td_errors(BATCH, gamma=gamma, lam=lam, kl=True)
    close(credit.gae(BATCH, gamma=gamma, lam=lam, kl="k1"), expected)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5, 0.0])
def test_reward_to_go_is_the_discounted_sum_from_the_token_on_for_every_mask(gamma: float) -> None:
    baseline = wave(ROWS, shift=8)
    expected = torch.zeros(ROWS, WIDTH + 1, dtype=torch.float64)
    for row in range(ROWS):
        at, r, _ = episode(BATCH, row, False)
        for i, t in enumerate(at):
            expected[row, t] = math.fsum(gamma ** (k - i) * r[k] for k in range(i, len(at)))
    close(credit.reward_to_go(BATCH, gamma=gamma), expected)
    less = torch.where(BATCH.mask, expected - baseline[:, None], 0.0)
    close(credit.reward_to_go(replace(BATCH, baseline=baseline), gamma=gamma), less)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lam_one_the_critics_target_is_the_return_and_what_lies_behind_for_every_mask(gamma: float) -> None:
    # G_t + gamma^(acted tokens from t on) V(s_{T+1}) where the row was cut off
    left = BATCH.mask.flip(-1).cumsum(-1).flip(-1)
    expected = credit.reward_to_go(BATCH, gamma=gamma) + gamma ** left.double() * BATCH.bootstrap[:, None]
    for algo in (ppo(gamma=gamma, lam=1.0, bootstrap=True), a2c(gamma=gamma, bootstrap=True)):
        found = assign_credit(BATCH, algo)
        close(found.returns[BATCH.mask], expected[BATCH.mask])


def test_the_credit_of_ppo_is_gae_with_its_own_discounts() -> None:
    expected = by_td_errors(BATCH, gamma=0.9, lam=0.7)
    close(assign_credit(BATCH, replace(ppo(gamma=0.9, lam=0.7), whiten=False)).adv, expected)
    close(assign_credit(BATCH, a2c(gamma=0.9, lam=0.7)).adv, expected)


def test_where_everything_earns_what_was_expected_no_advantage_is_left() -> None:
    # each token earns 1 and V is how many are left
    left = BATCH.mask.flip(-1).cumsum(-1).flip(-1).double()
    steps = torch.where(BATCH.mask, 1.0, torch.nan).double()
    batch = replace(BATCH, step_reward=steps, reward=torch.zeros(ROWS).double(), old_value=left, bootstrap=ABSENT)
    for gae in (partial(credit.gae, lam=lam) for lam in (0.0, 0.5, 1.0)):
        close(gae(batch), torch.zeros_like(left))
