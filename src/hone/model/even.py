"""Attention over a list of tokens whose rows have about one length: as one table, for kernels that take nothing else.

On an H200 torch's fastest attention wants rows of one length. Lines of queries, keys and values are put into a table,
a token that rows share into each of them; what is answered is taken from the row that has the token as its own.
Shapes: U tokens in the list, n rows of W cells in the table, H query heads, K key-value heads, E head size, L a line.
"""

# Triton's constexpr takes plain numbers:
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.model.grouped import Grouped

FULL = 0.7  # the least share of the table that is no padding
COPIES = 1.5  # how many times as many pairs of tokens it may have as rows that share a prompt need


@dataclass(frozen=True, slots=True, kw_only=True)
class Even:
    """Where each cell of the table comes from, and each token's answer; -1: from nowhere."""

    shape: tuple[int, int]  # n, W
    cells: Tensor  # int32 [n W]  the token in the cell
    source: Tensor  # int32 [n W]  the token that is answered in it
    owner: Tensor  # int32 [U]  the cell that answers the token
    order: Tensor  # int32 [n W]  the cells sorted by token, and
    begin: Tensor  # int32 [U + 1]  where each token's begin

    @staticmethod
    def of(rows: Grouped) -> "Even | None":
        """None where too many cells would be empty, or copies of long prompts."""
        n, W = rounded(len(rows.lengths), parts=32), rounded(int(rows.lengths.max()), parts=8)
        pairs = (rows.own * (2 * rows.lengths - rows.own)).sum()  # twice: a row's own tokens see what is before them
        if rows.lengths.sum() < FULL * n * W or n * W * W > COPIES * pairs:
            return None
        cells, at = rows.cells(n, W), np.arange(len(rows.lengths)) * W
        owner, (order, begin) = rows.each(at).astype(np.int32), rows.sums(at)
        source = np.full(n * W, -1, np.int32)
        source[owner] = np.arange(len(owner), dtype=np.int32)
        order = np.pad(order, (0, n * W - len(order)))
        made = {"cells": cells.ravel(), "source": source, "owner": owner, "order": order, "begin": begin}
        return Even(shape=(n, W), **{name: torch.from_numpy(x) for name, x in made.items()})

    def filled(self, more: int) -> "Even":
        """With so many tokens at the list's end that are in no row."""
        owner, begin = F.pad(self.owner, (0, more), value=-1), torch.cat([self.begin, self.begin[-1:].expand(more)])
        return replace(self, owner=owner, begin=begin)

    def tensors(self) -> dict[str, Tensor]:
        """All but the shape, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shape"}

    def attend(self, q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, *, shares_keys: bool) -> Tensor:
        """Causal attention in each row, [U, H E]."""
        return self.answer(*(self._spread(x, only=x is q_UHE) for x in (q_UHE, k_UKE, v_UKE)), shares_keys=shares_keys)

    def answer(self, q_nWHE: Tensor, k_nWKE: Tensor, v_nWKE: Tensor, *, shares_keys: bool) -> Tensor:
        """The same, of what is in the table already; nobody may read queries but in the cells that answer them."""
        q, k, v = (x.transpose(1, 2) for x in (q_nWHE, k_nWKE, v_nWKE))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares_keys)
        return _Answered.apply(out.transpose(1, 2), self)  # pyright: ignore[reportReturnType]

    def _spread(self, x_UhE: Tensor, *, only: bool) -> Tensor:
        """[n, W, h, E]; only: a line is read in the one cell that answers it, though it lies in others too."""
        return _Spread.apply(x_UhE, self, only)  # pyright: ignore[reportReturnType]


def rounded(count: int, *, parts: int, finest: int = 1) -> int:
    """The least round number that holds so many, at most one part in `parts` more or the next of the finest steps: few
    come up again and again."""
    step = max(finest, 1 << max(0, (count // parts).bit_length() - 1))
    return -(-count // step) * step


class _Spread(torch.autograd.Function):
    """Lines of the list in the table."""

    @staticmethod
    def forward(ctx: Any, x_UhE: Tensor, even: Even, only: bool) -> Tensor:
        ctx.even, ctx.only = even, only
        return picked(x_UhE.flatten(1), even.cells).view(*even.shape, *x_UhE.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nWhE: Tensor) -> Any:
        even, lines = ctx.even, dy_nWhE.reshape(-1, dy_nWhE[0, 0].numel())
        dx = picked(lines, even.owner) if ctx.only else summed(lines, even.order, even.begin)
        return dx.view(-1, *dy_nWhE.shape[2:]), None, None


class _Answered(torch.autograd.Function):
    """Lines of the table in the list."""

    @staticmethod
    def forward(ctx: Any, x_nWHE: Tensor, even: Even) -> Tensor:
        ctx.even, ctx.shape = even, x_nWHE.shape
        return picked(x_nWHE.reshape(-1, x_nWHE[0, 0].numel()), even.owner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_UL: Tensor) -> Any:
        return picked(dy_UL, ctx.even.source).view(ctx.shape), None


def picked(x: Tensor, index_N: Tensor) -> Tensor:
    """Line index[i] of x as line i, zeros where it is -1, [N, L]"""
    if not has_kernels(x):
        return torch.where((index_N >= 0)[:, None], x[index_N.clamp(min=0)], 0.0)
    from hone.model.kernels.gather import COLUMNS, LINES, pick_lines

    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(len(index_N), x.shape[1])
    if y.numel():
        grid = (-(-len(y) // LINES),)
        pick_lines[grid](x, index_N, y, len(y), x.stride(0), x.shape[1], BL=LINES, BW=COLUMNS)
    return y


def summed(x: Tensor, order: Tensor, begin: Tensor) -> Tensor:
    """Line t is the sum of the lines order[begin[t]] to order[begin[t + 1]] of x, added one after the other, [T, L]"""
    tokens = len(begin) - 1
    if not has_kernels(x):
        number = torch.arange(tokens, device=x.device).repeat_interleave(begin.diff(), output_size=int(begin[-1]))
        return x.new_zeros(tokens, x.shape[1]).index_add_(0, number, x[order[: len(number)]])
    from hone.model.kernels.gather import COLUMNS, LINES, sum_lines

    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(tokens, x.shape[1])
    if y.numel():
        grid = (-(-tokens // LINES), -(-x.shape[1] // COLUMNS))
        sum_lines[grid](x, order, begin, y, tokens, x.stride(0), x.shape[1], BL=LINES, BW=COLUMNS)
    return y


def has_kernels(x: Tensor) -> bool:
    """Whether it is where Triton's kernels are; float64, which is for checking, stays in torch."""
    return x.is_cuda and x.dtype != torch.float64
