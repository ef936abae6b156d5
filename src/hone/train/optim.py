"""AdamW with a warm-up and a schedule, gradient clipping, and two ways to save memory.

AdamW8 stores each moment in one byte instead of four: the logarithm of its share of the largest in its block.
Masters are copies that the optimiser steps in place of the parameters: in float32 if the parameters are in half
precision, and in the host's memory if a GPU's is short.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hone.dist import collect
from hone.model.vocab.distribution import at_least_float32

FLOOR = 0.1  # where a schedule ends, as a share of the learning rate
BLOCK = 256  # the most numbers that share a scale
SMALL = 4096  # vectors, and matrices below this size, keep float32 moments: they are small, and norms and biases matter
NO_SIZES: Mapping[Tensor, int] = {}
OCTAVES = 16.0  # the smallest stored magnitude is 2**-16 of the block's largest, so a code is within 2 or 4 per cent


def pack(x: Tensor, *, levels: int) -> tuple[Tensor, Tensor]:
    """Magnitudes [..., width] -> codes 0 (zero) to `levels`, and the largest of each block [..., 1]."""
    top = x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    code = (x / top).log2().mul_((levels - 1) / OCTAVES).add_(levels).round_()
    return code.clamp_(0, levels), top  # log2 of 0 is -inf, which is code 0


def unpack(code: Tensor, top: Tensor, *, levels: int) -> Tensor:
    """The inverse of `pack`."""
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
    """torch's AdamW with packed moments: its numbers, but for the rounding of the moments.

    A block never crosses rows, so that a rank that holds some rows of a matrix packs them as one rank with all rows
    would. sizes: for a parameter of which other ranks hold rows, the size of the whole.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float = 1e-8,
        sizes: Mapping[Tensor, int] = NO_SIZES,
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
    """[R, ...] -> [R, n, width]: each row in as few equal blocks as hold it, the last one padded with zeros."""
    columns = math.prod(x.shape[1:])
    n = -(-columns // BLOCK)
    width = -(-columns // n)
    return torch.nn.functional.pad(x.reshape(len(x), columns), (0, n * width - columns)).view(len(x), n, width)


def unblocked(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `blocks`."""
    return x.flatten(1)[:, : math.prod(like.shape[1:])].reshape(like.shape)


Schedule = Callable[[int], float]  # optimiser steps taken -> factor on the learning rate


def constant(step: int) -> float:
    """1"""
    return 1.0


def learning_rate_factor(shape: str, *, warmup: int, steps: int) -> Schedule:
    """Linear warm-up over `warmup` steps, then constant, or down to 0.1 by a line or a cosine."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        if shape == "linear":
            return 1 - (1 - FLOOR) * done
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1.0

    return factor


def adamw(
    actor: Sequence[nn.Parameter],
    critic: Sequence[nn.Parameter] = (),
    *,
    lr: float,
    critic_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    bits: int = 32,
    sizes: Mapping[Tensor, int] = NO_SIZES,
) -> torch.optim.Optimizer:
    """Two groups, actor and critic; only matrices decay. `base_lr` of each group is what the schedule scales.

    bits: 32, or 8 for AdamW8. sizes: for a parameter of which other ranks hold rows, the size of the whole.
    """
    groups = []
    for parameters, rate in ((actor, lr), (critic, critic_lr if critic_lr is not None else lr)):
        for decay, chosen in (
            (weight_decay, [p for p in parameters if p.ndim >= 2]),
            (0.0, [p for p in parameters if p.ndim < 2]),
        ):
            if chosen:
                groups.append({"params": chosen, "lr": rate, "base_lr": rate, "weight_decay": decay})
    if bits == 8:
        return AdamW8(groups, betas=betas, sizes=sizes)
    return torch.optim.AdamW(groups, betas=betas, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Scale every group's learning rate; returns the first one, to log."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return optimizer.param_groups[0]["lr"]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Every parameter the optimiser steps, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float, *, parts: Collection[nn.Parameter] = ()
) -> Tensor:
    """Scale gradients so that their joint norm is at most max_norm (0: never); returns the norm before.

    parts: parameters of which other ranks hold the rest.
    """
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and p not in parts])
    if parts:
        own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and p in parts])
        norm = (collect.total(own.square()) + norm.to(own).square()).sqrt()
    if 0 < max_norm < norm + 1e-6:  # as torch does; a smaller norm costs no pass over the gradients
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# --- copies that the optimiser steps in place of the parameters ---


class Masters:
    """One copy for each parameter, of at least float32.

    bfloat16 has 8 bits of mantissa: a step of less than 1/512 of a weight would be lost, and so would a micro-batch's
    gradient beside the sum of many. Each backward pass adds its gradient to the copy's.
    device: of the copies, their gradients and the optimiser's moments; None: that of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, device: torch.device | None = None) -> None:
        self._copies = {
            p: nn.Parameter(at_least_float32(p).detach().to(device or p.device, copy=True)) for p in parameters
        }
        for p in self._copies:
            p.register_post_accumulate_grad_hook(self._take)

    @property
    def half(self) -> bool:
        """Whether parameters have fewer bits than their copies."""
        return any(p.dtype != copy.dtype for p, copy in self._copies.items())

    def of(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Their copies, in order."""
        return [self._copies[p] for p in parameters]

    def _take(self, p: Tensor) -> None:
        copy, p_grad = self._copies[p], p.grad  # pyright: ignore[reportArgumentType]
        assert p_grad is not None, "the hook runs when there is one"
        if copy.grad is None:
            copy.grad = p_grad.to(copy.device, copy.dtype)
        else:
            copy.grad += p_grad.to(copy.device)
        p.grad = None

    @torch.no_grad()
    def publish(self, *_: object) -> None:
        """Round every copy into its parameter. The optimiser calls this after each step."""
        parameters, copies = list[Tensor](self._copies), list[Tensor](self._copies.values())
        torch._foreach_copy_(parameters, copies)  # pyright: ignore[reportPrivateImportUsage]


def trained(policy: nn.Module, masters: Masters | None) -> dict[str, nn.Parameter]:
    """What the optimiser steps, by name: the parameters, or their copies."""
    parameters = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    return parameters if masters is None else dict(zip(parameters, masters.of(list(parameters.values())), strict=True))
