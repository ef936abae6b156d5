"""Rewards to advantages. Every function here takes the whole iteration's batch, so that a statistic of a group or of
the batch covers all of it.

Invalid rewards are left out of every statistic; a group with fewer than two valid rewards has advantage 0.
Advantages are 0 off the mask.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hone.algo.terms import ESTIMATORS
from hone.types import ABSENT, Batch, sequence_sum, to_device

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over ranks


def one_rank(x: Tensor) -> Tensor:
    """The sum over ranks when there is one rank."""
    return x


def reads_log_probs(how: Callable[[Batch], Tensor] | None) -> bool:
    """Whether a credit may read old_logp. One of this module does if the reward has a KL; any other one may."""
    settings = how.keywords if isinstance(how, partial) else {}
    return how is not None and (not is_builtin(how) or bool(settings.get("kl")))


def may_be_per_token(how: Callable[[Batch], Tensor] | None) -> bool:
    """Whether a credit may give tokens the return from there on: gae, reward_to_go, any from outside this module."""
    inner: Any = how.func if isinstance(how, partial) else how
    return inner in (gae, reward_to_go) or (inner is not None and not is_builtin(how))


def is_builtin(how: Any) -> bool:
    """Whether a credit is one of this module, whose columns are known."""
    inner: Any = how.func if isinstance(how, partial) else how
    return getattr(inner, "__module__", None) == __name__


# --- rewards ---


def kl_cost(batch: Batch, *, kl: str = "") -> Tensor:
    """kl_coef * KL(old || ref) at each trained token, by the named estimator; zeros for none, [B, T].

    On policy the rewards' gradient is that of the sequence's KL(pi || ref) for k1 only. Off policy, weighed by the
    trajectory's ratio, k1 has that of KL(pi || ref) - KL(pi || old), for it is of pi_old.
    """
    if not kl:
        return torch.zeros_like(batch.mask, dtype=batch.reward.dtype)
    d = batch.ref_kl if kl == "exact" else ESTIMATORS[kl](batch.old_logp - batch.ref_logp)
    return batch.kl_coef[:, None] * torch.where(batch.mask, d, 0.0)


def token_rewards(batch: Batch, *, kl: str = "") -> Tensor:
    """The reward on each row's last trained token, step rewards where steps end, less the KL cost, [B, T]."""
    last = batch.mask & (batch.mask.flip(-1).cumsum(-1).flip(-1) == 1)
    reward = torch.where(last, batch.reward[:, None], 0.0) - kl_cost(batch, kl=kl)
    if batch.step_reward is not ABSENT:
        reward = reward + torch.where(batch.mask, batch.step_reward.nan_to_num(0.0), 0.0)
    return reward


def row_rewards(batch: Batch, *, kl: str = "") -> Tensor:
    """The row's token rewards summed: outcome, steps and KL cost, [B]."""
    return sequence_sum(token_rewards(batch, kl=kl), batch.mask)


# --- one advantage a row ---


def _spread(per_row: Tensor, mask: Tensor) -> Tensor:
    """[B] -> [B, T], zero off the mask."""
    return torch.where(mask, per_row[:, None], 0.0)


