"""Queries, keys and values on their way into a table of rows (model/even.py), turned as they go, and their gradients
on the way back: one pass over memory each way where turning and moving one after the other would be two."""

# Triton's constexpr takes plain numbers, and a launch takes options:
# pyright: reportArgumentType=false, reportCallIssue=false
from torch import Tensor

from hone.model import elementwise
from hone.model.even import Even, has_kernels, picked, summed
from hone.model.kernels.tiles import power


def turned_into(y_UAE: Tensor, cos: Tensor, sin: Tensor, even: Even, *, heads: int) -> Tensor:
    """The lines of y in the table, their first heads turned by angles whose cosines are cos [U, E], [n, W, A, E]"""
    _, A, E = y_UAE.shape
    if not has_kernels(y_UAE):
        return picked(elementwise.rotate_(y_UAE, cos, sin, heads=heads).flatten(1), even.cells).view(*even.shape, A, E)
    from hone.model.kernels.gather import turn_lines

    table = y_UAE.new_empty(*even.shape, A, E)
    if len(even.cells):
        turn_lines[(len(even.cells),)](
            y_UAE, even.cells, cos, sin, table, y_UAE.stride(0), cos.stride(0), HEADS=heads, ALL=A,
            BH=power(A), E=E,
        )  # fmt: skip
    return table


def turned_back(dq_nWHE: Tensor, dk_nWKE: Tensor, dv_nWKE: Tensor, cos: Tensor, sin: Tensor, even: Even) -> Tensor:
    """Gradients of queries and keys before they were turned and of values, side by side, [U, H + 2 K, E]"""
    lines = [_lines(x) for x in (dq_nWHE, dk_nWKE, dv_nWKE)]
    H, K, E = dq_nWHE.shape[2], dk_nWKE.shape[2], dq_nWHE.shape[3]
    if not has_kernels(dq_nWHE):
        q, *others = lines
        found = [picked(q, even.owner), *(summed(x, even.order, even.begin) for x in others)]
        return elementwise.rotate_back(*(x.unflatten(1, (-1, E)) for x in found), cos, sin)
    from hone.model.kernels.gather import turn_lines_back

    out = dq_nWHE.new_empty(len(even.owner), H + 2 * K, E)
    if len(out):
        turn_lines_back[(len(out),)](
            *lines, even.owner, even.order, even.begin, cos, sin, out, *(x.stride(0) for x in lines), cos.stride(0),
            H=H, K=K, BH=power(H), BK=power(K), E=E,
        )  # fmt: skip
    return out


def _lines(x_nWhE: Tensor) -> Tensor:
    """One line a cell, its heads side by side, [n W, h E]"""
    n, W, h, E = x_nWhE.shape
    return x_nWhE.reshape(n * W, h * E) if x_nWhE.stride(3) == 1 else x_nWhE.contiguous().view(n * W, h * E)
