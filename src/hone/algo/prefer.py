"""Preference losses: (Forward, Batch) -> [B]. Row 2p is the chosen one, row 2p+1 the rejected one. Both rows of a pair
have the pair's loss, and their weights add up to that of one pair."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.types import Batch, Forward, sequence_mean, sequence_sum


def pair_margin(per_row: Tensor) -> Tensor:
    """[B] -> [B]: chosen minus rejected, on both rows of the pair."""
    chosen, rejected = per_row.view(-1, 2).unbind(-1)
    return (chosen - rejected).repeat_interleave(2)


def reference_gain(fwd: Forward, batch: Batch) -> Tensor:
    """log pi(y|x) - log ref(y|x), [B]; times beta it is DPO's implicit reward."""
    return sequence_sum(fwd.logp - batch.ref_logp, batch.mask)


def dpo(fwd: Forward, batch: Batch, *, beta: float = 0.1, smoothing: float = 0.0) -> Tensor:
    """(1-e) softplus(-beta u) + e softplus(beta u)

    Over all pairs with Bradley-Terry labels its minimum is ref exp(r / beta) / Z for e = 0, else closer to ref.
    """
    u = beta * pair_margin(reference_gain(fwd, batch))
    return (1 - smoothing) * F.softplus(-u) + smoothing * F.softplus(u)


def ipo(fwd: Forward, batch: Batch, *, beta: float = 0.1) -> Tensor:
    """(u - 1/(2 beta))^2"""
    return (pair_margin(reference_gain(fwd, batch)) - 1 / (2 * beta)).square()


def simpo(fwd: Forward, batch: Batch, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """softplus(-(beta margin(mean log pi) - gamma)): no reference model"""
    return F.softplus(gamma - beta * pair_margin(sequence_mean(fwd.logp, batch.mask)))


def odds(fwd: Forward, batch: Batch) -> Tensor:
    """softplus(-(logit p_w - logit p_l)), p = exp(mean logp)  (ORPO)"""
    # p = 1 has infinite odds; a float32 mean logp above -1e-7 is p = 1 but for rounding
    logp = sequence_mean(fwd.logp, batch.mask).clamp(max=-1e-7)
    return F.softplus(-pair_margin(logp - torch.log(-torch.expm1(logp))))


def chosen_nll(fwd: Forward, batch: Batch) -> Tensor:
    """Mean NLL of the chosen row, on both rows of the pair  (ORPO's SFT part)"""
    chosen, _ = sequence_mean(-fwd.logp, batch.mask).view(-1, 2).unbind(-1)
    return chosen.repeat_interleave(2)


def kto(fwd: Forward, batch: Batch, *, beta: float = 0.1, good: float = 1.0, bad: float = 1.0) -> Tensor:
    """w (1 - sigmoid(+-beta (gain - z0))), + where label is 1; no gradient flows through z0"""
    edge = beta * (reference_gain(fwd, batch) - batch.kl_baseline)
    return torch.where(batch.label == 1, good * (-edge).sigmoid(), bad * edge.sigmoid())


# --- watched, not minimised: is the chosen one ahead, and by how much? ---


def gain_accuracy(fwd: Forward, batch: Batch) -> Tensor:
    """1 where the chosen row has gained more on the reference than the rejected one, 0.5 for a tie  (DPO, IPO)"""
    u = pair_margin(reference_gain(fwd, batch))
    # before the first update all pairs are ties up to rounding, which must not count as right or wrong
    size = sequence_sum(fwd.logp.abs(), batch.mask).view(-1, 2).sum(-1).repeat_interleave(2)
    return torch.where(u.abs() <= 1e-6 * size, 0.5, (u > 0).float())


def gain_margin(fwd: Forward, batch: Batch) -> Tensor:
    """u, the chosen row's gain on the reference minus the rejected row's  (DPO, IPO)"""
    return pair_margin(reference_gain(fwd, batch))


def likelihood_accuracy(fwd: Forward, batch: Batch) -> Tensor:
    """1 where the chosen row's mean log-prob is the higher one  (ORPO, SimPO)"""
    return (pair_margin(sequence_mean(fwd.logp, batch.mask)) > 0).float()


def score_accuracy(fwd: Forward, batch: Batch) -> Tensor:
    """1 where the chosen row has the higher score  (reward model)"""
    return (pair_margin(last_value(fwd, batch)) > 0).float()


def last_value(fwd: Forward, batch: Batch) -> Tensor:
    """The head's value after each row's last real token, [B]."""
    last = batch.real & (batch.real.flip(-1).cumsum(-1).flip(-1) == 1)
    return sequence_sum(fwd.value, last)


def bradley_terry(fwd: Forward, batch: Batch, *, centre: float = 0.0) -> Tensor:
    """softplus(-(R_w - R_l - margin)) + centre (R_w + R_l)^2  (reward model)"""
    score = last_value(fwd, batch)
    loss = F.softplus(batch.margin - pair_margin(score))
    if centre:
        loss = loss + centre * score.view(-1, 2).sum(-1).square().repeat_interleave(2)
    return loss


def score_error(fwd: Forward, batch: Batch) -> Tensor:
    """(R - label)^2 / 2  (pointwise reward model, by regression)"""
    return (last_value(fwd, batch) - batch.label).square() / 2


def score_bce(fwd: Forward, batch: Batch) -> Tensor:
    """softplus(R) - label R, so that R is the log-odds of good  (pointwise reward model, by classification)"""
    score = last_value(fwd, batch)
    return F.binary_cross_entropy_with_logits(score, batch.label.to(score.dtype), reduction="none")


POINTWISE = {"squared": score_error, "bce": score_bce}
