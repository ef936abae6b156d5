"""Attention over a list of tokens by torch's own kernels for rows of different lengths, on a GPU in half precision.

A row's queries are the tokens it has alone, in the list already; its keys are all its tokens, gathered from the list
where rows share some. The mask is causal from the end: the last query sees every key.
Shapes: U tokens in the list, R rows, S keys of all rows, H query heads, K key-value heads, E head size.
"""

# Triton's constexpr takes plain numbers:
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the rows' queries and keys lie."""

    cells: Tensor  # int64 [S]  index into the list, row by row
    order: Tensor  # int64 [S]  the cells sorted by token, and
    begin: Tensor  # int32 [U + 1]  where each token's begin
    queries: Tensor  # int32 [R + 1]  ends of the rows' own tokens in the list
    keys: Tensor  # int32 [R + 1]  ends of the rows in cells
    most_queries: int
    most_keys: int
    shares: bool  # whether any token is in several rows

    @staticmethod
    def of(cells_BW: NDArray[np.int64], filled_BW: NDArray[np.bool_], own_BW: NDArray[np.bool_]) -> "Spans":
        """From the table of rows: the list's index of each cell, which cells there are, which are the row's alone.

        A row's own cells are numbered as they lie, and before any copy of them.
        """
        cells, first = cells_BW[filled_BW], own_BW[filled_BW]
        own, lengths = own_BW.sum(-1), filled_BW.sum(-1)
        begin = _ends(np.bincount(cells))
        copies = np.flatnonzero(~first)
        order, again = np.empty_like(cells), np.ones(len(cells), np.bool_)
        again[begin[:-1]] = False
        order[begin[:-1]] = np.flatnonzero(first)
        order[again] = copies[cells[copies].argsort(kind="stable")]
        return Spans(
            cells=torch.from_numpy(cells),
            order=torch.from_numpy(order),
            begin=torch.from_numpy(begin),
            queries=torch.from_numpy(_ends(own)),
            keys=torch.from_numpy(_ends(lengths)),
            most_queries=int(own.max()),
            most_keys=int(lengths.max()),
            shares=len(copies) > 0,
        )


def _ends(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], counts.cumsum()]).astype(np.int32)


def usable(q: Tensor) -> bool:
    """Whether torch has kernels for it."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def attend(q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, *, window: int) -> Tensor:
    """Causal attention in each row, [U, H, E]; window: how many tokens back one looks, 0: all."""
    if spans.shares:
        k_UKE, v_UKE = gathered(k_UKE, spans), gathered(v_UKE, spans)
    how: dict[str, Any] = {"window_size": (window - 1 if window else -1, 0)}
    kernel, takes_gqa = _kernel()
    how |= {"enable_gqa": True} if takes_gqa else {}
    return kernel(q_UHE, k_UKE, v_UKE, spans.queries, spans.keys, spans.most_queries, spans.most_keys, **how)


@cache
def _kernel() -> tuple[Any, bool]:
    """torch's function, and whether it has to be told that queries share keys."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def gathered(x: Tensor, spans: Spans) -> Tensor:
    """The lines of x, one for each token, in the order of the cells."""
    return _Gathered.apply(x, spans)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: Spans) -> Tensor:
        ctx.spans = spans
        return x.index_select(0, spans.cells)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return summed(dy.contiguous(), ctx.spans), None


def summed(dy: Tensor, spans: Spans) -> Tensor:
    """Each token's sum over the cells that hold it, added in the order of the rows"""
    tokens = len(spans.begin) - 1
    if not dy.is_cuda or dy.dtype == torch.float64:
        return dy.new_zeros(tokens, *dy.shape[1:]).index_add_(0, spans.cells, dy)
    from hone.model.kernels.gather import sum_lines

    dx, width = dy.new_empty(tokens, *dy.shape[1:]), dy[0].numel()
    sum_lines[(tokens, -(-width // 512))](dy, spans.order, spans.begin, dx, width, BW=512)
    return dx
