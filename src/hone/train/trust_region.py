"""TRPO's update: the natural gradient by conjugate gradient, then a line search that keeps KL(old || new) in bound.

F is never formed: F v is a Hessian-vector product of the KL. The first term of the algorithm's loss is the surrogate;
the others train the critic by an ordinary optimiser step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hone.algo.table import Algorithm, Loss, TrustRegion, objective
from hone.dist import collect
from hone.log.stats import Stats
from hone.model.backends.registry import second_order
from hone.model.vocab.distribution import LogRows
from hone.train.guard import mark_nonfinite_loss
from hone.train.learner import Learner, retry_smaller
from hone.train.update import add_statistics, apply_gradients, record_skip, totals
from hone.types import Batch

Product = Callable[[Tensor], Tensor]
TOLERANCE = 1e-10  # of conjugate gradient: the residual's square, as a share of that of b


def conjugate_gradient(product: Product, b: Tensor, *, steps: int) -> Tensor:
    """Solve F x = b for a positive definite F given only F v."""
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), r @ r
    for _ in range(steps):
        if rr <= TOLERANCE * (b @ b):
            break
        Fp = product(p)
        alpha = rr / (p @ Fp)
        x, r = x + alpha * p, r - alpha * Fp
        rr, before = r @ r, rr
        p = r + (rr / before) * p
    return x


def step(learner: Learner, batch: Batch, algo: Algorithm) -> Stats:
    """One TRPO update: the actor inside the trust region, then the critic."""
    region = algo.trust_region
    if region is None:
        raise ValueError("the algorithm has no trust region")
    actor = learner.policy.actor_parameters()
    start = _flat(actor).clone()

    def attempt() -> Stats | None:
        _assign(actor, start)
        stats = Stats()
        if not _actor_step(learner, batch, algo, region=region, stats=stats):
            return None
        _critic_gradient(learner, batch, algo)
        return stats

    stats = retry_smaller(attempt, lambda: learner.halve_micro_batches(batch, algo.unit))
    if stats is not None and apply_gradients(learner, stats, learner.policy.critic_parameters()):
        return stats
    _assign(actor, start)
    return record_skip(learner, batch, algo)


def _actor_step(learner: Learner, batch: Batch, algo: Algorithm, *, region: TrustRegion, stats: Stats) -> bool:
    """Step the actor; False, and no step, if the surrogate or its gradient is not finite."""
    parameters = learner.policy.actor_parameters()
    surrogate = algo.loss[:1]
    with second_order(), _using_old_policy(learner, learner.policy):
        loss, gradient = _gradient(learner, batch, surrogate, parameters, stats=stats, algo=algo)
        if not (math.isfinite(loss) and gradient.isfinite().all()):
            return False
        if not gradient.any():
            stats.add("accepted", 0.0, 1)
            return True

        def product(v: Tensor) -> Tensor:
            return _fisher_product(learner, batch, parameters, v, algo.unit) + region.damping * v

        direction = conjugate_gradient(product, -gradient, steps=region.cg_steps)
        curvature = float(direction @ product(direction))
    full = direction * math.sqrt(2 * region.delta / max(curvature, 1e-20))
    _line_search(learner, batch, surrogate, full, region=region, before=loss, stats=stats, unit=algo.unit)
    return True


def _line_search(
    learner: Learner,
    batch: Batch,
    surrogate: Loss,
    full: Tensor,
    *,
    region: TrustRegion,
    before: float,
    stats: Stats,
    unit: int,
) -> None:
    """Accept the longest of full, full/2, ... that improves the surrogate and keeps the KL in bound, or none."""
    parameters = learner.policy.actor_parameters()
    start = _flat(parameters).clone()
    old = OldPolicy(learner, parameters)
    learner.moved, scale = True, 1.0
    for _ in range(region.backtracks):
        _assign(parameters, start + (scale * full).to(start.dtype))
        with _using_old_policy(learner, old):
            loss, kl = _measure(learner, batch, surrogate, unit)
        if math.isfinite(loss) and loss < before and kl <= region.delta:
            stats.add("accepted", 1.0, 1)
            stats.add("trust_kl", kl, 1)
            stats.add("step_scale", scale, 1)
            return
        scale *= region.shrink
    _assign(parameters, start)
    stats.add("accepted", 0.0, 1)


def _critic_gradient(learner: Learner, batch: Batch, algo: Algorithm) -> None:
    """The gradient of the critic's regression. It does not reach the actor's parameters."""
    parameters = learner.policy.critic_parameters()
    learner.optimizer.zero_grad(set_to_none=True)
    want, losses = frozenset({"value"}), list[Tensor]()
    for micro in learner.cut(batch, algo.unit):
        loss = objective(learner.policy(micro, want), micro, algo.loss[1:])
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g if p.grad is None else p.grad + g
        losses.append(loss.detach())
    mark_nonfinite_loss(parameters, losses)


# --- sums over the batch, one micro-batch at a time ---


def _gradient(
    learner: Learner, batch: Batch, loss: Loss, parameters: Sequence[nn.Parameter], *, stats: Stats, algo: Algorithm
) -> tuple[float, Tensor]:
    """The surrogate's value and flat gradient, float64, over all ranks."""
    value, gradient = 0.0, torch.zeros_like(_flat(parameters), dtype=torch.float64)
    for micro in learner.cut(batch, algo.unit):
        fwd = learner.policy(micro, algo.wants)
        part = objective(fwd, micro, loss)
        gradient += _flat(torch.autograd.grad(part, parameters)).double()
        value += part.item()
        add_statistics(stats, fwd, micro, algo)
    stats.add("loss", value, 1 / collect.world()[1])
    summed = collect.total(torch.cat([gradient, gradient.new_tensor([value])]))
    return float(summed[-1]), summed[:-1]


