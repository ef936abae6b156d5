"""Products with weights as they lie in memory, in the order that a CPU does fastest at a few rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 1 << 18  # numbers in a weight from which oneDNN is ahead of MKL
FEW = 128  # rows up to which the weight goes first: oneDNN repacks its second operand, so that is the smaller one

_onednn = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None


def product(weight: Tensor, x: Tensor, *, rows: bool = False) -> Tensor:
    """x W^T, [N, out]; it may lie in memory as [out, N], but for `rows`."""
    if _by_onednn(weight, x):
        assert _onednn is not None
        if len(x) > FEW:
            return _onednn(x, weight, None, "none", [], "")
        out = _onednn(weight, x, None, "none", [], "").t()
        return out.contiguous() if rows else out
    if x.device.type == "cpu" and x.dtype == torch.float32 and not rows:
        return torch.mm(weight, x.t()).t()
    return F.linear(x, weight)


def add_product(x: Tensor, weight: Tensor, a: Tensor) -> None:
    """x += a W^T"""
    if _by_onednn(weight, a):
        x += product(weight, a)
    else:
        x.addmm_(a, weight.t())


def _by_onednn(weight: Tensor, x: Tensor) -> bool:
    return _onednn is not None and x.device.type == "cpu" and x.dtype == torch.float32 and weight.numel() >= LARGE
