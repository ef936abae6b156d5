"""AdamW whose moments take one byte a number instead of four: the logarithm of its share of the block's largest."""

from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a scale
SMALL = 4096  # tensors below this size keep float32 moments: they are few, and norms and biases matter
OCTAVES = 16.0  # the smallest magnitude kept is 2**-16 of the block's largest, so a code is within 2 or 4 per cent


def pack(x: Tensor, *, levels: int) -> tuple[Tensor, Tensor]:
    """Magnitudes [n, BLOCK] -> codes 0 (zero) to `levels`, and the largest of each block [n, 1]."""
    top = x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    code = (x / top).log2().mul_((levels - 1) / OCTAVES).add_(levels).round_()
    return code.clamp_(0, levels), top  # log2 of 0 is -inf, which is code 0


def unpack(code: Tensor, top: Tensor, *, levels: int) -> Tensor:
    """The magnitudes that `pack` took."""
    size = ((code - levels) * (OCTAVES / (levels - 1))).exp2_() * top
    return torch.where(code > 0, size, 0.0)


def encode(m: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Both moments of one tensor: sign and 127 levels for the mean, 255 levels for the root of the mean square."""
    size, m_top = pack(m.abs(), levels=127)
    root, v_top = pack(v.sqrt(), levels=255)
    return {"m": (size * m.sign()).to(torch.int8), "m_top": m_top, "v": root.to(torch.uint8), "v_top": v_top}


def decode(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The two moments, float32 [n, BLOCK]."""
    m, v = state["m"].float(), state["v"].float()
    return unpack(m.abs(), state["m_top"], levels=127) * m.sign(), unpack(v, state["v_top"], levels=255).square()


class AdamW8(torch.optim.Optimizer):
    """torch's AdamW with packed moments; the same numbers while moments are exact, within their rounding after."""

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[p], group["betas"]
        m, v = self._moments(p, state)
        g = _blocks(p.grad.float(), len(m), m.shape[1]) if p.grad is not None else m
        state["step"] = state.get("step", torch.zeros(())) + 1
        m.lerp_(g, 1 - b1)
        v.lerp_(g.square(), 1 - b2)
        t = float(state["step"])
        step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(step.flatten()[: p.numel()].view_as(p).to(p.dtype), alpha=-group["lr"])
        self.state[p] = {"step": state["step"], **(encode(m, v) if p.numel() >= SMALL else {"m": m, "v": v})}

    def _moments(self, p: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if not state:
            width = BLOCK if p.numel() >= SMALL else max(p.numel(), 1)
            zeros = p.new_zeros(-(-p.numel() // width), width, dtype=torch.float32)
            return zeros, zeros.clone()
        return decode(state) if "m_top" in state else (state["m"], state["v"])


def _blocks(x: Tensor, rows: int, width: int) -> Tensor:
    """The numbers in rows of `width`, the last one filled up with zeros."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, rows * width - len(flat))).view(rows, width)
