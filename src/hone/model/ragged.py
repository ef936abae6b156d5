"""Attention over rows whose tokens lie in one list without padding, where rows may share the tokens they start with.

All else in a decoder looks at one token at a time, so only here are the rows put together.
Shapes: U tokens in the list, B rows of at most W tokens, H query heads, E head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which tokens of the list each row is made of."""

    cells: Tensor  # int64 [B, W]  index into the list; any token after the row's end
    owner: Tensor  # int64 [U]     the cell of B * W, in one of the rows that have the token, where it is answered
    window: int = 0  # how many columns back a token looks; 0: all

    def attend(self, q_1HUE: Tensor, k_1KUE: Tensor, v_1KUE: Tensor, *, shares_keys: bool) -> Tensor:
        """Causal attention in each row, [1, U, H E]."""
        q, k, v = (self._in_rows(x) for x in (q_1HUE, k_1KUE, v_1KUE))
        mask = self._band(q.device) if self.window and self.window < self.cells.shape[1] else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shares_keys
        )  # fmt: skip
        flat = out.transpose(1, 2).reshape(self.cells.numel(), -1)
        return F.embedding(self.owner, flat)[None]

    def _in_rows(self, x_1HUE: Tensor) -> Tensor:
        """[B, H, W, E]; as an embedding, whose gradient adds up tokens that rows share and is made in parallel."""
        _, heads, _, size = x_1HUE.shape
        flat = x_1HUE[0].transpose(0, 1).reshape(-1, heads * size)
        return F.embedding(self.cells, flat).unflatten(-1, (heads, size)).transpose(1, 2)

    def _band(self, device: torch.device) -> Tensor:
        """True where a column may look: not later, and not too far back, [W, W]"""
        at = torch.arange(self.cells.shape[1], device=device)
        far = at[:, None] - at
        return (far >= 0) & (far < self.window)
