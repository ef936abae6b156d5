"""learn.cpp's functions on tensors: norm, rotation, gate and attention of a layer, with their gradients.

Shapes: N tokens, D hidden, M intermediate, U tokens in the list, H query heads, K key-value heads, E head size.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.model.kernels.cpp.library import call
from hone.model.rows import Spans


class CShape(ctypes.Structure):
    """As in learn.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("H", "K", "E", "rows", "groups", "threads")),
        *((name, ctypes.c_void_p) for name in ("row", "group")),
    ]


@dataclass(frozen=True, slots=True)
class Segments:
    """The rows of a list: each has own tokens, which follow a prefix that it may share with another row."""

    rows: np.ndarray  # int64 [R, 5]  own, count, shared, common, skip: as in learn.cpp; sorted by group
    groups: np.ndarray  # int64 [G + 1]  where the rows of a group begin

    @staticmethod
    def of(spans: Spans) -> "Segments":
        """Rows that share a prefix are a group."""
        start, prefix, common = (x.numpy().astype(np.int64) for x in (spans.start, spans.prefix, spans.common))
        own, count = start[:-1], np.diff(start)
        shared = np.where(common > 0, prefix, own)
        order = np.argsort(shared, kind="stable")
        rows = np.stack([own, count, shared, common, np.zeros_like(own)], 1)[order]
        groups = np.flatnonzero(np.diff(rows[:, 2], prepend=-1, append=-1))
        return Segments(np.ascontiguousarray(rows), groups)

    @staticmethod
    def lines(number: int, width: int) -> "Segments":
        """Rows of one length, one after the other."""
        own = np.arange(number, dtype=np.int64) * width
        rows = np.stack([own, np.full_like(own, width), own, np.zeros_like(own), np.zeros_like(own)], 1)
        return Segments(np.ascontiguousarray(rows), np.arange(number + 1, dtype=np.int64))

    def from_first_needed(self, needed_U: Tensor) -> "Segments":
        """The same rows; of each, the tokens before the first needed one are no queries."""
        before = np.concatenate([[0], np.cumsum(needed_U.numpy())])
        own, count = self.rows[:, 0], self.rows[:, 1]
        first = np.searchsorted(before, before[own], side="right") - 1  # the first needed token from there on
        rows = self.rows.copy()
        rows[:, 4] = np.minimum(first - own, count)
        return Segments(rows, self.groups)

    def tokens(self) -> Tensor:
        """The indices of the tokens that are queries, in order."""
        is_query = np.zeros(int((self.rows[:, 0] + self.rows[:, 1]).max(initial=0)), dtype=bool)
        for own, count, _, _, skip in self.rows.tolist():
            is_query[own + skip : own + count] = True
        return torch.from_numpy(np.flatnonzero(is_query))

    def shape(self, H: int, K: int, E: int) -> CShape:
        return CShape(
            H, K, E, len(self.rows), len(self.groups) - 1, torch.get_num_threads(), self.rows.ctypes.data,
            self.groups.ctypes.data,
        )  # fmt: skip


def norm(x_ND: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """x gain / rms(x)"""
    y = torch.empty_like(x_ND)
    call("norm", y, x_ND, gain_D, eps, *x_ND.shape, y, torch.get_num_threads())
    return y


def norm_grad(
    x_ND: Tensor, gain_D: Tensor, eps: float, dy_ND: Tensor, *, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, with `plus` added, and of the gain."""
    threads, dx = torch.get_num_threads(), torch.empty_like(x_ND)
    parts, step = gain_D.new_zeros(threads, len(gain_D)), 0 if plus is None else x_ND.shape[1]
    added = torch.zeros_like(gain_D) if plus is None else plus
    call("norm_grad", dx, x_ND, gain_D, eps, dy_ND, added, step, *x_ND.shape, dx, parts, threads)
    return dx, parts.sum(0)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, back: bool = False) -> Tensor:
    """The first heads of x [N, numbers of all heads] rotated in place, by cosines and sines [N, E]; back: by -sin."""
    (N, width), E = x.shape, cos.shape[1]
    call("rotate", x, x, cos, sin, N, width, heads, E, -1.0 if back else 1.0, torch.get_num_threads())
    return x


def gate(x: Tensor) -> Tensor:
    """silu(x[:, :M]) * x[:, M:]"""
    y = x.new_empty(len(x), x.shape[1] // 2)
    call("gate", y, x, *y.shape, y, torch.get_num_threads())
    return y


def gate_grad(x: Tensor, dy_NM: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate`'s input, and its output, recomputed."""
    dx, y = torch.empty_like(x), torch.empty_like(dy_NM)
    call("gate_grad", dx, x, dy_NM, *y.shape, dx, y, torch.get_num_threads())
    return dx, y


def attend(shape: CShape, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention in each row, [U, H E], and its logsumexp, [U, H]; qkv: [U, (H + 2 K) E]."""
    out, log = qkv.new_empty(len(qkv), shape.H * shape.E), qkv.new_empty(len(qkv), shape.H)
    call("attend", out, ctypes.byref(shape), qkv, out, log)
    return out, log


def attend_grad(shape: CShape, qkv: Tensor, out: Tensor, log: Tensor, dout: Tensor) -> Tensor:
    """The gradient of qkv."""
    dqkv = torch.zeros_like(qkv)
    call("attend_grad", out, ctypes.byref(shape), qkv, out, log, dout, dqkv)
    return dqkv
