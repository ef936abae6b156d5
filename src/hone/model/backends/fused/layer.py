"""A decoder layer in as few products as it can be: what `decoder.Layer` computes, with less memory and fewer passes.

It has no second gradient and fills no cache.
"""

from torch import Tensor

from hone.model.backends.fused.fused_linear import (
    Rotation,
    added_product,
    gated_product,
    normed_product,
    rotate_in_place,
    rotated_product,
)
from hone.model.decoder import Layer, Mask
from hone.model.kernels.fused_weights import Product


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
    """Queries, keys and values [N, heads, E], the first two normed where they are, and rotated; the x to go on with"""
    attention, first = layer.self_attn, layer.input_layernorm
    product = Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
    H, K, E = attention.H, attention.K, attention.E
    if attention.q_norm is None or attention.k_norm is None:
        return rotated_product(x_ND, first.weight, first.eps, product, Rotation(*rope, H, K, E))
    qkv, x = normed_product(x_ND, first.weight, first.eps, product)
    q, k, v = qkv.view(len(qkv), -1, E).split([H, K, K], 1)
    return rotate_in_place(attention.q_norm(q), *rope), rotate_in_place(attention.k_norm(k), *rope), v, x
