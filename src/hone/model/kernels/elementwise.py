"""The operations between the products of a layer in training: norm, rotation, SiLU gate, and their gradients.

One program a row or some (norm, gate) or a token (rotation); float32 inside, whatever the numbers are stored as.
"""

# Triton's constexpr takes plain numbers, and a launch takes options:
# pyright: reportArgumentType=false, reportCallIssue=false
import triton
import triton.language as tl
from torch import Tensor

from hone.model.kernels.tiles import cdiv, power


@triton.jit
def norm(X, GAIN, Y, COPY, rows, D, eps, COPIES: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Y = X gain / rms(X), and COPY = X, for BR rows"""
    row, cols = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    keep, at = (row < rows)[:, None] & (cols < D)[None, :], row[:, None] * D + cols[None, :]
    read = tl.load(X + at, mask=keep, other=0.0)
    if COPIES:
        tl.store(COPY + at, read, mask=keep)
    x = read.to(tl.float32)
    gain = tl.load(GAIN + cols, mask=cols < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * gain[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=keep)


def launch_norm(x: Tensor, gain: Tensor, y: Tensor, eps: float, *, copy: Tensor | None = None) -> None:
    """y = norm(x), copy = x, [N, D]; two rows of up to 1,024 a program: on an H200 65 us where one took 79"""
    N, D = x.shape
    width = power(D)
    rows = max(1, 2_048 // width)
    if N:
        warps = min(8, rows * width // 1_024)
        norm[(cdiv(N, rows),)](
            x, gain, y, x if copy is None else copy, N, D, eps, COPIES=copy is not None, BR=rows, BD=width,
            num_warps=warps,
        )  # fmt: skip


@triton.jit
def norm_grad(
    X, GAIN, DY, PLUS, DX, DGAIN, rows, D, eps, HAS_PLUS: tl.constexpr, AGAIN: tl.constexpr, BD: tl.constexpr
):
    """DX = the norm's gradient + PLUS, for every program's share of rows; DGAIN [programs, D] its part of the gain's

    n = x / rms, g = dy gain: dx = (g - n mean(g n)) / rms; the gain's is the sum of dy n. AGAIN: DY becomes n gain.
    The next row is loaded while one is computed.
    """
    me, many = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, BD)
    inside = cols < D
    gain = tl.load(GAIN + cols, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BD], tl.float32)
    at = me * D.to(tl.int64) + cols
    next_x = tl.load(X + at, mask=inside, other=0.0)
    next_dy = tl.load(DY + at, mask=inside, other=0.0)
    next_plus = tl.load(PLUS + at, mask=inside, other=0.0) if HAS_PLUS else next_x
    for row in range(me, rows, many):
        x, dy, plus = next_x.to(tl.float32), next_dy.to(tl.float32), next_plus.to(tl.float32)
        here = row * D.to(tl.int64) + cols
        at = (row + many) * D.to(tl.int64) + cols
        there = inside & (row + many < rows)
        next_x = tl.load(X + at, mask=there, other=0.0)
        next_dy = tl.load(DY + at, mask=there, other=0.0)
        next_plus = tl.load(PLUS + at, mask=there, other=0.0) if HAS_PLUS else next_x
        g = dy * gain
        square, along = tl.sum(x * x), tl.sum(g * x)  # side by side: neither waits for the other
        scale = tl.rsqrt(square / D + eps)
        n = x * scale
        dx = (g - n * (along * scale / D)) * scale
        if HAS_PLUS:
            dx += plus
        tl.store(DX + here, dx.to(DX.dtype.element_ty), mask=inside)
        if AGAIN:
            tl.store(DY + here, (n * gain).to(DY.dtype.element_ty), mask=inside)
        summed += dy * n
    tl.store(DGAIN + me * D + cols, summed, mask=inside)


@triton.jit
def sum_rows(X, Y, lines, D, BL: tl.constexpr, BD: tl.constexpr):
    """Y = the sum of the lines of X [lines, D], each column's in the same order every time"""
    line, cols = tl.arange(0, BL), tl.program_id(0) * BD + tl.arange(0, BD)
    inside = (cols < D)[None, :]
    total = tl.zeros([BL, BD], tl.float32)
    for first in tl.range(0, lines, BL, loop_unroll_factor=4):
        at = (first + line)[:, None]
        total += tl.load(X + at * D + cols[None, :], mask=(at < lines) & inside, other=0.0)
    tl.store(Y + cols, tl.sum(total, 0).to(Y.dtype.element_ty), mask=cols < D)


def launch_sum(x: Tensor, y: Tensor) -> None:
    """y = x.sum(0), [lines, D] -> [D]"""
    sum_rows[(cdiv(x.shape[1], 8),)](x, y, *x.shape, BL=512, BD=8, num_warps=8)


@triton.jit
def rotate(X, COS, SIN, stride, width, HEADS: tl.constexpr, BH: tl.constexpr, E: tl.constexpr):
    """The first HEADS heads of each token rotated in place

    COS, SIN [tokens, width]: the angles of each token, of which the first E / 2 are read.
    """
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, BH)[:, None], tl.arange(0, E // 2)[None]
    keep = head < HEADS
    at = X + token * stride + head * E + i
    a = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(at + E // 2, mask=keep, other=0.0).to(tl.float32)
    cos = tl.load(COS + token * width + i).to(tl.float32)
    sin = tl.load(SIN + token * width + i).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(X.dtype.element_ty), mask=keep)
    tl.store(at + E // 2, (b * cos + a * sin).to(X.dtype.element_ty), mask=keep)


@triton.jit
def store_back(a, b, OUT, cos, sin, HEADS: tl.constexpr, BH: tl.constexpr, E: tl.constexpr, TURN: tl.constexpr):
    """Write both halves of a token's heads to OUT; TURN: rotated back"""
    head, i = tl.arange(0, BH)[:, None], tl.arange(0, E // 2)[None]
    if TURN:
        a, b = a * cos + b * sin, b * cos - a * sin
    tl.store(OUT + head * E + i, a.to(OUT.dtype.element_ty), mask=head < HEADS)
    tl.store(OUT + head * E + E // 2 + i, b.to(OUT.dtype.element_ty), mask=head < HEADS)


@triton.jit
def _heads_back(X, OUT, stride, cos, sin, HEADS: tl.constexpr, BH: tl.constexpr, E: tl.constexpr, TURN: tl.constexpr):
    """Copy a token's heads to OUT, contiguous there; TURN: rotated back"""
    head, i = tl.arange(0, BH)[:, None], tl.arange(0, E // 2)[None]
    keep = head < HEADS
    a = tl.load(X + head * stride + i, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(X + head * stride + E // 2 + i, mask=keep, other=0.0).to(tl.float32)
    store_back(a, b, OUT, cos, sin, HEADS, BH, E, TURN)


@triton.jit
def rotate_back(
    DQ, DK, DV, COS, SIN, OUT, q_token, q_head, k_token, k_head, v_token, v_head, width,
    H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """OUT [tokens, H + 2 K, E]: the gradients of queries and keys before the rotation, and those of values"""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, E // 2)[None]
    cos = tl.load(COS + token * width + i).to(tl.float32)
    sin = tl.load(SIN + token * width + i).to(tl.float32)
    OUT += token * (H + 2 * K) * E
    _heads_back(DQ + token * q_token, OUT, q_head, cos, sin, H, BH, E, True)
    _heads_back(DK + token * k_token, OUT + H * E, k_head, cos, sin, K, BK, E, True)
    _heads_back(DV + token * v_token, OUT + (H + K) * E, v_head, cos, sin, K, BK, E, False)


@triton.jit
def gate(X, Y, M, BM: tl.constexpr):
    """Y = silu(X[:, :M]) * X[:, M:]"""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BM + tl.arange(0, BM)
    g = tl.load(X + row * 2 * M + cols, mask=cols < M, other=0.0).to(tl.float32)
    u = tl.load(X + row * 2 * M + M + cols, mask=cols < M, other=0.0).to(tl.float32)
    tl.store(Y + row * M + cols, (g / (1 + tl.exp(-g)) * u).to(Y.dtype.element_ty), mask=cols < M)


@triton.jit
def gate_grad(X, DY, DX, M, BM: tl.constexpr):
    """DX [rows, 2 M] from DY [rows, M]; s = sigmoid(g): du = dy g s, dg = dy u s (1 + g (1 - s)). DY becomes g s u."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BM + tl.arange(0, BM)
    keep, at = cols < M, row * 2 * M + cols
    g = tl.load(X + at, mask=keep, other=0.0).to(tl.float32)
    u = tl.load(X + at + M, mask=keep, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * M + cols, mask=keep, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-g))
    tl.store(DX + at, (dy * u * s * (1 + g * (1 - s))).to(DX.dtype.element_ty), mask=keep)
    tl.store(DX + at + M, (dy * g * s).to(DX.dtype.element_ty), mask=keep)
    tl.store(DY + row * M + cols, (g * s * u).to(DY.dtype.element_ty), mask=keep)
