"""Log-probs, entropies and KLs from hidden states, with the logits of one chunk of positions at a time.

All chunks of logits use the same memory. The backward pass recomputes the logits, overwrites them with their gradient,
and multiplies that with the head and the hidden states. Between the passes stay the inputs, the table of statistics,
and the logits of the last chunk: the backward pass begins with it, and needs the memory of one chunk in any case.
Shapes: N positions, n of a chunk, D hidden, V vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from hone.model.backends.registry import differentiates_once
from hone.model.vocab.distribution import (
    ROW_OF,
    STATS,
    TABLE_ROWS,
    Chunk,
    ComparedLogits,
    Finish,
    HeadRows,
    LogRows,
    Plan,
    at_least_float32,
    by_autograd,
    differentiable_gradients,
    head_backend,
    vocab_backend,
)
from hone.types import Support

Grads = tuple[Tensor | None, Tensor | None]
Positions = int | Literal["fit"] | None  # positions in a chunk: this number, as many as fit the budget, or all
NONE: Mapping[str, Tensor | LogRows] = {}
BUDGET = {"cpu": 256 << 20, "cuda": 512 << 20}  # bytes of logits at once, by device
# The logits of all chunks but one are computed twice. So where a chunk takes no memory but that of its logits, a GPU's
# chunks are larger: a CHUNKS-th of the positions, or as many as fit into a SHARE-th of its memory.
CHUNKS, SHARE = 3, 32


class DistributionOptions(TypedDict, total=False):
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
    **options: Unpack[DistributionOptions],
) -> dict[str, Tensor]:
    """The statistics in `want`, [N] each, with the logits of at most `chunk` positions at a time.

    keep: with chunk="fit", keep all logits for the gradient instead of computing them again.
    against: the distributions that ref_kl and old_kl compare with, by those names.
    A target outside the vocabulary is an error on a CPU. On a GPU its log-prob is NaN, since a check would wait for the
    GPU. The result can be differentiated twice.
    """
    rows = HeadRows(hidden_ND, head_weight_VD, **options)
    _check(rows, targets_N, want, chunk)
    for name in sorted(want - {"logp", "entropy"} - against.keys()):
        raise ValueError(f"{name} needs a distribution to be compared with")
    others = {n: x.__getitem__ if isinstance(x, Tensor) else x for n, x in against.items() if n in want}
    grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or head_weight_VD.requires_grad)
    alone = not others and only_logits(rows) and differentiates_once()
    if keep and chunk == "fit" and grad and alone and not is_slope(want, head_weight_VD):
        chunk = None
    plan = Plan(
        names=tuple(sorted(want)),
        targets=targets_N,
        others=others,
        slices=slices(len(hidden_ND), chunk, head_weight_VD, tables=1 + len(others), only_logits=alone),
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


def only_logits(rows: HeadRows) -> bool:
    """Whether a chunk takes no memory but that of its logits."""
    return rows.finish is None and rows.support is None


def slices(
    N: int, chunk: Positions, weight: Tensor, *, tables: int = 1, only_logits: bool = False
) -> tuple[slice, ...]:
    """The chunks of N positions, one if N is 0; "fit": of one size, such that the logits of all tables fit the budget.

    only_logits: a chunk takes no memory but that of its logits.
    """
    if chunk == "fit":
        large = only_logits and weight.is_cuda
        memory = torch.cuda.get_device_properties(weight.device).total_memory if large else 0
        budget = BUDGET.get(weight.device.type, BUDGET["cuda"])
        most = positions_per_chunk(N, len(weight) * tables * weight.element_size(), budget=budget, memory=memory)
        chunk = -(-N // max(1, -(-N // most)))
    step = chunk or max(N, 1)
    return tuple(slice(i, min(i + step, N)) for i in range(0, max(N, 1), step))


def positions_per_chunk(N: int, each: int, *, budget: int, memory: int) -> int:
    """How many of N positions are in a chunk, if the logits of each take `each` bytes; memory: a GPU's bytes, or 0"""
    return max(1, budget // each, min(-(-N // CHUNKS), memory // SHARE // each))


class LogitsBuffer:
    """Memory for a chunk's logits: of the distribution and of those with which it is compared."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.longest = max(at.stop - at.start for at in plan.slices)
        self.memory = dict[str, Tensor]()
        self.held: slice | None = None  # the chunk whose logits the memory holds

    def fill(self, rows: HeadRows, at: slice, table: Tensor) -> Chunk:
        """The chunk of these positions, with its logits computed unless the memory holds them."""
        fresh, self.held = self.held != at, at
        logits = self._logits("", rows, at, fresh)
        others = dict[str, ComparedLogits]()
        for name, other in self.plan.others.items():
            if isinstance(other, HeadRows) and other.finish is None:
                y = ComparedLogits(logits=self._logits(name, other, at, fresh), temperature=other.temperature)
            else:
                y = ComparedLogits(logits=other(at), is_log_prob=True)
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
        """Memory for the logits of the only chunk, for a backend to write."""
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
    """The table of statistics [TABLE_ROWS, N], and the buffer that holds the last chunk.

    slope: if given, is overwritten with the derivative of logp by the hidden states, [N, D]; the logits are lost then.
    keep: a backward pass will read the last chunk's logits.
    """
    buffer, table = LogitsBuffer(plan), at_least_float32(rows.hidden[:0]).new_zeros(len(TABLE_ROWS), len(rows.hidden))
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
    """Whether the forward pass can compute the gradient up to a factor: for logp alone, with a frozen head.

    The gradient overwrites the logits then, and the backward pass recomputes nothing.
    """
    return set(names) == {"logp"} and not weight.requires_grad


def read(plan: Plan, table: Tensor) -> tuple[Tensor, ...]:
    """The plan's statistics out of the table."""
    return tuple(table[ROW_OF[name]].clone() for name in plan.names)


class ChunkedStats(torch.autograd.Function):
    """apply(hidden, weight, rows, plan) -> the plan's statistics"""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: HeadRows, plan: Plan) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        slope = torch.empty_like(hidden) if is_slope(plan.names, weight) else None
        table, ctx.buffer = compute(rows, plan, slope=slope, keep=True)
        ctx.plan, ctx.options = plan, (rows.temperature, rows.support)
        ctx.save_for_backward(hidden, weight, table, slope)
        return read(plan, table)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, table, slope = ctx.saved_tensors
        rows, plan = HeadRows(hidden, weight, *ctx.options), ctx.plan
        buffer, ctx.buffer = ctx.buffer or LogitsBuffer(plan), None  # one backward pass overwrites its logits
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
    """The gradients of the hidden states and of the head, those that are wanted."""
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
    """total + d_logits' h, summed in at least float32; alone: there is only one chunk."""
    left = d_logits.t()
    if alone:
        return torch.mm(left, hidden)
    beta = 0 if total is None else 1
    if total is None:
        total = at_least_float32(hidden[:0]).new_empty(len(left), hidden.shape[1])
    if total.dtype == left.dtype or not left.is_cuda:
        return total.addmm_(left.to(total.dtype), hidden.to(total.dtype), beta=beta)
    return torch.addmm(total, left, hidden, out_dtype=total.dtype, beta=beta, out=total)
