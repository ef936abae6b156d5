"""Attention over a list of tokens whose rows share what they begin with, and its gradients, by kernels on a GPU.

Nothing is padded or copied. A row is COMMON tokens from PREFIX on, which it has in common with another, and then its
own, from START on; what those of a row ask is answered here, each tile of them by one program a head. Keys that several
rows see are a tile of the row that has them: its program goes through the queries of all. Nothing is added by two
programs, so every number is summed in the same order each time. Scores are in base 2: exp(s) = exp2(s log2(e)), and
`scale` has the logarithm in it. Tiles reach into the next row, whose numbers count as nothing as long as they are
finite.
Shapes: U tokens in the list, H query heads, K key-value heads, E head size, BM queries and BN keys at a time.
"""

# Triton's constexpr takes plain numbers, and a launch takes options:
# pyright: reportArgumentType=false, reportCallIssue=false, reportIncompatibleMethodOverride=false
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from hone.model.rows import TILE, RowAttention, Spans, Tiles

PREFIX, BEFORE, DIAGONAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # where keys lie


class TileSizes(NamedTuple):
    """Queries and keys at a time, warps, and blocks on their way; the quickest of thirty on an H200."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


# by head size, up to 64 and above: answers, gradients of queries, of keys and values
FORWARD = TileSizes(TILE, 64, 4, 2), TileSizes(TILE, 32, 4, 3)
QUERIES = TileSizes(TILE, 32, 4, 3), TileSizes(TILE, 32, 4, 2)
KEYS = TileSizes(32, TILE, 4, 2), TileSizes(64, TILE, 4, 2)


class SharedAttention(RowAttention):
    """In half precision, on a GPU."""

    name = "fused"

    def covers(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return f"{dtype} on {device}"
        return None if head_dim in (16, 32, 64, 128) else f"heads of {head_dim} dimensions"

    def attend(
        self, q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, tiles: Tiles, *, window: int = 0
    ) -> Tensor:
        return attend(q_UHE, k_UKE, v_UKE, spans, tiles, window=window)


def attend(q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, tiles: Tiles, *, window: int = 0) -> Tensor:
    """Causal attention in each row, [U, H, E]; window: how many tokens back one looks, 0: all."""
    return _SharedAttention.apply(q_UHE, k_UKE, v_UKE, spans, tiles, window)  # pyright: ignore[reportReturnType]


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, tiles: Tiles, window: int
    ) -> Tensor:
        q, k, v, keep = _kernel_layout(q_UHE), _kernel_layout(k_UKE), _kernel_layout(v_UKE), any(ctx.needs_input_grad)
        (U, H, E), size = q.shape, FORWARD[q.shape[2] > 64]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((H, U) if keep else (0, 0), dtype=torch.float32, device=q.device)
        if U:
            _attend[(len(tiles.row) * H,)](
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
        q, k, v, out, lse = ctx.saved_tensors
        spans, tiles, window, dout, delta = (
            ctx.spans,
            ctx.tiles,
            ctx.window,
            _kernel_layout(dout_UHE),
            torch.empty_like(lse),
        )
        (U, H, E), K = q.shape, k.shape[1]
        gradients = torch.empty(U, H + 2 * K, E, dtype=q.dtype, device=q.device)
        dq, dk, dv = gradients.split([H, K, K], 1)
        numbers = U, _scale(E) * math.log2(math.e), _scale(E), gradients.stride(0)
        by_query, by_key = QUERIES[E > 64], KEYS[E > 64]
        if U:
            _query_grads[(len(tiles.row) * H,)](
                _blocks(q, by_query.BM), _blocks(k, by_query.BN), _blocks(v, by_query.BN), _blocks(out, by_query.BM),
                _blocks(dout, by_query.BM), lse, delta, dq, spans.start, spans.prefix, spans.common,
                tiles.row, tiles.at, tiles.order, *numbers, H=H, K=K, E=E, WINDOW=window, **by_query._asdict(),
            )  # fmt: skip
            _key_grads[(len(tiles.row) * K,)](
                _blocks(q, by_key.BM), _blocks(k, by_key.BN), _blocks(v, by_key.BN), _blocks(dout, by_key.BM),
                lse, delta, dk, dv, spans.start, spans.common, tiles.member, tiles.begin,
                tiles.row, tiles.at, *numbers, H=H, K=K, E=E, WINDOW=window, **by_key._asdict(),
            )  # fmt: skip
        return dq, dk, dv, None, None, None


def _scale(E: int) -> float:
    return 1 / math.sqrt(E)


def _kernel_layout(x_UhE: Tensor) -> Tensor:
    """The tensor as the kernels read it: the heads of a token side by side, every token at a multiple of 16 bytes."""
    _, h, E = x_UhE.shape
    token, *rest = x_UhE.stride()
    fits = rest == [E, 1] and token >= h * E and token % 8 == 0 and x_UhE.data_ptr() % 16 == 0
    return x_UhE if fits else x_UhE.clone(memory_format=torch.contiguous_format)


def _blocks(x_UhE: Tensor, tokens: int) -> Any:
    """So many tokens of one head at a time."""
    U, h, E = x_UhE.shape
    return TensorDescriptor(x_UhE, [U, h * E], [x_UhE.stride(0), 1], [tokens, E])


@triton.jit
def _apply_mask(x, nothing, query, key, common, WHERE: tl.constexpr, WINDOW: tl.constexpr):
    """x where the query at one place of a row sees the key at another"""
    if WHERE == PREFIX:
        x = tl.where(key < common, x, nothing)
    if WHERE == DIAGONAL:
        x = tl.where(key <= query, x, nothing)
    if WINDOW:
        x = tl.where(query - key < WINDOW, x, nothing)
    return x


@triton.jit
def _first_key(place, WINDOW: tl.constexpr, B: tl.constexpr):
    """The first key that a query sees, or one in the block before"""
    return tl.maximum(place - WINDOW + 1, 0) // B * B if WINDOW else 0


@triton.jit
def _mix_values(
    out, total, top, q, KEY, VALUE, at, column, query, place, common, scale,
    BN: tl.constexpr, WHERE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One block of keys more in the running softmax; place: of the block's first key in the row"""
    k, v = KEY.load([at, column]), VALUE.load([at, column])
    s = tl.dot(q, k.T) * scale
    s = _apply_mask(s, -1e30, query[:, None], (place + tl.arange(0, BN))[None, :], common, WHERE, WINDOW)
    higher = tl.maximum(top, tl.max(s, 1))
    p, fade = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
    out = tl.dot(p.to(v.dtype), v, out * fade[:, None])
    return out, total * fade + tl.sum(p, 1), higher


