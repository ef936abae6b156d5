"""The statistics of all positions and their gradients, over chunks of logits that share one piece of memory.

The backward pass computes the logits again, turns them into their gradient in place, and multiplies that with the
head and the hidden states. Kept between the passes are the inputs, numbers by position, and the logits of the last
chunk: the backward pass begins with it and needs memory for one chunk in any case.
"""

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hone.model.backends.native import head
from hone.model.layout.forward import wide
from hone.model.vocab import rows as vocab_rows
from hone.model.vocab.distribution import HeadRows, Plan, differentiable_gradients
from hone.model.vocab.rows import NUMBERS, PLACE, Chunk, Other

Grads = tuple[Tensor | None, Tensor | None]


class Room:
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

    def taken(self, rows: HeadRows) -> Tensor:
        """Room for the logits of the only chunk, which another writes."""
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


def backend(logits: Tensor) -> ModuleType:
    """Triton's kernels on a GPU, C++ or plain torch elsewhere: `stats` and `grad` of a chunk."""
    if logits.is_cuda and logits.dtype != torch.float64:
        from hone.model.backends.fused.kernels import vocab

        return vocab
    return head if logits.is_cpu else vocab_rows


@torch.no_grad()
def forward(
    rows: HeadRows, plan: Plan, *, slope: Tensor | None = None, keep: bool = False
) -> tuple[Tensor, Room | None]:
    """The table of numbers [NUMBERS, N], and the room in which the last chunk stands.

    slope: receives the derivative of logp by the hidden states, [N, D], for which the logits are spent at once.
    keep: a backward pass will ask for the last chunk's logits.
    """
    room, table = Room(plan), wide(rows.hidden[:0]).new_zeros(len(NUMBERS), len(rows.hidden))
    whole = head.covers(rows, plan)
    if whole:
        head.fill(rows, plan, table, logits=room.taken(rows) if keep else None)
        if slope is None:
            return table, room
    for at in plan.slices:
        chunk = room.fill(rows, at, table)
        if not whole:
            backend(chunk.logits).stats(chunk)
        if slope is not None:
            backend(chunk.logits).grad(chunk, {"logp": torch.ones_like(table[0, at])})
            torch.mm(chunk.logits, rows.weight, out=slope[at])
    return table, room if slope is None else None


def is_slope(names: Collection[str], weight: Tensor) -> bool:
    """Whether nothing but a factor is missing from the gradient, as with a frozen head from logp's: logits are spent in
    the forward pass, and no product is computed again."""
    return set(names) == {"logp"} and not weight.requires_grad


def read(plan: Plan, table: Tensor) -> tuple[Tensor, ...]:
    """The plan's statistics out of the table."""
    return tuple(table[PLACE[name]].clone() for name in plan.names)


class Fused(torch.autograd.Function):
    """apply(hidden, weight, rows, plan) -> the plan's statistics"""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: HeadRows, plan: Plan) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        slope = torch.empty_like(hidden) if is_slope(plan.names, weight) else None
        table, ctx.room = forward(rows, plan, slope=slope, keep=True)
        ctx.plan, ctx.law = plan, (rows.temperature, rows.support)
        ctx.save_for_backward(hidden, weight, table, slope)
        return read(plan, table)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, table, slope = ctx.saved_tensors
        rows, plan = HeadRows(hidden, weight, *ctx.law), ctx.plan
        room, ctx.room = ctx.room or Room(plan), None  # its logits are spent after one pass
        given = {name: g for name, g in zip(plan.names, upstream, strict=True) if g is not None}
        if not given:
            return None, None, None, None
        if torch.is_grad_enabled():
            return *differentiable_gradients(rows, plan, given), None, None
        if slope is not None:
            return (slope * given["logp"][:, None]).to(slope.dtype), None, None, None
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return *gradients(rows, room, table, given, hidden=needs_hidden, weight=needs_weight), None, None


def gradients(
    rows: HeadRows, room: Room, table: Tensor, given: Mapping[str, Tensor], *, hidden: bool, weight: bool
) -> Grads:
    """Those of the hidden states and of the head, the ones that are asked for."""
    d_hidden = torch.empty_like(rows.hidden) if hidden else None
    d_weight, slices = None, room.plan.slices
    for at in reversed(slices):
        chunk = room.fill(rows, at, table)
        backend(chunk.logits).grad(chunk, {name: g[at] for name, g in given.items()})
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
