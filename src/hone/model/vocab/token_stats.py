"""Log-probs, entropies and KLs from hidden states: positions meet the vocabulary a chunk at a time.

Shapes: N positions, n of a chunk, D hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from hone.model.second_order import once
from hone.model.vocab import chunked
from hone.model.vocab.distribution import Finish, HeadRows, LogRows, Plan, by_autograd
from hone.model.vocab.rows import STATS
from hone.types import Support

__all__ = ["STATS", "HeadRows", "LogRows", "Positions", "token_stats"]

Positions = int | Literal["fit"] | None  # so many at once, as many as fit the budget, or all
NONE: Mapping[str, Tensor | LogRows] = {}
BUDGET = {"cpu": 256 << 20, "cuda": 512 << 20}  # bytes of logits at once, by device
# On a GPU more where nothing but the logits is held, for those of all but one chunk are computed twice: as many as make
# so few chunks, while they take at most this share of its memory.
CHUNKS, SHARE = 3, 32


class Law(TypedDict, total=False):
    """How logits become a distribution: see HeadRows."""

    temperature: float
    support: Support | None
    finish: Finish | None


def token_stats(
    hidden_ND: Tensor,
    head_weight_VD: Tensor,
    targets_N: Tensor,
    *,
    want: frozenset[str],
    chunk: Positions = "fit",
    keep: bool = False,
    against: Mapping[str, Tensor | LogRows] = NONE,
    **law: Unpack[Law],
) -> dict[str, Tensor]:
    """What `want` names, [N] each; at most `chunk` positions meet the vocabulary at once.

    keep: rather more memory than a second computation: where chunks "fit" and a gradient would ask for their logits
    again, all of them are kept.
    against: the distributions that ref_kl and old_kl compare with, by those names. A target outside the vocabulary is
    refused; a GPU is not waited for, and there its log-prob is NaN. The result can be differentiated twice.
    """
    rows = HeadRows(hidden_ND, head_weight_VD, **law)
    _check(rows, targets_N, want, chunk)
    for name in sorted(want - {"logp", "entropy"} - against.keys()):
        raise ValueError(f"{name} needs a distribution to be compared with")
    others = {n: x.__getitem__ if isinstance(x, Tensor) else x for n, x in against.items() if n in want}
    grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or head_weight_VD.requires_grad)
    alone = not others and bare(rows) and once()
    if keep and chunk == "fit" and grad and alone and not chunked.is_slope(want, head_weight_VD):
        chunk = None
    plan = Plan(
        names=tuple(sorted(want)),
        targets=targets_N,
        others=others,
        slices=slices(len(hidden_ND), chunk, head_weight_VD, tables=1 + len(others), bare=alone),
    )
    if not want:
        return {}
    if rows.finish is not None:
        found = by_autograd(rows, plan)
    elif grad:
        found = chunked.Fused.apply(hidden_ND, head_weight_VD, rows, plan)
    else:
        found = chunked.read(plan, chunked.forward(rows, plan)[0])
    return dict(zip(plan.names, found, strict=True))


def _check(rows: HeadRows, targets: Tensor, want: frozenset[str], chunk: Positions) -> None:
    if not want <= STATS:
        raise ValueError(f"unknown statistics {sorted(want - STATS)}, known are {sorted(STATS)}")
    if isinstance(chunk, int) and chunk < 1:
        raise ValueError(f"chunk {chunk} must be positive")
    V = len(rows.weight)
    if targets.is_cpu and len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < V:
        raise ValueError(f"targets from {int(targets.min())} to {int(targets.max())} in a vocabulary of {V}")


def bare(rows: HeadRows) -> bool:
    """Whether a chunk takes the memory of its logits and no more."""
    return rows.finish is None and rows.support is None


def slices(N: int, chunk: Positions, weight: Tensor, *, tables: int = 1, bare: bool = False) -> tuple[slice, ...]:
    """The chunks of N positions, one for none at all; "fit": of one size, the logits of all tables in the budget.

    bare: a chunk takes the memory of its logits and no more.
    """
    if chunk == "fit":
        large = bare and weight.is_cuda
        memory = torch.cuda.get_device_properties(weight.device).total_memory if large else 0
        budget = BUDGET.get(weight.device.type, BUDGET["cuda"])
        most = fitting(N, len(weight) * tables * weight.element_size(), budget=budget, memory=memory)
        chunk = -(-N // max(1, -(-N // most)))
    step = chunk or max(N, 1)
    return tuple(slice(i, min(i + step, N)) for i in range(0, max(N, 1), step))


def fitting(N: int, each: int, *, budget: int, memory: int) -> int:
    """How many of N positions meet the vocabulary at once, whose logits take `each` bytes; memory: a GPU's, or 0"""
    return max(1, budget // each, min(-(-N // CHUNKS), memory // SHARE // each))
