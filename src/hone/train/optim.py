"""AdamW with a warm-up and a schedule, and gradient clipping that refuses what is not finite."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from hone.dist import collect
from hone.train.adam8 import NONE, AdamW8

Schedule = Callable[[int], float]  # optimiser steps taken -> factor on the learning rate


def constant(step: int) -> float:
    """1"""
    return 1.0


def warmed(shape: str, *, warmup: int, steps: int, floor: float = 0.1) -> Schedule:
    """Linear warm-up over `warmup` steps, then constant, or down to `floor` by a line or a cosine."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        if shape == "linear":
            return 1 - (1 - floor) * done
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1.0

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
    sizes: Mapping[Tensor, int] = NONE,
) -> torch.optim.Optimizer:
    """Two groups, actor and critic; only matrices decay. `base_lr` of each group is what the schedule scales.

    bits: 32, or 8 for moments of one byte. sizes: of parameters whose other rows are on other ranks, all of them.
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

    parts: those that other ranks hold the rest of.
    """
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and p not in parts])
    if parts:
        own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and p in parts])
        norm = (collect.total(own.square()) + norm.to(own).square()).sqrt()
    if 0 < max_norm < norm + 1e-6:  # as torch scales; a norm in bounds costs no pass over the gradients
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
