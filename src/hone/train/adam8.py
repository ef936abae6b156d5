"""AdamW whose moments take one byte a number instead of four: the logarithm of its share of the block's largest."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # the most numbers that share a scale
SMALL = 4096  # vectors, and matrices below this size, keep float32 moments: they are few, and norms and biases matter
NONE: Mapping[Tensor, int] = {}
OCTAVES = 16.0  # the smallest magnitude kept is 2**-16 of the block's largest, so a code is within 2 or 4 per cent


def pack(x: Tensor, *, levels: int) -> tuple[Tensor, Tensor]:
    """Magnitudes [..., width] -> codes 0 (zero) to `levels`, and the largest of each block [..., 1]."""
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
    """The two moments, float32."""
    m, v = state["m"].float(), state["v"].float()
    return unpack(m.abs(), state["m_top"], levels=127) * m.sign(), unpack(v, state["v_top"], levels=255).square()


class AdamW8(torch.optim.Optimizer):
    """torch's AdamW with packed moments; the same numbers while moments are exact, within their rounding after.

    Blocks lie within rows, so that cutting a matrix between rows cuts no block: whoever holds a part of the rows packs
    them as one who holds all would. sizes: of parameters whose other rows are elsewhere, how many numbers all have.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float = 1e-8,
        sizes: Mapping[Tensor, int] = NONE,
    ) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.sizes = sizes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[p], group["betas"]
        packed = p.ndim >= 2 and self.sizes.get(p, p.numel()) >= SMALL
        g = blocks(grad.float()) if packed else grad.float()
        m, v = _moments(state, g)
        state["step"] = state.get("step", torch.zeros(())) + 1
        m.lerp_(g, 1 - b1)
        v.lerp_(g.square(), 1 - b2)
        t = float(state["step"])
        step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((unblocked(step, p) if packed else step).to(p.dtype), alpha=-group["lr"])
        self.state[p] = {"step": state["step"], **(encode(m, v) if packed else {"m": m, "v": v})}


def _moments(state: dict[str, Any], like: Tensor) -> tuple[Tensor, Tensor]:
    if not state:
        return torch.zeros_like(like), torch.zeros_like(like)
    return decode(state) if "m_top" in state else (state["m"], state["v"])


def blocks(x: Tensor) -> Tensor:
    """[R, ...] -> [R, n, width]: each row in as few equal blocks as hold it, the last one filled up with zeros."""
    columns = math.prod(x.shape[1:])
    n = -(-columns // BLOCK)
    width = -(-columns // n)
    return torch.nn.functional.pad(x.reshape(len(x), columns), (0, n * width - columns)).view(len(x), n, width)


def unblocked(x: Tensor, like: Tensor) -> Tensor:
    """What `blocks` was given."""
    return x.flatten(1)[:, : math.prod(like.shape[1:])].reshape(like.shape)