def _fisher_product(learner: Learner, batch: Batch, parameters: Sequence[nn.Parameter], v: Tensor, unit: int) -> Tensor:
    """F v: the gradient of (gradient of the mean KL(now || .)) . v, over all ranks."""
    result, tokens = torch.zeros_like(v), max(totals(batch).tokens, 1)
    for micro in learner.cut(batch, unit):
        kl = learner.policy(micro, frozenset({"old_kl"})).old_kl.sum() / tokens
        first = torch.autograd.grad(kl, parameters, create_graph=True)
        along = sum((g.double() * w).sum() for g, w in zip(first, _split(v, parameters), strict=True))
        assert isinstance(along, Tensor)
        result += _flat(torch.autograd.grad(along, parameters)).double()
    return collect.total(result)


@torch.no_grad()
def _measure(learner: Learner, batch: Batch, loss: Loss, unit: int) -> tuple[float, float]:
    """The surrogate and the exact mean KL(old || now) at the parameters as they are, over all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=batch.mask.device)
    # a plain mean over tokens: the policy moves on tokens of weight 0, too
    tokens = max(totals(batch).tokens, 1)
    for micro in learner.cut(batch, unit):
        fwd = learner.policy(micro, frozenset({"logp", "old_kl"}))
        sums += torch.stack([objective(fwd, micro, loss).double(), fwd.old_kl.double().sum() / tokens])
    value, kl = collect.total(sums).tolist()
    return value, kl


# --- the old policy ---


class OldPolicy:
    """The policy with its parameters as they were: the old distribution without a second model."""

    def __init__(self, learner: Learner, parameters: Sequence[nn.Parameter]) -> None:
        self.policy, self.parameters = learner.policy, parameters
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def log_rows(self, batch: Batch) -> LogRows:
        """The old log-probs over the vocabulary at each trained position, computed at once."""
        now = [p.detach().clone() for p in self.parameters]
        try:
            for p, value in zip(self.parameters, self.values, strict=True):
                p.copy_(value)
            rows = self.policy.log_rows(batch)  # pyright: ignore[reportAttributeAccessIssue]
            return rows(slice(None)).__getitem__
        finally:
            for p, value in zip(self.parameters, now, strict=True):
                p.copy_(value)


@contextmanager
def _using_old_policy(learner: Learner, old: object) -> Iterator[None]:
    before, learner.policy.old = learner.policy.old, old
    try:
        yield
    finally:
        learner.policy.old = before


# --- flat vectors ---


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _split(v: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    sizes = [p.numel() for p in parameters]
    return [x.view_as(p) for x, p in zip(v.split(sizes), parameters, strict=True)]


@torch.no_grad()
def _assign(parameters: Sequence[nn.Parameter], v: Tensor) -> None:
    for p, x in zip(parameters, _split(v, parameters), strict=True):
        p.copy_(x)