@triton.jit
def _attend(
    QUERY, KEY, VALUE, OUT, LSE, START, PREFIXES, COMMON, ROW, AT, ORDER, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """OUT [U, H, E]: what the tile's queries are answered; KEEP: LSE [H, U], the log of each one's sum"""
    tile, h = tl.load(ORDER + tl.program_id(0) // H), tl.program_id(0) % H
    row, at = tl.load(ROW + tile), tl.load(AT + tile)
    start = tl.load(START + row)
    if start + at >= tokens:
        return
    own, common, prefix = tl.load(START + row + 1) - start, tl.load(COMMON + row), tl.load(PREFIXES + row)
    column, place = h // (H // K) * E, common + at
    query = place + tl.arange(0, BM)
    q = QUERY.load([start + at, h * E])
    out, total, top = tl.zeros([BM, E], tl.float32), tl.zeros([BM], tl.float32), tl.full([BM], -1e30, tl.float32)
    for j in range(_first_key(place, WINDOW, BN), common, BN):
        out, total, top = _mix_values(
            out, total, top, q, KEY, VALUE, prefix + j, column, query, j, common, scale, BN, PREFIX, WINDOW
        )
    for j in range(_first_key(at, WINDOW, BN), at, BN):
        out, total, top = _mix_values(
            out, total, top, q, KEY, VALUE, start + j, column, query, common + j, common, scale, BN, BEFORE, WINDOW
        )
    for j in range(at, tl.minimum(at + BM, own), BN):
        out, total, top = _mix_values(
            out, total, top, q, KEY, VALUE, start + j, column, query, common + j, common, scale, BN, DIAGONAL, WINDOW
        )
    i = at + tl.arange(0, BM)
    keep, token = i < own, (start + i).to(tl.int64)
    to = OUT + token[:, None] * (H * E) + h * E + tl.arange(0, E)[None, :]
    tl.store(to, (out / total[:, None]).to(OUT.dtype.element_ty), mask=keep[:, None])
    if KEEP:
        tl.store(LSE + h.to(tl.int64) * tokens + token, top + tl.log2(total), mask=keep)


@triton.jit
def _query_block_grads(
    dq, q, dout, lse, delta, KEY, VALUE, at, column, query, place, common, scale,
    BN: tl.constexpr, WHERE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What one block of keys gives to the queries' gradients"""
    k, v = KEY.load([at, column]), VALUE.load([at, column])
    p = tl.exp2(tl.dot(q, k.T) * scale - lse[:, None])
    p = _apply_mask(p, 0.0, query[:, None], (place + tl.arange(0, BN))[None, :], common, WHERE, WINDOW)
    ds = p * (tl.dot(dout, v.T) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _query_grads(
    QUERY, KEY, VALUE, OUT, DOUT, LSE, DELTA, DQ, START, PREFIXES, COMMON, ROW, AT, ORDER, tokens, scale, plain, stride,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """DQ: the gradient of the tile's queries; DELTA [H, U]: each one's answer times its gradient, which `keys` reads"""
    tile, h = tl.load(ORDER + tl.program_id(0) // H), tl.program_id(0) % H
    row, at = tl.load(ROW + tile), tl.load(AT + tile)
    start = tl.load(START + row)
    if start + at >= tokens:
        return
    own, common, prefix = tl.load(START + row + 1) - start, tl.load(COMMON + row), tl.load(PREFIXES + row)
    column, place = h // (H // K) * E, common + at
    query, i = place + tl.arange(0, BM), at + tl.arange(0, BM)
    keep, token = i < own, (start + i).to(tl.int64)
    q, dout, out = QUERY.load([start + at, h * E]), DOUT.load([start + at, h * E]), OUT.load([start + at, h * E])
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(DELTA + h.to(tl.int64) * tokens + token, delta, mask=keep)
    lse = tl.load(LSE + h.to(tl.int64) * tokens + token, mask=keep, other=0.0)
    dq = tl.zeros([BM, E], tl.float32)
    for j in range(_first_key(place, WINDOW, BN), common, BN):
        dq = _query_block_grads(
            dq, q, dout, lse, delta, KEY, VALUE, prefix + j, column, query, j, common, scale, BN, PREFIX, WINDOW
        )  # fmt: skip
    for j in range(_first_key(at, WINDOW, BN), at, BN):
        dq = _query_block_grads(
            dq, q, dout, lse, delta, KEY, VALUE, start + j, column, query, common + j, common, scale, BN, BEFORE, WINDOW
        )
    for j in range(at, tl.minimum(at + BM, own), BN):
        dq = _query_block_grads(
            dq, q, dout, lse, delta, KEY, VALUE, start + j, column, query, common + j, common, scale,
            BN, DIAGONAL, WINDOW,
        )  # fmt: skip
    to = DQ + token[:, None] * stride + h * E + tl.arange(0, E)[None, :]
    tl.store(to, (dq * plain).to(DQ.dtype.element_ty), mask=keep[:, None])


@triton.jit
def _key_block_grads(
    dk, dv, k, v, QUERY, DOUT, LSE, DELTA, start, first, last, common, key, head, tokens, scale,
    G: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, WHERE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What own tokens first to last of the row that begins at `start` give to keys and values, in all G heads"""
    blocks = tl.cdiv(tl.maximum(last - first, 0), BM)
    per = tl.maximum(blocks, 1)  # what is computed ahead of a loop is computed where there is nothing, too
    for n in range(0, G * blocks):
        h, i = head + n // per, first + n % per * BM + tl.arange(0, BM)
        at = start + first + n % per * BM
        q, dout = QUERY.load([at, h * E]), DOUT.load([at, h * E])
        keep, number = i < last, h.to(tl.int64) * tokens + start + i
        lse = tl.load(LSE + number, mask=keep, other=float("inf"))
        delta = tl.load(DELTA + number, mask=keep, other=0.0)
        p = tl.exp2(tl.dot(k, q.T) * scale - lse[None, :])
        p = _apply_mask(p, 0.0, (common + i)[None, :], key[:, None], common, WHERE, WINDOW)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = p * (tl.dot(v, dout.T) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _key_grads(
    QUERY, KEY, VALUE, DOUT, LSE, DELTA, DK, DV, START, COMMON, MEMBER, BEGIN, ROW, AT, tokens, scale, plain, stride,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """DK, DV: the gradients of the tile's keys and values, from its own row and from those that begin with them"""
    tile, h = tl.program_id(0) // K, tl.program_id(0) % K
    row, at = tl.load(ROW + tile), tl.load(AT + tile)
    start = tl.load(START + row)
    if start + at >= tokens:
        return
    own, common, G = tl.load(START + row + 1) - start, tl.load(COMMON + row), H // K
    k, v = KEY.load([start + at, h * E]), VALUE.load([start + at, h * E])
    dk, dv = tl.zeros([BN, E], tl.float32), tl.zeros([BN, E], tl.float32)
    key = common + at + tl.arange(0, BN)
    last = tl.minimum(own, at + BN - 1 + WINDOW) if WINDOW else own
    dk, dv = _key_block_grads(
        dk, dv, k, v, QUERY, DOUT, LSE, DELTA, start, at, last, common, key, h * G, tokens, scale,
        G, E, BM, DIAGONAL, WINDOW,
    )  # fmt: skip
    for n in range(tl.load(BEGIN + row), tl.load(BEGIN + row + 1)):
        other = tl.load(MEMBER + n)
        shared = tl.load(COMMON + other)
        if shared > at:
            there = tl.load(START + other)
            last = tl.load(START + other + 1) - there
            if WINDOW:
                last = tl.minimum(last, at + BN - 1 + WINDOW - shared)
            dk, dv = _key_block_grads(
                dk, dv, k, v, QUERY, DOUT, LSE, DELTA, there, 0, last, shared, key, h * G, tokens, scale,
                G, E, BM, PREFIX, WINDOW,
            )  # fmt: skip
    j = at + tl.arange(0, BN)
    to, keep = (start + j).to(tl.int64)[:, None] * stride + h * E + tl.arange(0, E)[None, :], (j < own)[:, None]
    tl.store(DK + to, (dk * plain).to(DK.dtype.element_ty), mask=keep)
    tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=keep)
