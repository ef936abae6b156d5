"""Attention over rows whose tokens lie in one list without padding, where rows may share the tokens they start with.

All else in a decoder looks at one token at a time, so only here are the rows put together: by kernels that find them
in the list (model/backends/fused/shared_attention.py), or else those of about one length in a table, so that little of it is padding.
Shapes: U tokens in the list, S cells of all tables, n rows of W cells in one of them, H query heads, E head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.backends.fused import shared_attention
from hone.model.layout.spans import Spans, Tiles
from hone.model.second_order import once


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The rows put together by length."""

    cells: Tensor  # int64 [S]  index into the list; any token after the row's end
    shapes: tuple[tuple[int, int], ...]  # (n, W) of each table
    owner: Tensor  # int64 [U]  the cell, in one of the rows that have the token, where it is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which tokens of the list each row is made of."""

    spans: Spans
    by: Tables | Tiles  # how they are attended to; Tiles: by a GPU's kernels
    window: int = 0  # how many columns back a token looks; 0: all
    asked: Tensor | None = None  # bool [U]  whose hidden states are read; those of others may be anything

    def attend(self, q_1HUE: Tensor, k_1KUE: Tensor, v_1KUE: Tensor, *, shares_keys: bool) -> Tensor:
        """Causal attention in each row, [1, U, H E]."""
        by = self.by
        if isinstance(by, Tiles):
            if once() and shared_attention.usable(q_1HUE.device, q_1HUE.dtype, q_1HUE.shape[3]):
                q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q_1HUE, k_1KUE, v_1KUE))  # x[0] copies its gradient
                return shared_attention.attend(q, k, v, self.spans, by, window=self.window).flatten(1)[None]
            by = _one_table(self.spans, q_1HUE.shape[2])  # a critic's decoder may have heads of another size
        tables = zip(*(_tables(x, by) for x in (q_1HUE, k_1KUE, v_1KUE)), strict=True)
        out = torch.cat([self._table(q, k, v, shares_keys) for q, k, v in tables])
        return F.embedding(by.owner, out)[None]

    def _table(self, q_nHWE: Tensor, k_nKWE: Tensor, v_nKWE: Tensor, shares_keys: bool) -> Tensor:
        """[n W, H E]"""
        n, _, W, _ = q_nHWE.shape
        mask = self._band(W, q_nHWE.device) if 0 < self.window < W else None
        out = F.scaled_dot_product_attention(
            q_nHWE, k_nKWE, v_nKWE, attn_mask=mask, is_causal=mask is None, enable_gqa=shares_keys
        )
        return out.transpose(1, 2).reshape(n * W, -1)

    def _band(self, W: int, device: torch.device) -> Tensor:
        """True where a column may look: not later, and not too far back, [W, W]"""
        at = torch.arange(W, device=device)
        far = at[:, None] - at
        return (far >= 0) & (far < self.window)


def _tables(x_1HUE: Tensor, by: Tables) -> Iterator[Tensor]:
    """[n, H, W, E] each; by an embedding, whose gradient adds up tokens that rows share and is made in parallel."""
    _, heads, _, size = x_1HUE.shape
    flat = x_1HUE[0].transpose(0, 1).reshape(-1, heads * size)
    parts = F.embedding(by.cells, flat).split([n * W for n, W in by.shapes])
    return (part.view(*shape, heads, size).transpose(1, 2) for part, shape in zip(parts, by.shapes, strict=True))


def _one_table(spans: Spans, tokens: int) -> Tables:
    """All rows that ask anything in one, as wide as the longest: where kernels will not do."""
    asks = (spans.start.diff() > 0) & (spans.start[:-1] < tokens)
    start, end, prefix, common = (
        x[asks].long()[:, None] for x in (spans.start[:-1], spans.start[1:], spans.prefix, spans.common)
    )
    length = end - start + common
    W = int(length.max())
    column = torch.arange(W, device=start.device)
    cells = torch.where(column < common, prefix + column, start + column - common)
    own = (column >= common) & (column < length) & (cells < tokens)
    owner = torch.zeros(tokens, dtype=torch.int64, device=start.device)
    owner[cells[own]] = own.flatten().nonzero().squeeze(1)
    return Tables(cells=cells.clamp(max=tokens - 1).flatten(), shapes=((len(common), W),), owner=owner)
