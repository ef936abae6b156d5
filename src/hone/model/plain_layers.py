"""The decoder's layers over a slab: packed tokens in, hidden states out. Nothing is padded but the rows' memory.

Shapes: N tokens of any rows, H query heads, K key-value heads, E head size, S columns of memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.decoder import Attention, Decoder, Layer
from hone.model.plain_slab import Slab

Attend = Callable[[int, Tensor], Tensor]  # layer, queries [N, H, E] -> [N, H E]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Columns start to end of a row, read at once."""

    row: int
    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Layers(Protocol):
    """What a runner needs of a model with memory."""

    slab: Slab

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        """Put the pieces into memory; the hidden state after each, [pieces, D]."""
        ...

    def step(self, tokens: Tensor, positions: Tensor, slots: Tensor, columns: int) -> Tensor:
        """One token for each of the first rows, which see `columns` at most; hidden states [B, D]."""
        ...


class PlainLayers:
    """The learner's own modules, called on packed tokens."""

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        self.decoder, config = decoder, decoder.config
        self.slab = Slab(config, rows, capacity, like=decoder.model.embed_tokens.weight)
        self.H, self.K, self.E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.windows = config.windows or (0,) * config.num_hidden_layers
        if capacity > len(decoder.cos):
            decoder.rotations(capacity, device=decoder.device)

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        """Put the pieces into memory; the hidden state after each, [pieces, D]."""
        device = self.decoder.device
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].start, pieces[i].end))
        placed = [pieces[i] for i in order]
        tokens = torch.tensor([t for p in placed for t in p.tokens], device=device)
        rows = torch.tensor([p.row for p in placed for _ in p.tokens], device=device)
        positions = torch.tensor([c for p in placed for c in range(p.start, p.end)], device=device)
        attend = _Causal(self, placed)
        hidden = self._run(tokens, positions, self.slab.slots(rows, positions), attend)
        last = torch.tensor([len(p.tokens) for p in placed], device=device).cumsum(0) - 1
        back = torch.empty_like(last)
        back[torch.tensor(order, device=device)] = last
        return hidden[back]

    def step(self, tokens: Tensor, positions: Tensor, slots: Tensor, columns: int) -> Tensor:
        """One token for each of the first rows, which see `columns` at most; hidden states [B, D]."""
        masks = {w: _visible(positions, columns, w, self.slab.layers[0].dtype) for w in set(self.windows)}

        def attend(layer: int, q: Tensor) -> Tensor:
            B = len(q)
            k, v = self.slab.read(layer, slice(0, B), columns)
            # the G queries that share a key stand where a sequence's tokens would: no key is copied
            shared = q.view(B, self.K, -1, self.E)
            return F.scaled_dot_product_attention(shared, k, v, attn_mask=masks[self.windows[layer]]).reshape(B, -1)

        return self._run(tokens, positions, slots, attend)

    def _run(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        backbone = self.decoder.model
        x = backbone.embed_tokens(tokens)
        cos, sin = (t[positions][:, None].to(x.dtype) for t in (self.decoder.cos, self.decoder.sin))
        half = self.E // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        for i, layer in enumerate(cast(Iterable[Layer], backbone.layers)):
            q, kv = self._project(layer.self_attn, layer.input_layernorm(x), cos, sin)
            self.slab.write(i, slots, kv)
            x = x + layer.self_attn.o_proj(attend(i, q))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return backbone.norm(x)

    def _project(self, attention: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [N, H, E], rotated, and keys and values side by side [N, 2 K E]."""
        N = len(x)
        q = attention.q_proj(x).view(N, self.H, self.E)
        k, v = attention.k_proj(x).view(N, self.K, self.E), attention.v_proj(x)
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return q, torch.cat([k.view(N, -1), v], -1)


class _Causal:
    """Attention of packed pieces, those of one start and length together: columns see those before them."""

    def __init__(self, layers: PlainLayers, pieces: Sequence[Piece]) -> None:
        self.layers = layers
        self.runs: list[tuple[int, Tensor, Piece]] = []  # first token, rows, one of the pieces
        at = 0
        for piece, rows in _alike(pieces):
            self.runs.append((at, torch.tensor(rows, device=layers.decoder.device), piece))
            at += len(rows) * len(piece.tokens)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        K, E, window = self.layers.K, self.layers.E, self.layers.windows[layer]
        out = q.new_empty(len(q), q.shape[1] * E)
        for at, rows, piece in self.runs:
            n, T = len(rows), len(piece.tokens)
            k, v = self.layers.slab.read(layer, rows, piece.end)
            mask = None
            if (T > 1 and piece.start) or 0 < window < piece.end:
                columns = torch.arange(piece.start, piece.end, device=q.device)
                mask = _visible(columns, piece.end, window, q.dtype).view(1, 1, T, -1)
            mine = q[at : at + n * T].view(n, T, -1, E).transpose(1, 2)
            seen = F.scaled_dot_product_attention(
                mine, k, v, attn_mask=mask, is_causal=mask is None and T > 1, enable_gqa=mine.shape[1] != K
            )
            out[at : at + n * T] = seen.transpose(1, 2).reshape(n * T, -1)
        return out


def _alike(pieces: Sequence[Piece]) -> list[tuple[Piece, list[int]]]:
    """Neighbours of one start and length, and their rows."""
    found: list[tuple[Piece, list[int]]] = []
    for piece in pieces:
        if found and (found[-1][0].start, found[-1][0].end) == (piece.start, piece.end):
            found[-1][1].append(piece.row)
        else:
            found.append((piece, [piece.row]))
    return found


def _visible(positions: Tensor, columns: int, window: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, 1, S], 0 where the position sees the column and -inf where it does not."""
    far = positions[:, None] - torch.arange(columns, device=positions.device)
    seen = far >= 0 if not window else (far >= 0) & (far < window)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None, None]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of each head; sin has its first half negated."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
