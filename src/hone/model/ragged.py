"""Attention over rows whose tokens lie in one list without padding, where rows may share the tokens they start with.

All else in a decoder looks at one token at a time, so only here are the rows put together: those of about one length
in a table, so that little of it is padding.
Shapes: U tokens in the list, S cells of all tables, n rows of W cells in one of them, H query heads, E head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model import varlen
from hone.model.even import Even
from hone.model.twice import once
from hone.model.varlen import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which tokens of the list each row is made of, table by table."""

    cells: Tensor  # int64 [S]  index into the list; any token after the row's end; empty where `spans` has them
    shapes: tuple[tuple[int, int], ...]  # (n, W) of each table
    owner: Tensor  # int64 [U]  the cell, in one of the rows that have the token, where it is answered; empty likewise
    spans: Spans | Even  # the same rows for a GPU's kernels: of different lengths, or of one
    window: int = 0  # how many columns back a token looks; 0: all
    asked: Tensor | None = None  # bool [U]  whose hidden states are read; those of others may be anything

    def attend(self, q_1HUE: Tensor, k_1KUE: Tensor, v_1KUE: Tensor, *, shares_keys: bool) -> Tensor:
        """Causal attention in each row, [1, U, H E]."""
        if once() and (isinstance(self.spans, Even) or varlen.usable(q_1HUE)):
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q_1HUE, k_1KUE, v_1KUE))  # x[0] copies its gradient
            if isinstance(self.spans, Even):
                return self.spans.attend(q, k, v, shares_keys=shares_keys)[None]
            return varlen.attend(q, k, v, self.spans, window=self.window).flatten(1)[None]
        tables = zip(*(self._tables(x) for x in (q_1HUE, k_1KUE, v_1KUE)), strict=True)
        out = torch.cat([self._table(q, k, v, shares_keys) for q, k, v in tables])
        return F.embedding(self._named("owner"), out)[None]

    def _named(self, name: str) -> Tensor:
        """`cells` or `owner`, wherever they are."""
        return getattr(self.spans, name).clamp(min=0) if isinstance(self.spans, Even) else getattr(self, name)

    def _table(self, q_nHWE: Tensor, k_nKWE: Tensor, v_nKWE: Tensor, shares_keys: bool) -> Tensor:
        """[n W, H E]"""
        n, _, W, _ = q_nHWE.shape
        mask = self._band(W, q_nHWE.device) if 0 < self.window < W else None
        out = F.scaled_dot_product_attention(
            q_nHWE, k_nKWE, v_nKWE, attn_mask=mask, is_causal=mask is None, enable_gqa=shares_keys
        )
        return out.transpose(1, 2).reshape(n * W, -1)

    def _tables(self, x_1HUE: Tensor) -> Iterator[Tensor]:
        """[n, H, W, E] each; by an embedding, whose gradient adds up tokens that rows share and is made in parallel."""
        _, heads, _, size = x_1HUE.shape
        flat = x_1HUE[0].transpose(0, 1).reshape(-1, heads * size)
        parts = F.embedding(self._named("cells"), flat).split([n * W for n, W in self.shapes])
        return (part.view(*shape, heads, size).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True))

    def _band(self, W: int, device: torch.device) -> Tensor:
        """True where a column may look: not later, and not too far back, [W, W]"""
        at = torch.arange(W, device=device)
        far = at[:, None] - at
        return (far >= 0) & (far < self.window)
