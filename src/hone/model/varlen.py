"""Attention over a list of tokens by torch's own kernels for rows of different lengths, on a GPU in half precision.

A row's queries are the tokens it has alone, in the list already; its keys are all its tokens, gathered from the list
where rows share some. The mask is causal from the end: the last query sees every key.
Shapes: U tokens in the list, R rows, S keys of all rows, H query heads, K key-value heads, E head size.
"""

# pyright: reportIncompatibleMethodOverride=false
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.model.even import summed
from hone.model.grouped import Grouped, ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the rows' queries and keys lie."""

    cells: Tensor  # int32 [S]  index into the list, row by row
    order: Tensor  # int32 [S]  the cells sorted by token, and
    begin: Tensor  # int32 [U + 1]  where each token's begin
    queries: Tensor  # int32 [R + 1]  ends of the rows' own tokens in the list
    keys: Tensor  # int32 [R + 1]  ends of the rows in cells
    most_queries: int
    most_keys: int
    shares: bool  # whether any token is in several rows

    @staticmethod
    def of(rows: Grouped, cells: NDArray[np.int32]) -> "Spans":
        """cells: the list's index of all cells, row by row."""
        keys = ends(rows.lengths)
        order, begin = rows.sums(keys[:-1])
        return Spans(
            cells=torch.from_numpy(cells),
            order=torch.from_numpy(order),
            begin=torch.from_numpy(begin),
            queries=torch.from_numpy(rows.start.astype(np.int32)),
            keys=torch.from_numpy(keys.astype(np.int32)),
            most_queries=int(rows.own.max()),
            most_keys=int(rows.lengths.max()),
            shares=bool(rows.common.any()),
        )


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
        spans = ctx.spans
        return summed(dy.flatten(1), spans.order, spans.begin).view(-1, *dy.shape[1:]), None