def _group_mean(x: Tensor, batch: Batch, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of x over the valid rows of each row's group, and their number, both [B]."""
    # on the host: reading the number of groups from a GPU would wait for the forward passes that are queued there
    groups, index = cast(tuple[Tensor, Tensor], batch.host.group.unique(return_inverse=True))  # pyright: ignore
    index = to_device(index, x.device)
    # float64: the mean of equal float32 numbers is then exactly that number; a rounding error would look like signal
    zeros = x.new_zeros(len(groups), dtype=torch.float64)
    size = zeros.index_add(0, index, valid.double())
    total = zeros.index_add(0, index, torch.where(valid, x, 0.0).double())
    return (total / size.clamp(min=1))[index].to(x.dtype), size[index].to(x.dtype)


def _centred(batch: Batch, kl: str) -> tuple[Tensor, Tensor]:
    """Reward minus group mean, 0 where the group has no signal or the row is invalid; and the group's valid size."""
    reward = row_rewards(batch, kl=kl)
    mean, size = _group_mean(reward, batch, batch.valid)
    return torch.where(batch.valid & (size > 1), reward - mean, 0.0), size


def group_centred(batch: Batch, *, kl: str = "") -> Tensor:
    """A_i = R_i - mean(R)  (Dr. GRPO, REINFORCE++-baseline)

    The mean holds R_i itself, so the expected gradient is (n-1)/n of the policy gradient.
    """
    centred, _ = _centred(batch, kl)
    return _spread(centred, batch.mask)


def group_zscore(batch: Batch, *, kl: str = "", eps: float = 1e-4) -> Tensor:
    """A_i = (R_i - mean(R)) / (std(R) + eps), population std  (GRPO)

    Biased by the division. With rewards 0 and 1, p the chance of a 1, the expected gradient is the policy gradient
    times E[std] / (p (1-p)) for eps = 0: 1 in groups of two and 1.41 in groups of three, and towards 1 / sqrt(p (1-p))
    in large ones, so prompts that are nearly always right or wrong weigh more. With other rewards its direction
    differs, too.
    """
    centred, _ = _centred(batch, kl)
    var, _ = _group_mean(centred.square(), batch, batch.valid)
    return _spread(centred / (var.sqrt() + eps), batch.mask)


def leave_one_out(batch: Batch, *, kl: str = "") -> Tensor:
    """A_i = R_i - mean of the other rewards = n/(n-1) (R_i - mean)  (RLOO)"""
    centred, size = _centred(batch, kl)
    return _spread(centred * size / (size - 1).clamp(min=1), batch.mask)


def group_process(batch: Batch, *, eps: float = 1e-4) -> Tensor:
    """Step rewards standardised over all steps of the group, summed over the steps that end at or after the token.

    Biased: the mean is subtracted from every step, so that one more step of average reward adds nothing.
    """
    ends = batch.mask & batch.step_reward.isfinite()
    x = torch.where(ends, batch.step_reward, 0.0).double()  # see _group_mean
    count = ends.sum(-1).double()
    everyone = torch.ones_like(batch.group, dtype=torch.bool)
    steps, rows = _group_mean(count, batch, everyone)
    steps = steps * rows  # steps in the group
    total, _ = _group_mean(x.sum(-1), batch, everyone)
    mean = total * rows / steps.clamp(min=1)
    deviation = torch.where(ends, x - mean[:, None], 0.0)
    square, _ = _group_mean(deviation.square().sum(-1), batch, everyone)
    std = (square * rows / steps.clamp(min=1)).sqrt()
    z = torch.where((steps > 1)[:, None], deviation / (std + eps)[:, None], 0.0)
    return torch.where(batch.mask, z.flip(-1).cumsum(-1).flip(-1), 0.0).to(batch.step_reward.dtype)


def group_progress(batch: Batch, *, lam: float = 0.7) -> Tensor:
    """GAE over steps with the process model as value: V_j is the step reward at the end of step j  (GRPO, lam)

    delta_1 = V_1 - mean of the V_1 of the group's other rows, delta_j = V_j - V_{j-1}; each token of step j, and what
    follows the last step, has sum_l lam^l delta_{j+l}. With lam = 1, or true V, the policy gradient is unbiased.
    """
    ends = batch.mask & batch.step_reward.isfinite()
    before, count = ends.cumsum(-1) - ends.long(), ends.sum(-1, keepdim=True)  # before: steps that ended earlier
    x = torch.where(ends, batch.step_reward, 0.0)
    value = torch.zeros_like(x).scatter_add(1, before, x)  # column j: of step j
    some = batch.valid & (count[:, 0] > 0)
    mean, size = _group_mean(value[:, 0], batch, some)
    first = (value[:, 0] - mean) * size / (size - 1)  # a single row divides by 0, and is left out below
    delta = torch.cat([first[:, None], value.diff()], dim=-1)
    taken = torch.ones_like(before).cumsum(-1) <= count
    delta = torch.where(taken & (some & (size > 1))[:, None], delta, 0.0)
    adv, columns = torch.zeros_like(first), list[Tensor]()
    for change in reversed(delta.unbind(-1)):
        adv = change + lam * adv
        columns.append(adv)
    found = torch.stack(columns[::-1], dim=-1).gather(1, before.minimum((count - 1).clamp(min=0)))
    return torch.where(batch.mask, found, 0.0)


# --- one advantage a token ---


def gae(batch: Batch, *, gamma: float = 1.0, lam: float = 0.95, kl: str = "") -> Tensor:
    """Generalised advantage estimation over the acted tokens; observed tokens between turns are skipped.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  after the last token V is 0, or the
    bootstrap column where the episode was cut off. With lam = 1 or the true V the policy gradient is unbiased; with
    another V the bias grows as lam falls. For gamma < 1 see reward_to_go.
    """
    reward = token_rewards(batch, kl=kl)
    value = batch.old_value if batch.old_value is not ABSENT else torch.zeros_like(reward)
    next_adv = torch.zeros_like(batch.reward)
    next_value = batch.bootstrap if batch.bootstrap is not ABSENT else next_adv
    columns: list[Tensor] = []
    for t in reversed(range(reward.shape[1])):
        live = batch.mask[:, t]
        here = reward[:, t] + gamma * next_value - value[:, t] + gamma * lam * next_adv
        columns.append(torch.where(live, here, 0.0))
        next_adv = torch.where(live, here, next_adv)
        next_value = torch.where(live, value[:, t], next_value)
    return torch.stack(columns[::-1], dim=-1)


def reward_to_go(batch: Batch, *, gamma: float = 1.0, kl: str = "") -> Tensor:
    """G_t = sum_{k>=t} gamma^(k-t) r_k, less the running baseline where there is one  (REINFORCE, REINFORCE++)

    With gamma < 1 the policy gradient is not that of the discounted return, which has another gamma^(t-1) on token t.
    """
    returns = gae(replace(batch, old_value=ABSENT, bootstrap=ABSENT), gamma=gamma, lam=1.0, kl=kl)
    if batch.baseline is ABSENT:
        return returns
    return torch.where(batch.mask, returns - batch.baseline[:, None], 0.0)


def whiten(adv: Tensor, mask: Tensor, *, reduce: Reduce = one_rank, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit population variance over every trained token on every rank  (REINFORCE++, PPO)

    The mean and std depend on the sampled rewards themselves, so the estimator is biased by O(1/rows), in direction
    too: with rewards 0 and 1 in n rows of one token the gradient is short by 1 / (8 p (1-p) n) of its length.
    """
    # float64: in float32 the mean of equal advantages is off by more than eps, and whitening would amplify this noise
    x = torch.where(mask, adv, 0.0).double()
    total, count = reduce(torch.stack([x.sum(), mask.sum().to(x.dtype)]))
    mean = total / count.clamp(min=1)
    # two passes: E[x^2] - E[x]^2 loses every digit when the mean is large
    deviation = torch.where(mask, x - mean, 0.0)
    (square,) = reduce(deviation.square().sum()[None])
    return (deviation / ((square / count.clamp(min=1)).sqrt() + eps)).to(adv.dtype)
