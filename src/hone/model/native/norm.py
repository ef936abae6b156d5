"""A decoder's last norm on a CPU as one function with its gradient, added up as its layers' norms and the sampler's."""

# pyright: reportIncompatibleMethodOverride=false
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.model.decoder import RMSNorm
from hone.model.native import calls
from hone.model.native.stacked import hooked


def normed(norm: RMSNorm, x_BTD: Tensor) -> Tensor:
    """norm(x), for numbers that the library computes."""
    if hooked(norm) or type(norm) is not RMSNorm or norm.weight.dtype != x_BTD.dtype:
        return norm(x_BTD)
    y = _Norm.apply(x_BTD.reshape(-1, x_BTD.shape[-1]).contiguous(), norm.weight, norm.eps)
    return y.view(x_BTD.shape)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, gain)
        return calls.norm(x, gain, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gain = ctx.saved_tensors
        dx, dgain = calls.norm_grad(x, gain, ctx.eps, dy.contiguous())
        return dx, dgain, None
