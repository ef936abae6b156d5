"""A decoder layer on a CPU as one function with its gradient: products by torch, all between them in C++.

The backward pass reads the layer's input, queries, keys and values, the output of attention, the residual stream after
it, and gate and up; it recomputes norms and the gated product. The decoder's final norm is here too: it sums in the
same order as the layers' norms and the sampler's.
Shapes: U tokens of all rows, D hidden, E head size.
"""

# pyright: reportIncompatibleMethodOverride=false
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.model.backends.native import calls
from hone.model.backends.native.calls import Segments
from hone.model.backends.native.stack import Bundles, StackPass, has_hooks, stackable
from hone.model.decoder import Decoder, Layer, Mask, Pass, RMSNorm
from hone.model.kernels.fused_weights import Product, gate_up, qkv
from hone.model.rows import Rows


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What every layer of a pass reads beside its input."""

    cos: Tensor  # [U, E], of the stream's dtype
    sin: Tensor
    segments: Segments
    last: int  # the index of the last layer
    ending: Segments  # those of the last layer, where fewer tokens may be queries
    read: Tensor | None = None  # int64 [A]  the indices of these queries; None: all tokens
    stack: StackPass | None = None  # all layers at once

    @staticmethod
    def of(decoder: Decoder, given: Pass) -> "NativePlan":
        """The plan of a pass that the backend covers."""
        mask, (B, T, _) = given.mask, given.x.shape
        for layer in decoder.model.layers:
            if (
                type(layer) is Layer
            ):  # FSDP gathers a layer for each pass and changes its class; its weights stay where they are
                qkv(layer.self_attn)
                gate_up(layer.mlp)
        cos, sin = given.rotation(given.x.dtype)
        segments, last = (
            Segments.of(mask.spans) if isinstance(mask, Rows) else Segments.lines(B, T),
            len(decoder.model.layers) - 1,
        )
        needed = mask.needed if isinstance(mask, Rows) else None
        ending = segments if needed is None else segments.from_first_needed(needed)
        read, stack = None if needed is None else ending.tokens(), None
        weights = stackable(decoder, given.x.dtype)
        if weights is not None and (found := Bundles.of(segments, ending, torch.get_num_threads())):
            stack = StackPass.of(decoder, weights, found, cos, sin)
        return NativePlan(cos, sin, segments, last, ending, read, stack)


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """A layer's products and sizes."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    eps: float
    H: int
    K: int
    E: int

    @staticmethod
    def of(layer: Layer) -> "LayerProducts":
        a, m = layer.self_attn, layer.mlp
        return LayerProducts(
            Product.of(a.q_proj, a.k_proj, a.v_proj), Product.of(a.o_proj), Product.of(m.gate_proj, m.up_proj),
            Product.of(m.down_proj), layer.input_layernorm.eps, a.H, a.K, a.E,
        )  # fmt: skip

    @property
    def products(self) -> tuple[Product, Product, Product, Product]:
        return self.qkv, self.o, self.gate_up, self.down


def native_layer(given: NativePlan, layer: Layer, x_BTD: Tensor, mask: Mask) -> Tensor:
    """x + out(attention(norm(x))); x + down(silu(gate) * up)"""
    parts = LayerProducts.of(layer)
    if layer.self_attn.layer == given.last:
        given = replace(given, segments=given.ending)
    elif given.read is not None:
        given = replace(given, read=None)
    gains = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    tensors = (t for product in parts.products for t in product.tensors())
    y = _Layer.apply(x_BTD.reshape(-1, x_BTD.shape[-1]), given, parts, *gains, *tensors)
    return y.view(x_BTD.shape)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def _scatter_rows(x_AD: Tensor, at_A: Tensor, tokens: int) -> Tensor:
    """[U, D], zero elsewhere"""
    return x_AD.new_zeros(tokens, x_AD.shape[1]).index_copy_(0, at_A, x_AD)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, given: NativePlan, parts: LayerProducts, before: Tensor, after: Tensor, *tensors: Tensor
    ) -> Tensor:
        x = x.contiguous()
        qkv, low = parts.qkv.forward(calls.norm(x, before, parts.eps))
        calls.rotate_(qkv, given.cos, given.sin, heads=parts.H + parts.K)
        mixed, log = calls.attend(given.segments.shape(parts.H, parts.K, parts.E), qkv)
        seen, base = (mixed, x) if given.read is None else (mixed[given.read], x[given.read])
        stream, low_o = parts.o.forward(seen, plus=base)
        both, low_up = parts.gate_up.forward(calls.norm(stream, after, parts.eps))
        y, low_down = parts.down.forward(calls.gate(both), plus=stream)
        ctx.given, ctx.parts, ctx.lows = given, parts, [len(some) for some in (low, low_o, low_up, low_down)]
        ctx.save_for_backward(x, before, after, qkv, mixed, log, stream, both, *low, *low_o, *low_up, *low_down)
        return y if given.read is None else _scatter_rows(y, given.read, len(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        parts, given = ctx.parts, ctx.given
        x, before, after, qkv, mixed, log, stream, both, *kept = ctx.saved_tensors
        inner = [[kept.pop(0) for _ in range(number)] for number in ctx.lows]
        wants = list(ctx.needs_input_grad[5:])
        wanted = [[wants.pop(0) for _ in product.tensors()] for product in parts.products]
        read = given.read
        dy, seen = (dy.contiguous(), mixed) if read is None else (dy[read], mixed[read])

        dh, back = parts.down.backward(dy)
        dboth, gated = calls.gate_grad(both, dh)
        down = parts.down.gradients(gated, dy, inner[3], back, wanted[3])
        dnormed, back = parts.gate_up.backward(dboth)
        gate_up = parts.gate_up.gradients(calls.norm(stream, after, parts.eps), dboth, inner[2], back, wanted[2])
        dstream, dafter = calls.norm_grad(stream, after, parts.eps, dnormed, plus=dy)
        dmixed, back = parts.o.backward(dstream)
        o = parts.o.gradients(seen, dstream, inner[1], back, wanted[1])
        if read is not None:
            dmixed, dstream = _scatter_rows(dmixed, read, len(x)), _scatter_rows(dstream, read, len(x))
        shape = given.segments.shape(parts.H, parts.K, parts.E)
        dqkv = calls.attend_grad(shape, qkv, mixed, log, dmixed)
        calls.rotate_(dqkv, given.cos, given.sin, heads=parts.H + parts.K, back=True)
        dnormed, back = parts.qkv.backward(dqkv)
        first = parts.qkv.gradients(calls.norm(x, before, parts.eps), dqkv, inner[0], back, wanted[0])
        dx, dbefore = calls.norm_grad(x, before, parts.eps, dnormed, plus=dstream)
        return dx, None, None, dbefore, dafter, *first, *o, *gate_up, *down


def final_norm(norm: RMSNorm, x_BTD: Tensor) -> Tensor:
    """norm(x), for numbers that the library computes."""
    if has_hooks(norm) or type(norm) is not RMSNorm or norm.weight.dtype != x_BTD.dtype:
        return norm(x_BTD)
    y = _Norm.apply(x_BTD.reshape(-1, x_BTD.shape[-1]).contiguous(), norm.weight, norm.eps)
    return y.view(x_BTD.shape)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, gain)
        return calls.norm(x, gain, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gain = ctx.saved_tensors
        dx, dgain = calls.norm_grad(x, gain, ctx.eps, dy.contiguous())
        return dx, dgain, None
