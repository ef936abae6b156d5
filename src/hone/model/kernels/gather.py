"""Sums over lines that were gathered from one: the gradient of a gather, added in a fixed order."""

import triton
import triton.language as tl


@triton.jit
def sum_lines(X, ORDER, BEGIN, Y, width, BW: tl.constexpr):
    """Y[t] = the sum of X[ORDER[j]] for j from BEGIN[t] to BEGIN[t + 1]; lines are `width` numbers"""
    line = tl.program_id(0)
    cols = tl.program_id(1) * BW + tl.arange(0, BW)
    keep = cols < width
    total = tl.zeros([BW], tl.float32)
    for j in range(tl.load(BEGIN + line), tl.load(BEGIN + line + 1)):
        total += tl.load(X + tl.load(ORDER + j) * width + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(Y + line.to(tl.int64) * width + cols, total.to(Y.dtype.element_ty), mask=keep)
