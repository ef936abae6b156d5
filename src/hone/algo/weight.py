"""How much each token counts. Weights are set for the whole optimiser step, before it is split. So the loss adds up
over micro-batches and ranks. They are float64, because 1/n is the only division in the loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hone.errors import HoneError
from hone.types import ABSENT, Batch


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over all ranks of an optimiser step; rows without a trained token do not count."""

    rows: int  # with at least one token that is trained on
    tokens: int  # that are trained on


def totals(batch: Batch, *, reduce: Callable[[Tensor], Tensor] = lambda x: x) -> Totals:
    """Rows and tokens that the batch of an optimiser step trains on; reduce: sums a tensor over ranks.

    >>> import torch
    >>> from hone.algo import Batch, totals
    >>> token, mask = torch.zeros(2, 2, dtype=torch.long), torch.tensor([[True, True], [False, False]])
    >>> totals(Batch(inputs=token, targets=token, mask=mask, real=mask, group=torch.arange(2)))
    Totals(rows=1, tokens=2)
    """
    mask = batch.host.mask
    counts = reduce(torch.stack([mask.any(-1).sum(), mask.sum()]))
    return Totals(rows=int(counts[0]), tokens=int(counts[1]))


Weigh = Callable[[Batch, Totals], Tensor]


def token_mean(batch: Batch, n: Totals) -> Tensor:
    """Every token counts the same (DAPO, PPO, SFT).

    The divisor is a sum of sampled lengths: where these differ, the policy gradient is biased by O(1/rows).
    """
    return batch.mask.double() / max(n.tokens, 1)


def row_mean(batch: Batch, n: Totals) -> Tensor:
    """Every sequence counts the same, whatever its length (GRPO).

    Biased as a policy gradient where lengths differ, however many rows: a long row's tokens weigh less.
    """
    return batch.mask.double() / batch.mask.sum(-1, keepdim=True).clamp(min=1) / max(n.rows, 1)


def row_sum(batch: Batch, n: Totals) -> Tensor:
    """A sequence is one action, whose log-prob is the sum over its tokens (REINFORCE, RLOO)."""
    return batch.mask.double() / max(n.rows, 1)


def fixed_length(batch: Batch, n: Totals, *, max_tokens: int = 0) -> Tensor:
    """Divide by a constant, so that the scale does not depend on length; 0 takes the sampling limit (Dr. GRPO)."""
    if max_tokens:
        return batch.mask.double() / (max_tokens * max(n.rows, 1))
    if batch.limit is ABSENT:
        raise ValueError("the average by limit reads limit, which this batch lacks: fill it, or give max_tokens")
    limit = batch.limit[:, None]
    # not checked on a GPU, where it would wait: a sampler's limit is at least 1
    if limit.is_cpu and bool((batch.mask & (limit < 1)).any()):
        raise ValueError("the average by limit divides by the column limit, which is 0: fill it, or give max_tokens")
    return batch.mask.double() / (limit.clamp(min=1) * max(n.rows, 1))  # clamp: untrained rows


AVERAGES: dict[str, Weigh] = {"token": token_mean, "row": row_mean, "limit": fixed_length}


def average(name: str) -> Weigh:
    """One of AVERAGES, or HoneError with their names."""
    if name not in AVERAGES:
        raise HoneError(f"average={name!r} does not exist: use one of {', '.join(AVERAGES)}")
    return AVERAGES[name]


def mismatch(batch: Batch, *, how: str, cap: float) -> Tensor:
    """min(pi_old / pi_gen, cap) on each token ("truncate"), or 1 within [1/cap, cap] and 0 outside ("mask").

    Without a cap the expected gradient is right for the choice of each token. Earlier and later tokens stay the
    sampler's. The cap subtracts E_gen[(r - cap)+ g], g a token's gradient; "mask" corrects nothing within the band.
    """
    if how not in ("truncate", "mask"):
        raise HoneError(f"mismatch={how!r} does not exist: use truncate or mask")
    r = torch.where(batch.mask, batch.old_logp - batch.gen_logp, 0.0).exp()
    if how == "truncate":
        return r.clamp(max=cap)
    return ((r <= cap) & (r >= 1 / cap)).to(r.dtype)


class Weighs(Protocol):
    """The part of an algorithm that weighs its tokens."""

    @property
    def weigh(self) -> Weigh: ...


def weigh(batch: Batch, how: Weigh | Weighs, counts: Totals | None = None) -> Batch:
    """Adds token_weight and row_weight, before the step is cut into micro-batches. how: an algorithm, or its `weigh`.

    counts: of the whole optimiser step; None: the batch is the whole step.
    """
    how = how if callable(how) else how.weigh
    counts = totals(batch) if counts is None else counts
    rows = batch.mask.any(-1).double() / max(counts.rows, 1)
    return replace(batch, token_weight=how(batch, counts), row_weight=rows)
