"""Log-probs, entropies and KLs from hidden states: positions meet the vocabulary a chunk at a time.

All chunks of logits share one piece of memory. The backward pass computes the logits again, turns them into their
gradient in place, and multiplies that with the head and the hidden states. Kept between the passes are the inputs,
numbers by position, and the logits of the last chunk: the backward pass begins with it and needs memory for one chunk
in any case.
Shapes: N positions, n of a chunk, D hidden, V vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from hone.model.backends.registry import differentiates_once
from hone.model.vocab.distribution import (
    NUMBERS,
    PLACE,
    STATS,
    Chunk,
    Finish,
    HeadRows,
    LogRows,
    Other,
    Plan,
    by_autograd,
    differentiable_gradients,
    head_backend,
    vocab_backend,
    wide,
)
from hone.types import Support

Grads = tuple[Tensor | None, Tensor | None]
Positions = int | Literal["fit"] | None  # so many at once, as many as fit the budget, or all
NONE: Mapping[str, Tensor | LogRows] = {}
BUDGET = {"cpu": 256 << 20, "cuda": 512 << 20}  # bytes of logits at once, by device
# The logits of all chunks but one are computed twice. So if a GPU holds nothing but logits, its chunks are larger: each
# is a CHUNKS-th of the positions, or what fits into a SHARE-th of its memory.
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
    alone = not others and bare(rows) and differentiates_once()
    if keep and chunk == "fit" and grad and alone and not is_slope(want, head_weight_VD):
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
        found = ChunkedStats.apply(hidden_ND, head_weight_VD, rows, plan)
    else:
        found = read(plan, compute(rows, plan)[0])
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
        most = positions_per_chunk(N, len(weight) * tables * weight.element_size(), budget=budget, memory=memory)
        chunk = -(-N // max(1, -(-N // most)))
    step = chunk or max(N, 1)
    return tuple(slice(i, min(i + step, N)) for i in range(0, max(N, 1), step))


def positions_per_chunk(N: int, each: int, *, budget: int, memory: int) -> int:
    """How many of N positions meet the vocabulary at once, whose logits take `each` bytes; memory: a GPU's, or 0"""
    return max(1, budget // each, min(-(-N // CHUNKS), memory // SHARE // each))


class LogitsBuffer:
    """The logits of a chunk, of the distribution and of those it is compared with."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.longest = max(at.stop - at.start for at in plan.slices)
        self.memory = dict[str, Tensor]()
        self.held: slice | None = None  # the chunk whose logits are here

    def fill(self, rows: HeadRows, at: slice, table: Tensor) -> Chunk:
        """The logits at these positions, computed unless they are here already."""
        fresh, self.held = self.held != at, at
        logits = self._logits("", rows, at, fresh)
        others = dict[str, Other]()
        for name, other in self.plan.others.items():
            if isinstance(other, HeadRows) and other.finish is None:
                y = Other(logits=self._logits(name, other, at, fresh), temperature=other.temperature)
            else:
                y = Other(logits=other(at), given=True)
            self.plan.check(name, y.logits, logits.shape)
            others[name] = y
        return Chunk(
            logits=logits,
            targets=self.plan.targets[at],
            table=table[:, at],
            want=frozenset(self.plan.names),
            temperature=rows.temperature,
            cut=rows.support is not None,
            others=others,
        )

    def for_head(self, rows: HeadRows) -> Tensor:
        """Memory for the logits of the only chunk, which a backend writes."""
        (self.held,) = self.plan.slices
        self.memory[""] = rows.hidden.new_empty(self.longest, len(rows.weight))
        return self.memory[""]

    def _logits(self, name: str, rows: HeadRows, at: slice, fresh: bool) -> Tensor:
        hidden = rows.hidden[at]
        if name not in self.memory:
            self.memory[name] = hidden.new_empty(self.longest, len(rows.weight))
        logits = self.memory[name][: len(hidden)]
        if not fresh:
            return logits
        torch.mm(hidden, rows.weight.t(), out=logits)
        if rows.support is not None:
            logits.masked_fill_(rows.support.outside(at, logits.shape[-1]), -torch.inf)
        return logits


@torch.no_grad()
def compute(
    rows: HeadRows, plan: Plan, *, slope: Tensor | None = None, keep: bool = False
) -> tuple[Tensor, LogitsBuffer | None]:
    """The table of numbers [NUMBERS, N], and the buffer that holds the last chunk.

    slope: receives the derivative of logp by the hidden states, [N, D], for which the logits are spent at once.
    keep: a backward pass will ask for the last chunk's logits.
    """
    buffer, table = LogitsBuffer(plan), wide(rows.hidden[:0]).new_zeros(len(NUMBERS), len(rows.hidden))
    head = head_backend(rows, plan)
    if head is not None:
        head.head_stats(rows, plan, table, logits=buffer.for_head(rows) if keep else None)
        if slope is None:
            return table, buffer
    for at in plan.slices:
        chunk = buffer.fill(rows, at, table)
        backend = vocab_backend(chunk.logits)
        if head is None:
            backend.stats(chunk)
        if slope is not None:
            backend.grad(chunk, {"logp": torch.ones_like(table[0, at])})
            torch.mm(chunk.logits, rows.weight, out=slope[at])
    return table, buffer if slope is None else None


def is_slope(names: Collection[str], weight: Tensor) -> bool:
    """Whether the forward pass can compute the gradient up to a factor, as it can for logp with a frozen head.

    It then uses up the logits, and no product is computed again.
    """
    return set(names) == {"logp"} and not weight.requires_grad


def read(plan: Plan, table: Tensor) -> tuple[Tensor, ...]:
    """The plan's statistics out of the table."""
    return tuple(table[PLACE[name]].clone() for name in plan.names)


class ChunkedStats(torch.autograd.Function):
    """apply(hidden, weight, rows, plan) -> the plan's statistics"""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: HeadRows, plan: Plan) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        slope = torch.empty_like(hidden) if is_slope(plan.names, weight) else None
        table, ctx.buffer = compute(rows, plan, slope=slope, keep=True)
        ctx.plan, ctx.law = plan, (rows.temperature, rows.support)
        ctx.save_for_backward(hidden, weight, table, slope)
        return read(plan, table)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, table, slope = ctx.saved_tensors
        rows, plan = HeadRows(hidden, weight, *ctx.law), ctx.plan
        buffer, ctx.buffer = ctx.buffer or LogitsBuffer(plan), None  # its logits are spent after one pass
        given = {name: g for name, g in zip(plan.names, upstream, strict=True) if g is not None}
        if not given:
            return None, None, None, None
        if torch.is_grad_enabled():
            return *differentiable_gradients(rows, plan, given), None, None
        if slope is not None:
            return (slope * given["logp"][:, None]).to(slope.dtype), None, None, None
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return *gradients(rows, buffer, table, given, hidden=needs_hidden, weight=needs_weight), None, None


