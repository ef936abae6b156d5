"""The decoder's layers over a slab: packed tokens in, hidden states out. Nothing is padded but the rows' memory.

Shapes: N tokens of any rows, D hidden, H query heads, K key-value heads, E head size, M of the MLP.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.decoder import Decoder
from hone.model.plain_attention import Causal, Decode, Piece
from hone.model.plain_product import add_product, product
from hone.model.plain_slab import Slab
from hone.model.plain_weights import Block, Linear, Weights

Attend = Callable[[int, Tensor, Tensor], Tensor]  # layer, q [N, H, E], keys and values [N, 2 K, E] -> [N, H E]


class PlainLayers:
    """The learner's own weights, multiplied with packed tokens."""

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        self.decoder, config = decoder, decoder.config
        self.slab = Slab(config, rows, capacity, like=decoder.model.embed_tokens.weight)
        self.weights = Weights(decoder)
        self.H, self.K, self.E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps, self.windows = config.rms_norm_eps, config.windows or (0,) * config.num_hidden_layers
        if capacity > len(decoder.cos):
            decoder.rotations(capacity, device=decoder.device)

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        """Put the pieces into memory; the hidden state after each, [pieces, D]."""
        self.weights.find()
        device = self.decoder.device
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].start, pieces[i].end))
        placed = [pieces[i] for i in order]
        tokens = torch.tensor([t for p in placed for t in p.tokens], device=device)
        rows = torch.tensor([p.row for p in placed for _ in p.tokens], device=device)
        positions = torch.tensor([c for p in placed for c in range(p.start, p.end)], device=device)
        attend = Causal(self.slab, self.windows, placed)
        x = self._run(tokens, positions, self.slab.slots(rows, positions), attend)
        last = torch.tensor([len(p.tokens) for p in placed], device=device).cumsum(0) - 1
        back = torch.empty_like(last)
        back[torch.tensor(order, device=device)] = last
        return self._norm(x[back], self.decoder.model.norm.weight)

    def step(self, tokens: Tensor, positions: Tensor, written: Tensor, *, columns: int, even: bool) -> Tensor:
        """One token for each of the first rows, into the columns `written`; hidden states [B, D].

        columns: what the longest row sees. even: every row that counts sees as much.
        """
        self.weights.check()
        attend = Decode(self.slab, self.windows, positions, columns=columns, even=even)
        slots = self.slab.slots(slice(0, len(tokens)), written)
        return self._norm(self._run(tokens, positions, slots, attend), self.decoder.model.norm.weight)

    def _run(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        x = self.decoder.model.embed_tokens(tokens)
        cos, sin = (t.index_select(0, positions)[:, None].to(x.dtype) for t in (self.decoder.cos, self.decoder.sin))
        sin[..., : self.E // 2].neg_()
        for i, block in enumerate(self.weights.blocks):
            qkv = self._project(block, self._norm(x, block.before), cos, sin)
            q, kv = qkv[:, : self.H], qkv[:, self.H :]
            self.slab.write(i, slots, kv)
            _add(x, block.o, attend(i, q, kv))
            gate_up = _apply(block.gate_up, self._norm(x, block.after))
            gate, up = gate_up.chunk(2, dim=1)
            _add(x, block.down, F.silu(gate).mul_(up))
        return x

    def _project(self, block: Block, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys, rotated, and values: [N, H + 2 K, E]."""
        qkv = _apply(block.qkv, h).contiguous().view(len(h), -1, self.E)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = qkv[:, : self.H], qkv[:, self.H : self.H + self.K]
            q.copy_(self._norm(q, block.q_norm))
            k.copy_(self._norm(k, block.k_norm))
        rotate_(qkv[:, : self.H + self.K], cos, sin)
        return qkv

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64):
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # the same in fewer steps: x / sqrt(|x|^2 / D + eps) * weight
        size = torch.linalg.vecdot(x, x)
        scale = size.mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return (x * scale[..., None]).mul_(weight)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of each head; sin has its first half negated."""
    other = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(other, sin)


def _apply(layer: Linear, x: Tensor) -> Tensor:
    out = product(layer.weight, x)
    if layer.bias is not None:
        out += layer.bias
    return _adapted(out, layer, x)


def _add(x: Tensor, layer: Linear, a: Tensor) -> None:
    """x += what the layer gives for a"""
    add_product(x, layer.weight, a)
    if layer.bias is not None:
        x += layer.bias
    _adapted(x, layer, a)


def _adapted(out: Tensor, layer: Linear, x: Tensor) -> Tensor:
    """Add what the adapters that are on give."""
    for at, adapted in layer.adapted:
        if adapted.enabled and adapted.adapter is not None:
            out[:, at : at + len(adapted.base.weight)] += adapted.adapter(x)
    return out
