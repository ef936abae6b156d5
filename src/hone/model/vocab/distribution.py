"""Distributions over the vocabulary and their statistics, written out for autograd.

What a model does to its own logits, and a second derivative, need this; vocab_fused.py has the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hone.model.layout.forward import wide
from hone.types import Support

LogRows = Callable[[slice], Tensor]  # positions -> their log-distributions [n, V]
Finish = Callable[[Tensor], Tensor]  # what a model does to its logits after the head's matrix


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The distributions softmax(h W' / temperature), computed when positions are asked for: a LogRows.

    support: the tokens that the sampler could have drawn under top-k, top-p or min-p; the others have no probability.
    Which tokens these are is a constant to the gradient.
    """

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    temperature: float = 1.0
    support: Support | None = None
    finish: Finish | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature {self.temperature} must be positive")

    def __call__(self, at: slice) -> Tensor:
        logits = wide(F.linear(self.hidden[at], self.weight))
        logits = logits if self.finish is None else self.finish(logits)
        if self.support is not None:
            logits = logits.masked_fill(self.support.outside(at, logits.shape[-1]), -torch.inf)
        return (logits / self.temperature).log_softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Which statistics of N positions are computed, and in which chunks."""

    names: tuple[str, ...]
    targets: Tensor  # int64 [N]
    others: Mapping[str, LogRows]  # by "ref_kl" and "old_kl"
    slices: tuple[slice, ...]

    def check(self, name: str, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """The other distribution's rows, if they have this shape."""
        if rows.shape != torch.Size(shape):
            raise ValueError(f"{name}: distribution of shape {tuple(rows.shape)}, expected {tuple(shape)}")
        return rows


def by_autograd(rows: HeadRows, plan: Plan) -> list[Tensor]:
    """The plan's statistics, [N] each; several chunks are computed again in the backward pass."""

    def at_chunk(hidden: Tensor, weight: Tensor, at: slice) -> tuple[Tensor, ...]:
        logq = HeadRows(hidden, weight, rows.temperature, rows.support, rows.finish)(at)
        return tuple(_stat(name, logq, plan, at) for name in plan.names)

    if len(plan.slices) > 1 and torch.is_grad_enabled():
        parts = [checkpoint(at_chunk, rows.hidden, rows.weight, at, use_reentrant=False) for at in plan.slices]
    else:
        parts = [at_chunk(rows.hidden, rows.weight, at) for at in plan.slices]
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


def differentiable_gradients(rows: HeadRows, plan: Plan, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """vocab_rows.py's gradients of hidden states and head, to be differentiated again; given: [N] by statistic.

    Not by autograd, for which a head that is tied to the embedding is behind the hidden states as well.
    """
    d_hidden, d_weight = list[Tensor](), torch.zeros_like(rows.weight)
    for at in plan.slices:
        logq, hidden = rows(at), rows.hidden[at]
        dz = sum((g[at, None] * _slope(name, logq, plan, at) for name, g in given.items()), torch.zeros_like(logq))
        d_logits = (dz / rows.temperature).to(hidden.dtype)
        d_hidden.append(d_logits @ rows.weight)
        d_weight = d_weight + d_logits.t() @ hidden
    return torch.cat(d_hidden), d_weight


def _slope(name: str, logq: Tensor, plan: Plan, at: slice) -> Tensor:
    """The statistic's derivative by z, [n, V]"""
    q = logq.exp()
    if name == "logp":
        target = torch.zeros_like(q).scatter(-1, plan.targets[at, None], 1.0)
        return target * (logq > -torch.inf) - q
    value = _stat(name, logq, plan, at)[:, None]
    if name == "entropy":
        return -q * (logq + value).masked_fill(q == 0, 0.0)
    with torch.no_grad():
        logr = plan.others[name](at)
    if name == "ref_kl":
        return q * (logq - logr - value).masked_fill(q == 0, 0.0)
    return q - logr.exp()


def _stat(name: str, logq_nV: Tensor, plan: Plan, at: slice) -> Tensor:
    """logp = log q(target), entropy = -sum q log q, ref_kl = KL(q || ref), old_kl = KL(old || q)"""
    if name == "logp":
        return logq_nV.gather(-1, plan.targets[at, None]).squeeze(-1)
    if name == "entropy":
        return -_dot(logq_nV.exp(), logq_nV)
    with torch.no_grad():
        logr = plan.check(name, plan.others[name](at), logq_nV.shape)
    if name == "ref_kl":
        return _dot(logq_nV.exp(), logq_nV - logr)
    return _dot(logr.exp(), logr - logq_nV)


def _dot(p: Tensor, x: Tensor) -> Tensor:
    """sum p x, where a p of 0 adds nothing whatever the x"""
    return (p * x.masked_fill(p == 0, 0.0)).sum(-1)
