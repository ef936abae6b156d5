"""Matrix products with what stands before and after them fused in: norm, bias, SiLU gate, residual.

W is [N, K], as nn.Linear stores it. Buffers have rows up to a multiple of the row tile, so rows need no mask; rows
past the batch hold rubbish. One tile of K after the other into one float32 sum: a row's numbers depend on its own
input and on the tile sizes, on nothing else in the batch.

rms_norm(x) = x gain / rms(x): the kernel that makes x also writes x * gain and, for each of its column tiles, the sum
of squares; the one that reads it multiplies plain matrices and divides the result by the rms.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _prefetch(AT, size):
    """Start to bring `size` bytes, a multiple of 16, into the L2 cache; nothing waits for it."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r",
        [AT, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _begin(WEIGHT, N, K, BN: tl.constexpr, PDL: tl.constexpr):
    """Let the next kernel start, fetch this one's weights, then wait for the kernel before."""
    if PDL:
        gdc_launch_dependents()
        if tl.program_id(0) == 0:
            first = tl.program_id(1) * BN
            count = tl.minimum(BN, N - first)
            _prefetch(WEIGHT + first.to(tl.int64) * K, count * K * 2)
        gdc_wait()


@triton.jit
def _product(
    A, W, rows, cols, N, K, stride, TMA: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A W^T for the program's rows and columns, float32 [BM, BN]

    TMA: A and W are tensor descriptors, which give zeros past the end.
    """
    out = tl.zeros([BM, BN], tl.float32)
    if TMA:
        for k in range(0, K, BK):
            a = A.load([tl.program_id(0) * BM, k])
            out = tl.dot(a, W.load([tl.program_id(1) * BN, k]).T, out)
    else:
        depth = tl.arange(0, BK)
        a_at = A + rows[:, None] * stride + depth[None]
        w_at = W + cols[:, None].to(tl.int64) * K + depth[None]
        for k in range(0, K, BK):
            inside = depth[None] < K - k
            keep = (cols < N)[:, None] & inside
            a = tl.load(a_at + k) if EVEN else tl.load(a_at + k, mask=inside, other=0.0)
            w = tl.load(w_at + k) if EVEN else tl.load(w_at + k, mask=keep, other=0.0)
            out = tl.dot(a, tl.trans(w), out)
    return out


@triton.jit
def _factor(SQUARES, rows, parts, K, eps, P: tl.constexpr):
    """1 / rms of each row, [BM, 1], from the sums of squares of its `parts` column tiles, at most P"""
    part = tl.arange(0, P)[None]
    squares = tl.load(SQUARES + rows[:, None] * P + part, mask=part < parts, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]


@triton.jit
def linear(
    A, SQUARES, W, WEIGHT, BIAS, Y, N, K, parts, eps, stride_a, stride_y,
    P: tl.constexpr, HAS_BIAS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y = A W^T / rms + bias; P 0: no division"""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    _begin(WEIGHT, N, K, BN, PDL)
    factor = tl.full([BM, 1], 1.0, tl.float32)
    if P > 0:  # before the product, which then hides the wait for it
        factor = _factor(SQUARES, rows, parts, K, eps, P)
    out = _product(A, W, rows, cols, N, K, stride_a, TMA, EVEN, BM, BN, BK) * factor
    if HAS_BIAS:
        out += tl.load(BIAS + cols, mask=cols < N, other=0.0).to(tl.float32)[None]
    at = Y + rows[:, None].to(tl.int64) * stride_y + cols[None]
    tl.store(at, out.to(Y.dtype.element_ty), mask=(cols < N)[None])


@triton.jit
def residual(
    A, W, WEIGHT, X, GAIN, SCALED, SQUARES, scale, N, K, stride_a, stride_x,
    P: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """X += scale A W^T; P > 0: also SCALED = X * gain, and the sums of squares of X"""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    _begin(WEIGHT, N, K, BN, PDL)
    inside = (cols < N)[None]
    at = rows[:, None].to(tl.int64) * stride_x + cols[None]
    before = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    gain = tl.zeros([1, BN], tl.float32)
    if P > 0:  # before the product, which then hides the wait for it
        gain = tl.load(GAIN + cols, mask=cols < N, other=0.0).to(tl.float32)[None]
    out = _product(A, W, rows, cols, N, K, stride_a, TMA, EVEN, BM, BN, BK)
    x = (before + scale * out).to(X.dtype.element_ty)
    tl.store(X + at, x, mask=inside)
    if P > 0:
        wide = tl.where(inside, x.to(tl.float32), 0.0)
        tl.store(SCALED + at, (wide * gain).to(X.dtype.element_ty), mask=inside)
        tl.store(SQUARES + rows * P + tl.program_id(1), tl.sum(wide * wide, 1))


@triton.jit
def normed(X, GAIN, SQUARES, Y, D, parts, eps, P: tl.constexpr, PDL: tl.constexpr, BD: tl.constexpr):
    """Y = rms_norm(X)"""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BD)
    gain = tl.load(GAIN + cols, mask=cols < D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(X + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    part = tl.arange(0, P)
    squares = tl.sum(tl.load(SQUARES + row * P + part, mask=part < parts, other=0.0))
    y = x * tl.rsqrt(squares / D + eps) * gain
    tl.store(Y + row * D + cols, y.to(Y.dtype.element_ty), mask=cols < D)


@triton.jit
def gated(
    A, SQUARES, W, WEIGHT, Y, N, K, parts, eps,
    P: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y = silu(A G^T / rms) * A U^T / rms, where G is W[:N] and U is W[N:]"""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    if PDL and tl.program_id(0) == 0:
        _prefetch(
            WEIGHT + (N + tl.program_id(1) * BN).to(tl.int64) * K, tl.minimum(BN, N - tl.program_id(1) * BN) * K * 2
        )
    _begin(WEIGHT, N, K, BN, PDL)
    factor = _factor(SQUARES, rows, parts, K, eps, P)
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    if TMA:
        for k in range(0, K, BK):
            a = A.load([tl.program_id(0) * BM, k])
            gate = tl.dot(a, W.load([tl.program_id(1) * BN, k]).T, gate)
            up = tl.dot(a, W.load([N + tl.program_id(1) * BN, k]).T, up)
    else:
        a_at = A + rows[:, None] * K + depth[None]
        gate_at = W + cols[:, None].to(tl.int64) * K + depth[None]
        up_at = gate_at + N.to(tl.int64) * K
        for k in range(0, K, BK):
            inside = depth[None] < K - k
            keep = (cols < N)[:, None] & inside
            a = tl.load(a_at + k) if EVEN else tl.load(a_at + k, mask=inside, other=0.0)
            g = tl.load(gate_at + k) if EVEN else tl.load(gate_at + k, mask=keep, other=0.0)
            u = tl.load(up_at + k) if EVEN else tl.load(up_at + k, mask=keep, other=0.0)
            gate = tl.dot(a, tl.trans(g), gate)
            up = tl.dot(a, tl.trans(u), up)
    gate, up = gate * factor, up * factor
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(Y + rows[:, None] * N + cols[None], out.to(Y.dtype.element_ty), mask=(cols < N)[None])


@triton.jit
def embed(TABLE, TOKEN, GAIN, X, SCALED, SQUARES, D, P: tl.constexpr, PDL: tl.constexpr, BD: tl.constexpr):
    """X = the token's embedding, SCALED = X * gain, and the sum of squares of X in one part"""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BD)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(TOKEN + row).to(tl.int64)
    x = tl.load(TABLE + token * D + cols, mask=cols < D, other=0.0)
    tl.store(X + row * D + cols, x, mask=cols < D)
    wide = x.to(tl.float32)
    gain = tl.load(GAIN + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(SCALED + row * D + cols, (wide * gain).to(X.dtype.element_ty), mask=cols < D)
    tl.store(SQUARES + row * P, tl.sum(wide * wide))
