"""Loss terms: (Forward, Batch) -> unreduced loss, [B, T] or [B]. Lower is better; no term reduces.

Mask before exp, never after: inf * 0 is NaN, and so is its gradient.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.types import Batch, Forward, sequence_mean, sequence_sum

Term = Callable[[Forward, Batch], Tensor]


# --- estimators of KL(pi || other) from samples of pi, with d = log pi - log other on the sampled token ---
#
# Their values and their gradients differ, and many trainers have confused the two:
#
# | name | value | expected gradient as a loss, on samples of pi |
# |---|---|---|
# | k1 = d | unbiased | zero: refused as a loss |
# | k2 = d^2 / 2 | biased | that of KL(pi || other) |
# | k3 = exp(-d) - 1 + d | unbiased, never negative | that of KL(other || pi) |
# | exact | sum over the vocabulary | that of KL(pi || other) |
#
# All are per state, with the distribution of states held fixed: the effect of a token on the KL of later states is left
# out. On samples of another policy only the exact one has this gradient, unless weighed by the ratio (kl_penalty).


def k1(d: Tensor) -> Tensor:
    """d"""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2"""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d"""
    return (-d).expm1() + d


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


# --- ratios pi / pi_old, each [B, T] ---


def token_ratio(fwd: Forward, batch: Batch) -> Tensor:
    """exp(logp_t - old_logp_t)  (PPO, GRPO)"""
    return torch.where(batch.mask, fwd.logp - batch.old_logp, 0.0).exp()


def row_ratio(fwd: Forward, batch: Batch) -> Tensor:
    """The geometric mean of the row's token ratios, on each of its tokens  (GSPO)

    No density ratio: off policy its expected gradient is biased.
    """
    return sequence_mean(fwd.logp - batch.old_logp, batch.mask).exp()[:, None].expand_as(fwd.logp)


def trajectory_ratio(fwd: Forward, batch: Batch) -> Tensor:
    """The product of the row's token ratios, on each of its tokens: the whole response is one action.

    With one advantage a row, averaged by row, its expected gradient off policy is the true one.
    """
    return sequence_sum(fwd.logp - batch.old_logp, batch.mask).exp()[:, None].expand_as(fwd.logp)


RATIOS: dict[str, Term] = {"token": token_ratio, "row": row_ratio, "trajectory": trajectory_ratio}


# --- policy gradient ---


def policy_gradient(fwd: Forward, batch: Batch) -> Tensor:
    """-A log pi, strictly on policy  (REINFORCE, RLOO, A2C)"""
    return -batch.adv * fwd.logp


def ratio_gradient(fwd: Forward, batch: Batch, *, ratio: Term = token_ratio) -> Tensor:
    """-A pi/pi_old  (TRPO, PPO-penalty)

    By token, the expected gradient off policy is that of the surrogate: states and later tokens are of pi_old.
    """
    return -batch.adv * ratio(fwd, batch)


def clipped(
    fwd: Forward,
    batch: Batch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    ratio: Term = token_ratio,
) -> Tensor:
    """-min(r A, clip(r, 1-low, 1+high) A); with dual clip at most -dual A where A < 0  (PPO, GRPO, DAPO, GSPO)"""
    r = ratio(fwd, batch)
    loss = -torch.minimum(r * batch.adv, r.clamp(1 - low, 1 + high) * batch.adv)
    if dual is None:
        return loss
    return torch.where(batch.adv < 0, torch.minimum(loss, -dual * batch.adv), loss)


def is_clipped(
    fwd: Forward,
    batch: Batch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    ratio: Term = token_ratio,
) -> Tensor:
    """1 where the clip has cut the gradient off: watched, not minimised."""
    r = ratio(fwd, batch)
    outside = (r < 1 - low) | (r > dual) if dual is not None else r < 1 - low
    return (((batch.adv > 0) & (r > 1 + high)) | ((batch.adv < 0) & outside)).float()


def truncated(fwd: Forward, batch: Batch, *, max_ratio: float = 5.0) -> Tensor:
    """-sg(min(r, max)) A log pi: no token's gradient is dropped  (CISPO)

    Short of ratio_gradient's expected gradient by E_old[(r - max)+ A grad log pi].
    """
    return -token_ratio(fwd, batch).clamp(max=max_ratio).detach() * batch.adv * fwd.logp


def is_truncated(fwd: Forward, batch: Batch, *, max_ratio: float = 5.0) -> Tensor:
    """1 where the ratio is capped: watched, not minimised."""
    return (token_ratio(fwd, batch) > max_ratio).float()


# --- regularisers ---


def kl_penalty(fwd: Forward, batch: Batch, *, estimator: str = "k3", through_ratio: bool = False) -> Tensor:
    """kl_coef * KL to the reference, by the named estimator (see k1, k2 and k3 for what each one's gradient is).

    through_ratio weighs the estimator by pi/pi_old. Then its expected gradient is that of KL(pi || ref) on samples of
    pi_old, too. The gradient goes through the ratio for k1 and k3, whose values are unbiased. It does not for k2,
    whose gradient is already right.
    """
    if estimator == "exact":
        return batch.kl_coef[:, None] * fwd.ref_kl
    d = torch.where(batch.mask, fwd.logp - batch.ref_logp, 0.0)
    kl = ESTIMATORS[estimator](d)
    if through_ratio:
        r = token_ratio(fwd, batch)
        kl = kl * (r.detach() if estimator == "k2" else r)
    return batch.kl_coef[:, None] * kl


def reference_kl(fwd: Forward, batch: Batch) -> Tensor:
    """KL(pi || ref) of the next-token distribution, summed over the vocabulary  (distillation)"""
    return fwd.ref_kl


def kl_to_old(fwd: Forward, batch: Batch) -> Tensor:
    """k3 of KL(old || pi) on the old policy's samples: value and gradient are both unbiased  (PPO-penalty)"""
    return k3(torch.where(batch.mask, batch.old_logp - fwd.logp, 0.0))


def old_penalty(fwd: Forward, batch: Batch, *, exact: bool = False) -> Tensor:
    """kl_coef * KL(old || pi)  (PPO-penalty)"""
    return batch.kl_coef[:, None] * (fwd.old_kl if exact else kl_to_old(fwd, batch))


def neg_entropy(fwd: Forward, batch: Batch) -> Tensor:
    """Minus the entropy of the whole next-token distribution: a bonus."""
    return -fwd.entropy


# --- critics ---


def value_error(fwd: Forward, batch: Batch, *, clip: float | None = None) -> Tensor:
    """(V - R)^2 / 2; with clip the larger of it and the same for V clipped around old V  (A2C, PPO)"""
    error = (fwd.value - batch.returns).square()
    if clip is not None:
        near = batch.old_value + (fwd.value - batch.old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - batch.returns).square())
    return error / 2


def q_error(fwd: Forward, batch: Batch) -> Tensor:
    """(Q - target)^2 / 2 with Q = beta log(pi/ref) + V  (KL-regularised Q-learning)

    The target is the lambda-return of the KL-regularised reward, less the penalty of this token itself, which
    belongs to V and not to Q: returns + beta log(old/ref).
    """
    gain = torch.where(batch.mask, fwd.logp - batch.ref_logp, 0.0)
    old_gain = torch.where(batch.mask, batch.old_logp - batch.ref_logp, 0.0)
    beta = batch.kl_coef[:, None]
    return (beta * gain + fwd.value - (batch.returns + beta * old_gain)).square() / 2


# --- supervised ---


def nll(fwd: Forward, batch: Batch) -> Tensor:
    """-log pi  (pre-training, SFT, expert iteration)"""
    return -fwd.logp


def step_bce(fwd: Forward, batch: Batch) -> Tensor:
    """Right or wrong at each step's last token; `mask` marks those tokens  (process reward model)"""
    # the function computes in the lower of two precisions; labels of no rows have one dimension
    label = batch.label.to(fwd.value.dtype).reshape(fwd.value.shape)
    return F.binary_cross_entropy_with_logits(fwd.value, label, reduction="none")
