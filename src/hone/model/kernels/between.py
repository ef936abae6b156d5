"""Everything between two attentions in one kernel: output product, gate and up, down product, the next layer's q, k, v.

Programs, no more than there are multiprocessors, wait for each other between the products: less than the end of one
kernel and the beginning of the next. For small batches, where a product has hardly more tiles than there are programs.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.model.kernels.linear import _factor, _prefetch


@triton.jit
def _wait(ARRIVED, BARRIER: tl.constexpr):
    """Go on when every program has come here; what each wrote before can then be read."""
    if BARRIER:
        many = tl.num_programs(0)
        tl.debug_barrier()  # all threads' stores come before the count
        seen = tl.atomic_add(ARRIVED, 1, sem="acq_rel") + 1
        while seen < many:
            seen = tl.atomic_add(ARRIVED, 0, sem="acquire")
        tl.debug_barrier()


@triton.jit
def _matrix(A, W, m, n, N, K, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A W^T for tile (m, n), float32 [BM, BN]; A was written by this kernel, so it is read past the L1 cache"""
    rows, cols, depth = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    a_at = A + rows[:, None].to(tl.int64) * K + depth[None]
    w_at = W + cols[:, None].to(tl.int64) * K + depth[None]
    out = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        inside = depth[None] < K - k
        if EVEN:
            a = tl.load(a_at + k, cache_modifier=".cg")
            w = tl.load(w_at + k)
        else:
            a = tl.load(a_at + k, mask=inside, other=0.0, cache_modifier=".cg")
            w = tl.load(w_at + k, mask=(cols < N)[:, None] & inside, other=0.0)
        out = tl.dot(a, tl.trans(w), out)
    return out


@triton.jit
def _add(
    A, W, X, GAIN, SCALED, SQUARES, m, n, D, K,
    P: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """X += A W^T, SCALED = X * gain, and the sums of squares of X, in tile (m, n)"""
    rows, cols = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    inside = (cols < D)[None]
    at = rows[:, None].to(tl.int64) * D + cols[None]
    before = tl.load(X + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    gain = tl.load(GAIN + cols, mask=cols < D, other=0.0).to(tl.float32)[None]
    x = (before + _matrix(A, W, m, n, D, K, EVEN, BM, BN, BK)).to(X.dtype.element_ty)
    tl.store(X + at, x, mask=inside)
    wide = tl.where(inside, x.to(tl.float32), 0.0)
    tl.store(SCALED + at, (wide * gain).to(X.dtype.element_ty), mask=inside)
    tl.store(SQUARES + rows * P + n, tl.sum(wide * wide, 1))


@triton.jit
def _gate(
    A, SQUARES, W, Y, m, n, N, K, parts, eps,
    P: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y = silu(A G^T / rms) * A U^T / rms in tile (m, n); G is W[:N], U is W[N:]"""
    rows, cols = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    factor = _factor(SQUARES, rows, parts, K, eps, P)
    gate = _matrix(A, W, m, n, N, K, EVEN, BM, BN, BK) * factor
    up = _matrix(A, W + N.to(tl.int64) * K, m, n, N, K, EVEN, BM, BN, BK) * factor
    at = Y + rows[:, None].to(tl.int64) * N + cols[None]
    tl.store(at, (gate / (1 + tl.exp(-gate)) * up).to(Y.dtype.element_ty), mask=(cols < N)[None])


@triton.jit
def _project(
    A, SQUARES, W, BIAS, Y, m, n, N, K, parts, eps, P: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y = A W^T / rms + bias in tile (m, n)"""
    rows, cols = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    out = _matrix(A, W, m, n, N, K, EVEN, BM, BN, BK) * _factor(SQUARES, rows, parts, K, eps, P)
    if HAS_BIAS:
        out += tl.load(BIAS + cols, mask=cols < N, other=0.0).to(tl.float32)[None]
    at = Y + rows[:, None].to(tl.int64) * N + cols[None]
    tl.store(at, out.to(Y.dtype.element_ty), mask=(cols < N)[None])


@triton.jit
def _fetch(W, N, K, tall, BN: tl.constexpr):
    """Send for the weights of this program's first tile."""
    tile = tl.program_id(0)
    first = tile // tall * BN
    if (tile % tall == 0) & (first < N):
        _prefetch(W + first.to(tl.int64) * K, tl.minimum(BN, N - first) * K * 2)


@triton.jit
def between(
    MIXED, X, SCALED, SQUARES, ACT, QKV, OUT, GATE_UP, DOWN, NEXT_QKV, BIAS, GAIN, NEXT_GAIN, ARRIVED,
    tall, D, H, M, Q, eps,
    P: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PHASES: tl.constexpr, BARRIER: tl.constexpr,
    PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """PHASES, bits: 1 the output product, 2 gate and up, 4 the down product, 8 the next layer's q, k and v

    tall: row tiles. Without BARRIER each phase is a launch of its own, as in the interpreter.
    """
    me, many = tl.program_id(0), tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
        _fetch(OUT, D, H, tall, BN)
        _fetch(GATE_UP, M, D, tall, BN)
        _fetch(GATE_UP + M.to(tl.int64) * D, M, D, tall, BN)
        _fetch(DOWN, D, M, tall, BN)
        gdc_wait()
    parts = tl.cdiv(D, BN)
    if PHASES & 1:
        for tile in range(me, tall * parts, many):
            _add(MIXED, OUT, X, GAIN, SCALED, SQUARES, tile % tall, tile // tall, D, H, P, EVEN, BM, BN, BK)
    _wait(ARRIVED, BARRIER)
    if PHASES & 2:
        for tile in range(me, tall * tl.cdiv(M, BN), many):
            _gate(SCALED, SQUARES, GATE_UP, ACT, tile % tall, tile // tall, M, D, parts, eps, P, EVEN, BM, BN, BK)
    _wait(ARRIVED + 1, BARRIER)
    if PHASES & 4:
        for tile in range(me, tall * parts, many):
            _add(ACT, DOWN, X, NEXT_GAIN, SCALED, SQUARES, tile % tall, tile // tall, D, M, P, EVEN, BM, BN, BK)
    if PHASES & 8:
        _wait(ARRIVED + 2, BARRIER)
        for tile in range(me, tall * tl.cdiv(Q, BN), many):
            _project(
                SCALED, SQUARES, NEXT_QKV, BIAS, QKV, tile % tall, tile // tall, Q, D, parts, eps, P, HAS_BIAS, EVEN,
                BM, BN, BK,
            )  # fmt: skip
