"""Lines gathered by number, and sums over lines that were gathered from one, added in a fixed order."""

import triton
import triton.language as tl

from hone.model.kernels.elementwise import store_back

LINES, COLUMNS = 32, 64  # of a program's tile


@triton.jit
def pick_lines(X, INDEX, Y, lines, stride, width, BL: tl.constexpr, BW: tl.constexpr):
    """Y[i] = X[INDEX[i]], or zeros where that is below 0; lines are `width` numbers, in X `stride` apart"""
    at = tl.program_id(0) * BL + tl.arange(0, BL)
    keep = at < lines
    index = tl.load(INDEX + at, mask=keep, other=-1).to(tl.int64)
    there, to = index >= 0, at.to(tl.int64) * width
    for first in range(0, width, BW):
        cols = first + tl.arange(0, BW)
        inside = (cols < width)[None, :]
        x = tl.load(X + index[:, None] * stride + cols[None, :], mask=there[:, None] & inside, other=0.0)
        tl.store(Y + to[:, None] + cols[None, :], x, mask=keep[:, None] & inside)


@triton.jit
def sum_lines(X, ORDER, BEGIN, Y, lines, stride, width, BL: tl.constexpr, BW: tl.constexpr):
    """Y[t] = the sum of X[ORDER[j]] for j from BEGIN[t] to BEGIN[t + 1]"""
    at = tl.program_id(0) * BL + tl.arange(0, BL)
    keep = at < lines
    begin = tl.load(BEGIN + at, mask=keep, other=0)
    count = tl.load(BEGIN + at + 1, mask=keep, other=0) - begin
    cols = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (cols < width)[None, :]
    total = tl.zeros([BL, BW], tl.float32)
    for j in range(tl.max(count, 0)):
        more = j < count
        line = tl.load(ORDER + begin + j, mask=more, other=0).to(tl.int64)
        x = tl.load(X + line[:, None] * stride + cols[None, :], mask=more[:, None] & inside, other=0.0)
        total += x.to(tl.float32)
    to = at.to(tl.int64) * width
    tl.store(Y + to[:, None] + cols[None, :], total.to(Y.dtype.element_ty), mask=keep[:, None] & inside)


@triton.jit
def turn_lines(
    X, CELLS, COS, SIN, Y, stride, width,
    HEADS: tl.constexpr, ALL: tl.constexpr, BH: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Y[cell] = line CELLS[cell] of X, ALL heads of which the first HEADS are turned; zeros where that is below 0

    COS, SIN [tokens, width]: the angles of each token, of which the first E / 2 are read.
    """
    cell = tl.program_id(0).to(tl.int64)
    token = tl.load(CELLS + cell).to(tl.int64)
    head, i = tl.arange(0, BH)[:, None], tl.arange(0, E // 2)[None]
    inside = head < ALL
    keep, turned = inside & (token >= 0), (head < HEADS) & (token >= 0)
    at = X + token * stride + head * E + i
    a = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(at + E // 2, mask=keep, other=0.0).to(tl.float32)
    cos = tl.load(COS + token * width + i + head * 0, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(SIN + token * width + i + head * 0, mask=turned, other=0.0).to(tl.float32)
    to = Y + cell * ALL * E + head * E + i
    tl.store(to, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(to + E // 2, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _sum_back(
    X, ORDER, begin, end, OUT, stride, cos, sin,
    HEADS: tl.constexpr, BH: tl.constexpr, E: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """The sum of a token's lines, turned back where they were turned"""
    head, i = tl.arange(0, BH)[:, None], tl.arange(0, E // 2)[None]
    keep = head < HEADS
    a, b = tl.zeros([BH, E // 2], tl.float32), tl.zeros([BH, E // 2], tl.float32)
    for j in range(begin, end):
        at = X + tl.load(ORDER + j).to(tl.int64) * stride + head * E + i
        a += tl.load(at, mask=keep, other=0.0).to(tl.float32)
        b += tl.load(at + E // 2, mask=keep, other=0.0).to(tl.float32)
    store_back(a, b, OUT, cos, sin, HEADS, BH, E, TURN)


@triton.jit
def turn_lines_back(
    DQ, DK, DV, OWNER, ORDER, BEGIN, COS, SIN, OUT, q_line, k_line, v_line, width,
    H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """OUT [tokens, H + 2 K, E]: what a token's queries, in the one cell that answers it, and its keys and values, in
    all cells that hold it, were given, before they were turned"""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, E // 2)[None]
    cos = tl.load(COS + token * width + i).to(tl.float32)
    sin = tl.load(SIN + token * width + i).to(tl.float32)
    begin, end = tl.load(BEGIN + token), tl.load(BEGIN + token + 1)
    answered = tl.load(OWNER + token) >= 0
    OUT += token * (H + 2 * K) * E
    _sum_back(DQ, OWNER + token, 0, answered.to(tl.int32), OUT, q_line, cos, sin, H, BH, E, True)
    _sum_back(DK, ORDER, begin, end, OUT + H * E, k_line, cos, sin, K, BK, E, True)
    _sum_back(DV, ORDER, begin, end, OUT + (H + K) * E, v_line, cos, sin, K, BK, E, False)
