"""Drawing tokens from logits, reproducibly: the random numbers belong to a request, not to a batch.

Logits go through repetition penalty, bias and banned tokens, temperature, top-k, top-p and min-p, in this order.
What a row draws depends on its own logits, u and settings alone.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hone.rollout import philox
from hone.rollout.knobs import RESTRICT, Knobs, Uses, check_params

__all__ = ["Knobs", "check_params", "draw", "process", "threshold", "top_logprobs", "uniforms"]

BLOCK = 1024  # tokens whose weights are summed in the logits' precision; sums of blocks are added in float64
BELOW = 1 - 2**-53  # times a total gives a number below it
CANDIDATES = 512  # top-p looks at so many of the most probable tokens before it sorts them all


def uniforms(seed: int, requests: Sequence[int], count: int) -> Tensor:
    """float64 [count, B] in [0, 1): column b is the stream of (seed, requests[b]), the same whatever the batch."""
    return torch.from_numpy(philox.uniforms(seed, np.array(requests, dtype=np.uint64), 0, count))


def process(logits: Tensor, knobs: Knobs) -> Tensor:
    """[B, V] float: penalty (positive logits of tokens seen are divided by it, others multiplied), bias, banned."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    uses = knobs.any
    if Uses.PENALTY in uses:
        assert knobs.seen is not None
        penalty = knobs.penalty.to(logits.dtype)[:, None]
        logits = torch.where(knobs.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if Uses.BIAS in uses:
        assert knobs.bias is not None
        logits = logits + knobs.bias
    return logits


def threshold(z: Tensor, knobs: Knobs) -> Tensor:
    """[B, 1]: tokens below it are cut. z [B, V]: tempered logits less their maximum.

    top-k keeps every token that ties with the k-th. top-p keeps a token if the more probable ones that top-k left
    have less than top_p of its mass: the smallest set that reaches it, and what ties with its last token. min-p keeps
    p >= min_p * max p. The most probable token, z = 0, is always kept.
    """
    low = torch.full_like(z[:, :1], -math.inf)
    for use, cut in ((Uses.TOP_K, _kth), (Uses.TOP_P, _nucleus)):
        rows = np.flatnonzero(knobs.uses & int(use))
        if len(rows) == len(z):
            low = torch.maximum(low, cut(z, knobs, low))
        elif len(rows):
            index = torch.from_numpy(rows).to(z.device)
            low[index] = torch.maximum(low[index], cut(z[index], knobs.rows(index), low[index]))
    if Uses.MIN_P in knobs.any:
        low = torch.maximum(low, knobs.min_p.log().to(z.dtype)[:, None])
    return low.clamp_(max=0.0)


def _kth(z: Tensor, knobs: Knobs, low: Tensor) -> Tensor:
    most = int(knobs.host[2].max())
    return z.topk(most, dim=-1).values.gather(-1, knobs.top_k[:, None] - 1)


def _nucleus(z: Tensor, knobs: Knobs, low: Tensor) -> Tensor:
    """The least z whose strictly greater ones have less than top_p of the mass at or above `low`."""
    weight = _weights(z, low)
    goal = knobs.top_p[:, None] * _totals(weight)[:, -1:]
    best = z.topk(min(CANDIDATES, z.shape[-1]), dim=-1).values
    found = _reached(best, goal, low)
    last = best[:, -1:]
    if best.shape[-1] < z.shape[-1] and not bool(((found > last) | (last < low)).all()):
        found = _reached(z.sort(dim=-1, descending=True).values, goal, low)
    return found


def _reached(best: Tensor, goal: Tensor, low: Tensor) -> Tensor:
    """Of z in descending order, the one with which the mass reaches the goal, or the last."""
    mass = _weights(best, low).cumsum(-1, dtype=torch.float64)
    at = torch.searchsorted(mass, goal).clamp_(max=best.shape[-1] - 1)
    return best.gather(-1, at)


def _weights(z: Tensor, low: Tensor | None) -> Tensor:
    weight = z.exp()
    return weight if low is None else weight.masked_fill_(z < low, 0.0)


def _totals(weight: Tensor) -> Tensor:
    """float64 [B, blocks]: the running total of the blocks' weights."""
    whole = weight.shape[-1] // BLOCK * BLOCK
    if whole == 0:
        sums = weight.sum(-1, keepdim=True)
    else:
        sums = weight[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
        if whole < weight.shape[-1]:
            sums = torch.cat([sums, weight[:, whole:].sum(-1, keepdim=True)], dim=1)
    return sums.cumsum(-1, dtype=torch.float64)


def _search(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1] the first token whose running weight exceeds u of the total, and the total: float64 [B, 1]."""
    vocab = weight.shape[-1]
    u = u[:, None].double().clamp(max=BELOW)
    if vocab <= BLOCK:
        running = weight.cumsum(-1, dtype=torch.float64)
        total = running[:, -1:]
        return torch.searchsorted(running, u * total, right=True).clamp_(max=vocab - 1), total  # NaN finds V
    running = _totals(weight)
    total = running[:, -1:]
    target = u * total
    block = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[-1] - 1)
    before = torch.where(block > 0, running.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    token = block * BLOCK + torch.arange(BLOCK, device=weight.device)
    inside = weight.gather(-1, token.clamp(max=vocab - 1)).masked_fill_(token >= vocab, 0.0)
    inside = inside.cumsum(-1, dtype=torch.float64)
    # the block's sum was rounded on another way: stay below what is there, so the token found has raised the total
    target = torch.minimum(target - before, inside[:, -1:] * BELOW)
    place = torch.searchsorted(inside, target, right=True)
    return (block * BLOCK + place).clamp_(max=vocab - 1), total


def draw(logits: Tensor, u: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor, Tensor]:
    """Token, logp and raw, [B] each, for logits [B, V] and u [B] in [0, 1]: the first token whose CDF exceeds u.

    logp is under the distribution drawn from, raw under softmax(logits). Greedy (temperature 0) takes the most
    probable token after penalty, bias and banned, and gives its logp at temperature 1. Logits that are not finite give
    a logp that is not finite; -inf is a token that is never drawn.
    """
    uses = knobs.any
    x = logits if logits.dtype == torch.float64 else logits.float()
    y = process(x, knobs)
    top = y.amax(-1, keepdim=True)
    z = y - top  # the maximum goes first: a tiny temperature then overflows to -inf, never to +inf or 0 / 0
    weight = None
    if y is x:
        weight, x_top = z.exp(), top
        x_total = _totals(weight)[:, -1:]
    else:
        x_top = x.amax(-1, keepdim=True)
        x_total = _totals((x - x_top).exp_())[:, -1:]
    if Uses.TEMPERED in uses:
        z, weight = z.div_(knobs.temperature.to(z.dtype)[:, None]), None
    if RESTRICT & uses:
        weight = _weights(z, threshold(z, knobs))
    weight = z.exp() if weight is None else weight
    token, total = _search(weight, u)
    if Uses.GREEDY in uses:
        token = torch.where(knobs.greedy[:, None], y.argmax(-1, keepdim=True), token)
    logp = z.gather(-1, token) - total.log()
    raw = x.gather(-1, token) - x_top - x_total.log()
    return token.squeeze(-1), logp.squeeze(-1).to(x.dtype), raw.squeeze(-1).to(x.dtype)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token and log-prob under softmax(logits) of the k most probable tokens, best first: [B, min(k, V)] each."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    best = x.topk(min(k, x.shape[-1]), dim=-1)
    return best.indices, best.values - x.logsumexp(-1, keepdim=True)
