"""The decoder's layers over a slab: packed tokens in, hidden states out. Nothing is padded but the rows' memory.

The weights are the learner's own tensors, found again when they have moved. Products take them as they lie in memory,
in the order that a CPU does fastest at a few rows.
Shapes: N tokens of any rows, D hidden, H query heads, K key-value heads, E head size, M of the MLP.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.engine.runners.torch.kv_cache import DecodeAttention, PrefillAttention, RowChunk, Slab, pack_tokens
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder, Layer
from hone.model.kernels.fused_weights import layer_weights, weights_of
from hone.model.lora import LoRALinear

LARGE = 1 << 18  # numbers in a weight from which oneDNN is ahead of MKL
FEW = 128  # rows up to which the weight goes first: oneDNN repacks its second operand, so that is the smaller one

_onednn = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None


@dataclass(frozen=True, slots=True)
class Linear:
    """One or more linear layers that read the same input, as one."""

    weight: Tensor
    bias: Tensor | None
    adapted: tuple[tuple[int, LoRALinear], ...]  # layers with adapters, and where their outputs begin

    @classmethod
    def of(cls, layers: Sequence[nn.Module], weights: tuple[Tensor, Tensor | None]) -> "Linear":
        """`weights` are those of the layers side by side."""
        adapted, at = list[tuple[int, LoRALinear]](), 0
        for layer in layers:
            if isinstance(layer, LoRALinear):
                adapted.append((at, layer))
            at += (layer.base if isinstance(layer, LoRALinear) else cast(nn.Linear, layer)).out_features
        return cls(weights[0].detach(), None if weights[1] is None else weights[1].detach(), tuple(adapted))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    before: Tensor  # weight of the norm before the attention
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    after: Tensor  # of the norm before the MLP
    gate_up: Linear
    down: Linear


def find_weights(layer: Layer) -> LayerWeights:
    """The layer's weights, side by side where they read one input."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, out, gate_up, down = layer_weights(layer)
    return LayerWeights(
        before=layer.input_layernorm.weight.detach(),
        qkv=Linear.of((attention.q_proj, attention.k_proj, attention.v_proj), qkv),
        q_norm=None if attention.q_norm is None else attention.q_norm.weight.detach(),
        k_norm=None if attention.k_norm is None else attention.k_norm.weight.detach(),
        o=Linear.of((attention.o_proj,), out),
        after=layer.post_attention_layernorm.weight.detach(),
        gate_up=Linear.of((mlp.gate_proj, mlp.up_proj), gate_up),
        down=Linear.of((mlp.down_proj,), down),
    )