def gradients(
    rows: HeadRows, buffer: LogitsBuffer, table: Tensor, given: Mapping[str, Tensor], *, hidden: bool, weight: bool
) -> Grads:
    """The gradients of the hidden states and of the head, as far as they are asked for."""
    d_hidden = torch.empty_like(rows.hidden) if hidden else None
    d_weight, slices = None, buffer.plan.slices
    for at in reversed(slices):
        chunk = buffer.fill(rows, at, table)
        vocab_backend(chunk.logits).grad(chunk, {name: g[at] for name, g in given.items()})
        if d_hidden is not None:
            torch.mm(chunk.logits, rows.weight, out=d_hidden[at])
        if weight:
            d_weight = _add_product(d_weight, chunk.logits, rows.hidden[at], alone=len(slices) == 1)
    return d_hidden, None if d_weight is None else d_weight.to(rows.weight.dtype)


def _add_product(total: Tensor | None, d_logits: Tensor, hidden: Tensor, *, alone: bool) -> Tensor:
    """total + d_logits' h, summed in at least float32; alone: there is nothing to add."""
    left = d_logits.t()
    if alone:
        return torch.mm(left, hidden)
    beta = 0 if total is None else 1
    if total is None:
        total = wide(hidden[:0]).new_empty(len(left), hidden.shape[1])
    if total.dtype == left.dtype or not left.is_cuda:
        return total.addmm_(left.to(total.dtype), hidden.to(total.dtype), beta=beta)
    return torch.addmm(total, left, hidden, out_dtype=total.dtype, beta=beta, out=total)
