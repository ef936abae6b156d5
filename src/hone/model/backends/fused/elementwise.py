"""Norm, rotation and SiLU gate of a layer with their gradients: Triton kernels on a GPU, torch elsewhere.

Shapes: N tokens, D hidden, M intermediate; no leading dimensions. At least float32 inside.
"""

# Triton's constexpr takes plain numbers, and a launch takes options:
# pyright: reportArgumentType=false, reportCallIssue=false
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.kernels import elementwise as kernels
from hone.model.kernels.tiles import power
from hone.model.vocab.distribution import at_least_float32

PROGRAMS = 8 * 132  # that share the rows of a gradient: some for each multiprocessor of an H200


def has_kernels(x: Tensor) -> bool:
    """Whether Triton's kernels compute it: on a GPU, except float64, which is for checks."""
    return x.is_cuda and x.dtype != torch.float64


def norm(x_ND: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """x gain / rms(x)"""
    if not has_kernels(x_ND):
        return F.rms_norm(x_ND, gain_D.shape, gain_D, eps)
    y = torch.empty_like(x_ND)
    kernels.launch_norm(x_ND, gain_D, y, eps)
    return y


def norm_and_copy(x_ND: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x gain / rms(x), a copy of x)"""
    if not has_kernels(x_ND):
        return norm(x_ND, gain_D, eps), x_ND.clone()
    y, copy = torch.empty_like(x_ND), torch.empty_like(x_ND)
    kernels.launch_norm(x_ND, gain_D, y, eps, copy=copy)
    return y, copy


def norm_grad(
    x_ND: Tensor, gain_D: Tensor, eps: float, dy_ND: Tensor, *, plus: Tensor | None = None, again: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of x, with `plus` added, and of the gain. again: dy is overwritten with the norm's output."""
    if not has_kernels(x_ND):
        x, g = at_least_float32(x_ND), at_least_float32(dy_ND) * gain_D
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        n = x * scale
        dx = (g - n * (g * n).mean(-1, keepdim=True)) * scale
        dgain = (at_least_float32(dy_ND) * n).sum(0)
        if again:
            dy_ND.copy_(n.mul_(gain_D))
        return (dx if plus is None else dx.add_(plus)).to(x_ND.dtype), dgain.to(gain_D.dtype)
    (N, D), dx = x_ND.shape, torch.empty_like(x_ND)
    many = min(N, PROGRAMS)
    if not N:
        return dx, torch.zeros_like(gain_D)
    parts, dgain = torch.empty(many, D, dtype=torch.float32, device=x_ND.device), torch.empty_like(gain_D)
    kernels.norm_grad[(many,)](
        x_ND, gain_D, dy_ND, x_ND if plus is None else plus, dx, parts, N, D, eps,
        HAS_PLUS=plus is not None, AGAIN=again, BD=power(D), num_warps=_warps(D),
    )  # fmt: skip
    kernels.launch_sum(parts, dgain)
    return dx, dgain


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> Tensor:
    """The first heads of x [N, all heads, E] rotated in place, by cosines and sines [N, E]."""
    if not has_kernels(x):
        return _rotated_(x, cos, sin, heads)
    N, _, E = x.shape
    if N:
        kernels.rotate[(N,)](x, cos, sin, x.stride(0), cos.stride(0), HEADS=heads, BH=power(heads), E=E)
    return x


def rotate_back(dq_NHE: Tensor, dk_NKE: Tensor, dv_NKE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of queries and keys before `rotate_` and of values, side by side, [N, H + 2 K, E]"""
    if not has_kernels(dq_NHE):
        joined = torch.cat([dq_NHE, dk_NKE, dv_NKE], 1)
        return _rotated_(joined, cos, -sin, joined.shape[1] - dv_NKE.shape[1])
    (N, H, E), K = dq_NHE.shape, dk_NKE.shape[1]
    out = dq_NHE.new_empty(N, H + 2 * K, E)
    parts = [x if x.stride(2) == 1 else x.contiguous() for x in (dq_NHE, dk_NKE, dv_NKE)]
    if N:
        kernels.rotate_back[(N,)](
            *parts, cos, sin, out, *(n for x in parts for n in x.stride()[:2]), cos.stride(0),
            H=H, K=K, BH=power(H), BK=power(K), E=E,
        )  # fmt: skip
    return out


def _rotated_(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    part, half = x[:, :heads], x.shape[-1] // 2
    other = torch.cat([-part[..., half:], part[..., :half]], -1).mul_(sin[:, None])
    part.mul_(cos[:, None]).add_(other)
    return x


def gate(x: Tensor) -> Tensor:
    """silu(x[:, :M]) * x[:, M:]"""
    M = x.shape[1] // 2
    if not has_kernels(x):
        return F.silu(x[:, :M]).mul_(x[:, M:])
    y = x.new_empty(len(x), M)
    if len(x):
        kernels.gate[(len(x), -(-M // 1024))](x, y, M, BM=1024)
    return y


def gate_grad(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `gate`'s input. dy is overwritten with the gate's output, recomputed."""
    M, dx = x.shape[1] // 2, torch.empty_like(x)
    if not has_kernels(x):
        g, u, given = at_least_float32(x[:, :M]), at_least_float32(x[:, M:]), at_least_float32(dy)
        s = g.sigmoid()
        dx[:, M:] = given * g * s
        dx[:, :M] = given * u * (s * (1 + g * (1 - s)))
        dy.copy_(s.mul_(g).mul_(u))
        return dx
    if len(x):
        kernels.gate_grad[(len(x), -(-M // 1024))](x, dy, dx, M, BM=1024)
    return dx


def _warps(D: int) -> int:
    """Few: a sum over a row is faster with few warps."""
    return min(8, max(1, power(D) // 1_024))
