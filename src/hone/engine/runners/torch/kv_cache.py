"""The KV cache of the rows being decoded, and attention over it: one new token for each row, or chunks of prompts.

It is allocated once, as a slab: a row is its own block.
Shapes: N tokens, B rows, H query heads, K key-value heads, G = H / K, E head size, S columns of memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.config import DecoderConfig


class Slab:
    """A tensor a layer, [2, rows, K, columns, E]: keys, values.

    by_column: the heads of a column are neighbours in memory, not the columns of a head.
    """

    def __init__(
        self, config: DecoderConfig, rows: int, columns: int, *, like: Tensor, by_column: bool = False
    ) -> None:
        K, E = config.num_key_value_heads, config.head_dim
        shape = (2, rows, columns, K, E) if by_column else (2, rows, K, columns, E)
        self.memory = [_zeros(shape, like) for _ in range(config.num_hidden_layers)]
        self.layers = [x.transpose(2, 3) for x in self.memory] if by_column else self.memory
        self._lines = [x.view(-1, E) for x in self.memory]
        self._step, head = (K, 1) if by_column else (1, columns)  # lines from a column, and a head, to the next
        row = torch.arange(rows)[:, None, None] + rows * torch.arange(2)[:, None]  # of keys, of values
        self._first = (row * K * columns + torch.arange(K) * head).flatten(1).to(like.device)  # [rows, 2 K]
        self.lead = np.arange(rows)  # [rows] another row with the same first columns, where it may read them
        self.common = np.zeros(rows, dtype=np.int64)  # [rows] how many

    def slots(self, rows: slice | Tensor, columns: Tensor) -> Tensor:
        """Where `write` puts a token: a line for each head's key, and for its value, [N 2 K]."""
        return (self._first[rows] + self._step * columns[:, None]).flatten()

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Keys and values of N tokens, [N, 2 K, E]."""
        self._lines[layer].index_copy_(0, slots, kv.reshape(len(slots), -1))

    def read(self, layer: int, rows: slice | Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first columns of some rows, [B, K, columns, E] both."""
        k, v = self.layers[layer][:, :, :, :columns][:, rows]
        return k, v

    def heads(self, layer: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """The same of the first rows, a head a matrix: [B K, columns, E] both; no number copied but `by_column`."""
        x = self.layers[layer][:, :rows, :, :columns].flatten(1, 2)
        return x[0], x[1]

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """The first columns of a row into other rows."""
        others = [t for t in targets if t != source]
        if not columns or not others:
            return
        for rows in _runs(others):
            for x in self.layers:
                x[:, rows, :, :columns] = x[:, source : source + 1, :, :columns]
        self.written([(row, 0) for row in others])
        shared = min(self.common[source], columns)  # a copy of a copy leads to the first one
        self.lead[others], self.common[others] = (self.lead[source], shared) if shared else (source, columns)

    def clear(self, rows: Sequence[int]) -> None:
        """Zero all that the rows hold: a weight of 0 does not hide a number that is not finite."""
        for x in self.layers:
            x[:, list(rows)] = 0
        self.written([(row, 0) for row in rows])

    def written(self, starts: Sequence[tuple[int, int]]) -> None:
        """Note that rows were written from these columns on. A row that shared one of them reads its own copy again."""
        first = np.full(len(self.lead), np.iinfo(np.int64).max)
        for row, start in starts:
            first[row] = min(first[row], start)
        alone = (self.common > first) | (self.common > first[self.lead])
        self.lead[alone], self.common[alone] = np.flatnonzero(alone), 0

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.layers)


def _runs(rows: Iterable[int]) -> list[slice]:
    """Rows as stretches of neighbours, which are written faster than rows by number."""
    found: list[slice] = []
    for r in sorted(rows):
        if found and found[-1].stop == r:
            found[-1] = slice(found[-1].start, r + 1)
        else:
            found.append(slice(r, r + 1))
    return found


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """On a CPU numpy's zeros, whose memory is taken when it is first written: long contexts are seldom filled."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = like.element_size() * int(np.prod(shape))
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChunk:
    """Columns `start` to `end` of a row, read at once."""

    row: int
    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def pack_tokens(pieces: Sequence[RowChunk], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
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


class DecodeAttention:
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


class PrefillAttention:
    """Packed pieces, those of one start and length together: each column sees those before it."""

    def __init__(self, slab: Slab, windows: Sequence[int], pieces: Sequence[RowChunk]) -> None:
        self.slab, self.windows = slab, windows
        self.runs: list[tuple[int, Tensor, RowChunk]] = []  # first token, rows, one of the pieces
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


def _alike(pieces: Sequence[RowChunk]) -> list[tuple[RowChunk, list[int]]]:
    """Neighbours of one start and length, and their rows."""
    found: list[tuple[RowChunk, list[int]]] = []
    for piece in pieces:
        if found and (found[-1][0].start, found[-1][0].end) == (piece.start, piece.end):
            found[-1][1].append(piece.row)
        else:
            found.append((piece, [piece.row]))
    return found
