"""Attention over a slab: one new token for each row, or pieces of prompts.

Shapes: N tokens, B rows, H query heads, K key-value heads, G = H / K, E head size, S columns of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.engine.runners.torch.kv_cache import Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Columns `start` to `end` of a row, read at once."""

    row: int
    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def packed(pieces: Sequence[Piece], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token, row and position of every token of the pieces, [N] each."""
    tokens = [t for p in pieces for t in p.tokens]
    rows = [p.row for p in pieces for _ in p.tokens]
    positions = [c for p in pieces for c in range(p.start, p.end)]
    table = torch.tensor([tokens, rows, positions], device=device)
    return table[0], table[1], table[2]


def visible(positions: Tensor, columns: int, window: int, dtype: torch.dtype) -> Tensor:
    """[N, S], 0 where the position sees the column and -inf where it does not."""
    far = positions[:, None] - torch.arange(columns, device=positions.device)
    hidden = far < 0 if not window else (far < 0) | (far >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


class Decode:
    """Each of the first B rows looks at the columns up to its own position."""

    def __init__(self, slab: Slab, windows: Sequence[int], positions: Tensor, *, columns: int, even: bool) -> None:
        """columns: what the longest row sees. even: every row that counts sees as much."""
        self.slab, self.windows, self.columns = slab, windows, columns
        dtype = slab.layers[0].dtype
        self.masks: dict[int, Tensor | None] = {
            w: None if even and not 0 < w < columns else visible(positions, columns, w, dtype)[:, None]
            for w in set(windows)
        }
        # batched products keep every score, which half precision would round
        self.exact = slab.layers[0].device.type == "cpu" and dtype in (torch.float32, torch.float64)

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Queries [B, H, E], keys and values in the slab already -> [B, H E]."""
        B, _, E = q.shape
        mask = self.masks[self.windows[layer]]
        if self.exact:
            k, v = self.slab.heads(layer, B, self.columns)
            q = q.reshape(len(k), -1, E)
            scores = q.new_empty(*q.shape[:2], self.columns).baddbmm_(q, k.mT, beta=0, alpha=E**-0.5)
            if mask is not None:
                scores.view(B, -1, self.columns).add_(mask)
            return torch.bmm(scores.softmax(-1), v).view(B, -1)
        k, v = self.slab.read(layer, slice(0, B), self.columns)
        mask = None if mask is None else mask[:, None]
        # the G queries that share a key stand where a sequence's tokens would: no key is copied
        return F.scaled_dot_product_attention(q.reshape(B, k.shape[1], -1, E), k, v, attn_mask=mask).view(B, -1)


class Causal:
    """Packed pieces, those of one start and length together: each column sees those before it."""

    def __init__(self, slab: Slab, windows: Sequence[int], pieces: Sequence[Piece]) -> None:
        self.slab, self.windows = slab, windows
        self.runs: list[tuple[int, Tensor, Piece]] = []  # first token, rows, one of the pieces
        at = 0
        for piece, rows in _alike(pieces):
            self.runs.append((at, torch.tensor(rows, device=slab.layers[0].device), piece))
            at += len(rows) * len(piece.tokens)

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Queries [N, H, E], keys and values [N, 2 K, E], which are in the slab too -> [N, H E]."""
        window, shares = self.windows[layer], 2 * q.shape[1] != kv.shape[1]
        out = torch.empty_like(q)
        for at, rows, piece in self.runs:
            n, T = len(rows), len(piece.tokens)
            here = slice(at, at + n * T)
            if piece.start:
                k, v = self.slab.read(layer, rows, piece.end)
            else:
                k, v = kv[here].unflatten(0, (n, T)).transpose(1, 2).chunk(2, dim=1)
            mask = None
            if (T > 1 and piece.start) or 0 < window < piece.end:
                mask = visible(torch.arange(piece.start, piece.end, device=q.device), piece.end, window, q.dtype)
            seen = F.scaled_dot_product_attention(
                q[here].unflatten(0, (n, T)).transpose(1, 2), k, v, attn_mask=mask,
                is_causal=mask is None and T > 1, enable_gqa=shares,
            )  # fmt: skip
            out[here] = seen.transpose(1, 2).flatten(0, 1)
        return out.flatten(1)


def _alike(pieces: Sequence[Piece]) -> list[tuple[Piece, list[int]]]:
    """Neighbours of one start and length, and their rows."""
    found: list[tuple[Piece, list[int]]] = []
    for piece in pieces:
        if found and (found[-1][0].start, found[-1][0].end) == (piece.start, piece.end):
            found[-1][1].append(piece.row)
        else:
            found.append((piece, [piece.row]))
    return found
