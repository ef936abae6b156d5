"""A decoder layer in as few products as it can be: what `decoder.Layer` computes, with less memory and fewer passes.

Off while gradients have to be differentiated again (model/twice.py), and where a cache is filled.
"""

from torch import Tensor

from hone.model.decoder import Attention, Layer, Mask, Turns
from hone.model.joined import Product, added_product, gated_product, normed_product, rotated_


def fast_layer(layer: Layer, x_BTD: Tensor, turns: Turns, mask: Mask) -> Tensor:
    """x + out(attention(norm(x))); x + down(silu(gate) * up)"""
    B, T, D = x_BTD.shape
    attention, mlp = layer.self_attn, layer.mlp
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    qkv, x = normed_product(
        x_BTD.reshape(-1, D), first.weight, first.eps, Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixed = attention.attend(*_heads(attention, qkv, turns, B, T), mask)
    x = added_product(mixed.reshape(B * T, -1), x, Product.of(attention.o_proj))
    both, x = normed_product(x, second.weight, second.eps, Product.of(mlp.gate_proj, mlp.up_proj))
    return gated_product(both, x, Product.of(mlp.down_proj)).view(B, T, D)


def _heads(attention: Attention, qkv: Tensor, turns: Turns, B: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, T, E], the first two normed where they are, and turned"""
    lines = qkv.view(B * T, -1, attention.E)
    H, K = attention.H, attention.K
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k, v = lines.split([H, K, K], 1)
        q, k = rotated_(attention.q_norm(q), *turns, heads=H), rotated_(attention.k_norm(k), *turns, heads=K)
    else:
        q, k, v = rotated_(lines, *turns, heads=H + K).split([H, K, K], 1)
    q, k, v = (x.view(B, T, -1, attention.E).transpose(1, 2) for x in (q, k, v))
    return q, k, v
