"""A decoder layer in few products: what `decoder.Layer` computes, with less memory and fewer kernels.

A product and the operations beside it are one function, with a gradient written by hand. Linear layers that read the
same input are one product, forward and backward. The backward pass recomputes the norm or gate before a product. The
residual is added inside the product. Frozen weights get no gradient. There is no second gradient.
Shapes: N tokens, D inputs, F outputs of all layers together.
"""

# pyright: reportIncompatibleMethodOverride=false
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.model.backends.fused import elementwise
from hone.model.decoder import Layer, Mask
from hone.model.kernels.fused_weights import Product


@dataclass(frozen=True, slots=True)
class Rotation:
    """For a product whose outputs are queries, keys and values [N, H or K, E]: the angles that rotate the first two."""

    cos: Tensor
    sin: Tensor
    H: int
    K: int
    E: int


class _NormedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: float, product: Product, rotation: Rotation | None, *tensors: Tensor
    ) -> Any:
        n, again = elementwise.norm_and_copy(x, gain, eps)
        y, inner = product.forward(n)
        ctx.product, ctx.eps, ctx.rotation = product, eps, rotation
        ctx.save_for_backward(x, gain, *inner)
        if rotation is None:
            return y, again
        H, K = rotation.H, rotation.K
        heads = elementwise.rotate_(y.view(len(y), H + 2 * K, rotation.E), rotation.cos, rotation.sin, heads=H + K)
        return *heads.split([H, K, K], 1), again

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> Any:
        (x, gain, *inner), rotation, passed = ctx.saved_tensors, ctx.rotation, given[-1]
        if rotation is None:
            dy = given[0].contiguous()
        else:
            dq, dk, dv, _ = given
            dy = elementwise.rotate_back(dq, dk, dv, rotation.cos, rotation.sin).flatten(1)
        n, back = ctx.product.backward(dy)
        dx, dgain = elementwise.norm_grad(x, gain, ctx.eps, n, plus=passed.contiguous(), again=True)
        found = ctx.product.gradients(n, dy, inner, back, ctx.needs_input_grad[5:])
        return dx, dgain, None, None, None, *found


class _AddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, product: Product, gated: bool, *tensors: Tensor) -> Tensor:
        y, inner = product.forward(elementwise.gate(a) if gated else a, plus=x, spend=True)
        if y is x:
            ctx.mark_dirty(x)
        ctx.product, ctx.gated = product, gated
        ctx.save_for_backward(a, *inner)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        a, *inner = ctx.saved_tensors
        dy = dy.contiguous()
        da, back = ctx.product.backward(dy)
        read = a
        if ctx.gated:
            read, da = da, elementwise.gate_grad(a, da)
        found = ctx.product.gradients(read, dy, inner, back, ctx.needs_input_grad[4:])
        return da, dy, None, None, *found


def normed_product(
    x: Tensor, gain: Tensor, eps: float, product: Product, *, own: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm(x) W^T + b, a copy of x for the residual).

    The norm's kernel writes the copy, at half the cost of a separate one. The kernel of its gradient adds the copy's.
    own: nothing else refers to x, so that without gradients x itself is returned.
    """
    if own and not torch.is_grad_enabled():
        return product.forward(elementwise.norm(x, gain, eps))[0], x
    return _NormedProduct.apply(x, gain, eps, product, None, *product.tensors())  # pyright: ignore[reportReturnType]


def rotated_product(
    x: Tensor, gain: Tensor, eps: float, product: Product, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same where the product is queries, keys and values: (q, k, v, x), the first two rotated"""
    return _NormedProduct.apply(x, gain, eps, product, rotation, *product.tensors())  # pyright: ignore[reportReturnType]


def added_product(a: Tensor, x: Tensor, product: Product) -> Tensor:
    """x + a W^T + b, in the memory of x"""
    return _AddedProduct.apply(a, x, product, False, *product.tensors())  # pyright: ignore[reportReturnType]


def gated_product(both: Tensor, x: Tensor, product: Product) -> Tensor:
    """x + (silu(gate) * up) W^T + b, in the memory of x; both: gate and up side by side"""
    return _AddedProduct.apply(both, x, product, True, *product.tensors())  # pyright: ignore[reportReturnType]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        return elementwise.rotate_(x, cos, sin, heads=x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        dy = dy.clone(memory_format=torch.contiguous_format)
        return elementwise.rotate_(dy, cos, -sin, heads=dy.shape[1]), None, None


def rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The heads of x [N, heads, E], rotation in place"""
    return _Rotated.apply(x, cos, sin)  # pyright: ignore[reportReturnType]


def fused_layer(rope: tuple[Tensor, Tensor], layer: Layer, x_BTD: Tensor, mask: Mask) -> Tensor:
    """x + out(attention(norm(x))); x + down(silu(gate) * up); rope: cosine and sine of every token, [B T, E]"""
    B, T, D = x_BTD.shape
    attention, mlp, second = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    q, k, v, x = _heads(layer, x_BTD.reshape(-1, D).contiguous(), rope)
    q, k, v = (h.view(B, T, -1, attention.E).transpose(1, 2) for h in (q, k, v))
    mixed = attention.attend(q, k, v, mask)
    x = added_product(mixed.reshape(B * T, -1), x, Product.of(attention.o_proj))
    both, x = normed_product(x, second.weight, second.eps, Product.of(mlp.gate_proj, mlp.up_proj), own=True)
    return gated_product(both, x, Product.of(mlp.down_proj)).view(B, T, D)


def _heads(layer: Layer, x_ND: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, heads, E], the first two normed and rotated; x for the residual"""
    attention, first = layer.self_attn, layer.input_layernorm
    product = Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
    H, K, E = attention.H, attention.K, attention.E
    if attention.q_norm is None or attention.k_norm is None:
        return rotated_product(x_ND, first.weight, first.eps, product, Rotation(*rope, H, K, E))
    qkv, x = normed_product(x_ND, first.weight, first.eps, product)
    q, k, v = qkv.view(len(qkv), -1, E).split([H, K, K], 1)
    return rotate_in_place(attention.q_norm(q), *rope), rotate_in_place(attention.k_norm(k), *rope), v, x
