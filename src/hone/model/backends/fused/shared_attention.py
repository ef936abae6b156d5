"""Attention over a list of tokens whose rows share what they begin with, by kernels of our own on a GPU.

In half precision; nothing is padded or copied, and every number is added up in one order (model/backends/fused/kernels/causal.py).

Shapes: U tokens in the list, H query heads, K key-value heads, E head size.
"""

# Triton's constexpr takes plain numbers, and a launch takes options:
# pyright: reportArgumentType=false, reportCallIssue=false, reportIncompatibleMethodOverride=false
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.model.layout.spans import TILE, Spans, Tiles


class Sizes(NamedTuple):
    """Queries and keys at a time, warps, and blocks on their way; the quickest of thirty on an H200."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


# by head size, up to 64 and above: answers, gradients of queries, of keys and values
FORWARD = Sizes(TILE, 64, 4, 2), Sizes(TILE, 32, 4, 3)
QUERIES = Sizes(TILE, 32, 4, 3), Sizes(TILE, 32, 4, 2)
KEYS = Sizes(32, TILE, 4, 2), Sizes(64, TILE, 4, 2)


def usable(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether there are kernels for heads of this size there."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and size in (16, 32, 64, 128)


def attend(q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, tiles: Tiles, *, window: int = 0) -> Tensor:
    """Causal attention in each row, [U, H, E]; window: how many tokens back one looks, 0: all."""
    return _Attended.apply(q_UHE, k_UKE, v_UKE, spans, tiles, window)  # pyright: ignore[reportReturnType]


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, tiles: Tiles, window: int
    ) -> Tensor:
        from hone.model.backends.fused.kernels import causal

        q, k, v, keep = _lined(q_UHE), _lined(k_UKE), _lined(v_UKE), any(ctx.needs_input_grad)
        (U, H, E), size = q.shape, FORWARD[q.shape[2] > 64]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((H, U) if keep else (0, 0), dtype=torch.float32, device=q.device)
        if U:
            causal.attend[(len(tiles.row) * H,)](
                _blocks(q, size.BM), _blocks(k, size.BN), _blocks(v, size.BN), out, lse,
                spans.start, spans.prefix, spans.common, tiles.row, tiles.at, tiles.order,
                U, _scale(E) * math.log2(math.e), H=H, K=k.shape[1], E=E, WINDOW=window, KEEP=keep, **size._asdict(),
            )  # fmt: skip
        ctx.spans, ctx.tiles, ctx.window = spans, tiles, window
        ctx.save_for_backward(*((q, k, v, out, lse) if keep else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_UHE: Tensor) -> Any:
        from hone.model.backends.fused.kernels import causal

        q, k, v, out, lse = ctx.saved_tensors
        spans, tiles, window, dout, delta = ctx.spans, ctx.tiles, ctx.window, _lined(dout_UHE), torch.empty_like(lse)
        (U, H, E), K = q.shape, k.shape[1]
        gradients = torch.empty(U, H + 2 * K, E, dtype=q.dtype, device=q.device)
        dq, dk, dv = gradients.split([H, K, K], 1)
        numbers = U, _scale(E) * math.log2(math.e), _scale(E), gradients.stride(0)
        by_query, by_key = QUERIES[E > 64], KEYS[E > 64]
        if U:
            causal.queries[(len(tiles.row) * H,)](
                _blocks(q, by_query.BM), _blocks(k, by_query.BN), _blocks(v, by_query.BN), _blocks(out, by_query.BM),
                _blocks(dout, by_query.BM), lse, delta, dq, spans.start, spans.prefix, spans.common,
                tiles.row, tiles.at, tiles.order, *numbers, H=H, K=K, E=E, WINDOW=window, **by_query._asdict(),
            )  # fmt: skip
            causal.keys[(len(tiles.row) * K,)](
                _blocks(q, by_key.BM), _blocks(k, by_key.BN), _blocks(v, by_key.BN), _blocks(dout, by_key.BM),
                lse, delta, dk, dv, spans.start, spans.common, tiles.member, tiles.begin,
                tiles.row, tiles.at, *numbers, H=H, K=K, E=E, WINDOW=window, **by_key._asdict(),
            )  # fmt: skip
        return dq, dk, dv, None, None, None


def _scale(E: int) -> float:
    return 1 / math.sqrt(E)


def _lined(x_UhE: Tensor) -> Tensor:
    """With a token's heads side by side and every token at a multiple of 16 bytes, as the kernels read them."""
    _, h, E = x_UhE.shape
    token, *rest = x_UhE.stride()
    fits = rest == [E, 1] and token >= h * E and token % 8 == 0 and x_UhE.data_ptr() % 16 == 0
    return x_UhE if fits else x_UhE.clone(memory_format=torch.contiguous_format)


def _blocks(x_UhE: Tensor, tokens: int) -> Any:
    """So many tokens of one head at a time."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    U, h, E = x_UhE.shape
    return TensorDescriptor(x_UhE, [U, h * E], [x_UhE.stride(0), 1], [tokens, E])