class Weights:
    """The blocks of a decoder. An optimiser's step in place is seen at once; a parameter that got other memory is
    found by `check`."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.blocks: list[LayerWeights] = []
        self.head: Linear | None = None
        self.parameters: list[Tensor] = []
        self.places: list[int] = []

    def find(self) -> None:
        """Read them from the modules, which may be others than before."""
        with torch.inference_mode(False):
            self.blocks = [find_weights(layer) for layer in cast(Iterable[Layer], self.decoder.model.layers)]
            self.head = Linear.of((self.decoder.lm_head,), weights_of((self.decoder.lm_head,)))
            self.parameters = [*self.decoder.model.parameters(), self.head.weight]
            self.places = [p.data_ptr() for p in self.parameters]

    def check(self) -> None:
        """Find them again if any has moved."""
        if [p.data_ptr() for p in self.parameters] != self.places:
            self.find()


def product(weight: Tensor, x: Tensor, *, rows: bool = False) -> Tensor:
    """x W^T, [N, out]. Without `rows` it may lie in memory as [out, N]."""
    if _by_onednn(weight, x):
        assert _onednn is not None
        if len(x) > FEW:
            return _onednn(x, weight, None, "none", [], "")
        out = _onednn(weight, x, None, "none", [], "").t()
        return out.contiguous() if rows else out
    if x.device.type == "cpu" and x.dtype == torch.float32 and not rows:
        return torch.mm(weight, x.t()).t()
    return F.linear(x, weight)


def add_product(x: Tensor, weight: Tensor, a: Tensor) -> None:
    """x += a W^T"""
    if _by_onednn(weight, a):
        x += product(weight, a)
    else:
        x.addmm_(a, weight.t())


def _by_onednn(weight: Tensor, x: Tensor) -> bool:
    return _onednn is not None and x.device.type == "cpu" and x.dtype == torch.float32 and weight.numel() >= LARGE


Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # logits [B, V], u [B] -> token, log-prob
Attend = Callable[[int, Tensor, Tensor], Tensor]  # layer, q [N, H, E], keys and values [N, 2 K, E] -> [N, H E]


class TorchLayers:
    """The learner's own weights, multiplied with packed tokens."""

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        self.decoder, config = decoder, decoder.config
        # the column after the last one takes what nobody reads
        columns, like = self.columns(capacity + 1), decoder.model.embed_tokens.weight
        self.slab = Slab(config, rows, columns, like=like, by_column=self.by_column(config))
        self.weights = Weights(decoder)
        self.H, self.K, self.E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps, self.windows = config.rms_norm_eps, config.windows or (0,) * config.num_hidden_layers
        if capacity > len(decoder.cos):
            decoder.rotations(capacity, device=decoder.device)

    def read(self, pieces: Sequence[RowChunk]) -> Tensor:
        """Put the pieces into memory; the hidden state after each, [pieces, D]."""
        self.renew()
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].start, pieces[i].end))
        placed = [pieces[i] for i in order]
        tokens, rows, positions = pack_tokens(placed, self.decoder.device)
        attend = PrefillAttention(self.slab, self.windows, placed)
        x = self._run(tokens, positions, self.slab.slots(rows, positions), attend)
        back = torch.tensor(order).argsort()
        last = torch.tensor([len(p.tokens) for p in placed]).cumsum(0)[back] - 1
        return self.norm(x[last.to(x.device)], self.decoder.model.norm.weight)

    def step(self, tokens: Tensor, positions: Tensor, written: Tensor, *, columns: int, even: bool) -> Tensor:
        """One token for each of the first rows, into the columns `written`; hidden states [B, D].

        columns: what the longest row sees. even: every row that counts sees as much.
        """
        self.weights.check()
        attend = DecodeAttention(self.slab, self.windows, positions, columns=columns, even=even)
        slots = self.slab.slots(slice(0, len(tokens)), written)
        return self.norm(self._run(tokens, positions, slots, attend), self.decoder.model.norm.weight)

    def renew(self) -> None:
        """Find the weights, wherever they are now: before prompts are read."""
        self.weights.find()

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V]"""
        assert self.weights.head is not None
        logits = self._apply(self.weights.head, hidden, rows=True)
        return logits if self.decoder.finish is None else self.decoder.finish(logits)

    def quick_draw(self) -> Draw | None:
        """A faster way to draw rows that no setting alters; None: there is none."""
        return None

    def columns(self, needed: int) -> int:
        """How many columns a row of memory has."""
        return needed

    def by_column(self, config: DecoderConfig) -> bool:
        """Whether the heads of a column are neighbours in memory, not the columns of a head."""
        return False

    def _run(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        x = self.decoder.model.embed_tokens(tokens)
        cos, sin = (t.index_select(0, positions)[:, None].to(x.dtype) for t in (self.decoder.cos, self.decoder.sin))
        for i, block in enumerate(self.weights.blocks):
            qkv = self._project(block, self.norm(x, block.before), cos, sin)
            q, kv = qkv[:, : self.H], qkv[:, self.H :]
            self.slab.write(i, slots, kv)
            self._add(x, block.o, attend(i, q, kv))
            gate, up = self._apply(block.gate_up, self.norm(x, block.after)).chunk(2, dim=1)
            self._add(x, block.down, self.silu(gate).mul_(up))
        return x

    def _project(self, block: LayerWeights, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys, rotated, and values: [N, H + 2 K, E]."""
        qkv = self._apply(block.qkv, h, rows=True).view(len(h), -1, self.E)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = qkv[:, : self.H], qkv[:, self.H : self.H + self.K]
            q.copy_(self.norm(q, block.q_norm))
            k.copy_(self.norm(k, block.k_norm))
        # (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of each head
        x, half = qkv[:, : self.H + self.K], self.E // 2
        other = x * sin
        x *= cos
        x[..., :half] -= other[..., half:]
        x[..., half:] += other[..., :half]
        return qkv

    def _apply(self, layer: Linear, x: Tensor, *, rows: bool = False) -> Tensor:
        """rows: each row of the result lies in one piece."""
        out = self.product(layer.weight, x, rows=rows)
        if layer.bias is not None:
            out += layer.bias
        return self._adapted(out, layer, x)

    def _add(self, x: Tensor, layer: Linear, a: Tensor) -> None:
        """x += what the layer gives for a"""
        self.add_product(x, layer.weight, a)
        if layer.bias is not None:
            x += layer.bias
        self._adapted(x, layer, a)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / sqrt(|x|^2 / D + eps) * weight"""
        if x.dtype not in (torch.float32, torch.float64):
            return F.rms_norm(x, weight.shape, weight, self.eps)
        scale = torch.linalg.vecdot(x, x).mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return (x * scale[..., None]).mul_(weight)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def product(self, weight: Tensor, x: Tensor, *, rows: bool = False) -> Tensor:
        """x W^T; rows: each row of the result lies in one piece"""
        return product(weight, x, rows=rows)

    def add_product(self, x: Tensor, weight: Tensor, a: Tensor) -> None:
        """x += a W^T"""
        add_product(x, weight, a)

    def _adapted(self, out: Tensor, layer: Linear, x: Tensor) -> Tensor:
        """Add scale B A x of the adapters that are on."""
        for at, adapted in layer.adapted:
            adapter = adapted.adapter if adapted.enabled else None
            if adapter is not None:
                update = self.product(adapter.lora_B, self.product(adapter.lora_A, x))
                out[:, at : at + len(adapter.lora_B)] += update * adapter.scale
        return out
