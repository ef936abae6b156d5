"""Drawing tokens from logits, reproducibly: the random numbers belong to a request, not to a batch."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hone.rollout.protocol import SampleParams


def uniforms(seed: int, requests: Sequence[int], count: int) -> Tensor:
    """float64 [count, B] in [0, 1): column b is the stream of (seed, requests[b]), the same whatever the batch."""
    table = np.empty((count, len(requests)))
    for column, request in enumerate(requests):
        key = np.array([seed, request], dtype=np.uint64)
        table[:, column] = np.random.Generator(np.random.Philox(key=key)).random(count)
    return torch.from_numpy(table)


def restrict(logits: Tensor, params: SampleParams) -> Tensor:
    """Tempered logits with -inf outside the kept support: top-k, then top-p of what is left, then min-p.

    The most probable token is always kept. top-k keeps every token that ties with the k-th; top-p keeps the
    smallest set of the most probable tokens whose mass reaches it; min-p keeps p >= min_p * max p.
    """
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if params.top_p < 1:
        sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
        p = sorted_logits.softmax(-1).double()
        before = p.cumsum(-1) - p
        cut = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        logits = logits.masked_fill(cut, -math.inf)
    if params.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + math.log(params.min_p)
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def draw(logits: Tensor, u: Tensor, params: SampleParams) -> tuple[Tensor, Tensor]:
    """Token [B] and its log-prob [B] for logits [B, V] and u [B] in [0, 1]: the first token whose CDF exceeds u.

    The log-prob is under the distribution drawn from, tempered and restricted. Greedy (temperature 0) takes the
    most probable token and gives its log-prob at temperature 1. Logits that are not finite give a log-prob that
    is not finite.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token.squeeze(-1), logits.log_softmax(-1).gather(-1, token).squeeze(-1)
    # the maximum goes first, so that a tiny temperature overflows to -inf and never to +inf or 0 / 0
    temperature = max(params.temperature, torch.finfo(logits.dtype).tiny)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    logp = restrict(logits, params).log_softmax(-1)
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1:]
    # below the total even where u * total rounds up to it, so the token found has raised the CDF: p > 0
    target = torch.minimum(u[..., None].double() * total, total.nextafter(torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[-1] - 1)  # NaN finds V
    return token.squeeze(-1), logp.gather(-1, token).squeeze(-1)
