"""Distributions over the vocabulary, and the statistics of a chunk of them with their gradients in closed form.

With x the logits, z = (x - max x) / T, q = softmax(z), r the reference and o the old policy, per position:

    logp    log q[target]              d/dz_j = [j = target] - q_j
    entropy H = -sum q log q           d/dz_j = -q_j (log q_j + H)
    ref_kl  K = sum q (log q - log r)  d/dz_j = q_j (log q_j - log r_j - K)
    old_kl  sum o (log o - log q)      d/dz_j = q_j - o_j

d/dx_j is d/dz_j over T: the maximum has no effect, since softmax does not change when all logits are shifted. A token
of probability 0 adds nothing and has no gradient, although its logarithm is -inf. A model that changes its logits after
the head, and second derivatives, go through autograd.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hone.model.backends.registry import Backend, backends_for
from hone.types import Support

LogRows = Callable[[slice], Tensor]  # positions -> their log-distributions [n, V]
Finish = Callable[[Tensor], Tensor]  # what a model does to its logits after the head
STATS = frozenset({"logp", "entropy", "ref_kl", "old_kl"})
# The statistics, and of each distribution max x (top) and log sum exp z (log).
TABLE_ROWS = ("top", "log", "logp", "entropy", "ref_kl", "old_kl", "ref_top", "ref_log", "old_top", "old_log")
ROW_OF = {name: i for i, name in enumerate(TABLE_ROWS)}
BLOCK = 1 << 18  # logits in one block: it stays in a core's cache between operations
GPU_BLOCK = 1 << 25  # on other devices


def at_least_float32(x: Tensor) -> Tensor:
    """As float32, or float64 if it is: log-probs and values are never kept in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLogits:
    """The logits of a distribution with which a chunk is compared."""

    logits: Tensor  # [n, V]
    temperature: float = 1.0
    is_log_prob: bool = False  # `logits` are log-probs already


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The logits of n positions, and the table of their statistics."""

    logits: Tensor  # [n, V]
    targets: Tensor  # int64 [n]
    table: Tensor  # at least float32 [NUMBERS, n]
    want: frozenset[str]
    temperature: float = 1.0
    cut: bool = False  # some logits are -inf: of tokens that the sampler could not draw
    others: Mapping[str, ComparedLogits]  # by "ref_kl" and "old_kl"

    def __getitem__(self, name: str) -> Tensor:
        """[n, 1]"""
        return self.table[ROW_OF[name], :, None]

    def rows(self, at: slice) -> "Chunk":
        """Some of the positions, as views."""
        return Chunk(
            logits=self.logits[at],
            targets=self.targets[at],
            table=self.table[:, at],
            want=self.want,
            temperature=self.temperature,
            cut=self.cut,
            others={
                name: ComparedLogits(logits=y.logits[at], temperature=y.temperature, is_log_prob=y.is_log_prob)
                for name, y in self.others.items()
            },
        )


def blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows, of a size that suits the device."""
    rows, cols = logits.shape
    step = max(1, (BLOCK if logits.is_cpu else GPU_BLOCK) // cols)
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def stats(chunk: Chunk) -> None:
    """Write the statistics that the chunk wants, and those that its gradient reads, into its table."""
    for at in blocks(chunk.logits):
        _stats(chunk.rows(at))


def grad(chunk: Chunk, upstream: Mapping[str, Tensor]) -> None:
    """Overwrite the logits with their gradient; upstream: the gradient of each statistic, [n]. `stats` ran before."""
    for at in blocks(chunk.logits):
        _grad(chunk.rows(at), {name: g[at, None] for name, g in upstream.items()})


def _centred(x: Tensor, top: Tensor, temperature: float, *, out: Tensor | None = None) -> Tensor:
    """(x - top) / T: the maximum is subtracted first, so that nothing overflows and the bits are the sampler's."""
    z = torch.sub(x, top, out=out)
    return z if temperature == 1 else z.div_(temperature)


def _stats(c: Chunk) -> None:
    x = at_least_float32(c.logits)
    top = x.amax(-1, keepdim=True)
    z = _centred(x, top, c.temperature)
    at_target = z.gather(-1, c.targets[:, None])
    weight = z.exp_() if c.want == {"logp"} else z.exp()
    total = weight.sum(-1, keepdim=True)
    log = total.log()
    found = {"top": top, "log": log, "logp": at_target - log}
    if "entropy" in c.want:
        found["entropy"] = log - _dot(weight, z) / total
    if "ref_kl" in c.want:
        found["ref_kl"] = _dot(weight, z - _compared(c, "ref", normalise=True)) / total - log
    if "old_kl" in c.want:
        old = _compared(c, "old", normalise=True)
        found["old_kl"] = _dot(old.exp(), old - (z - log))
    for name, value in found.items():
        c[name].copy_(value)


def _dot(p: Tensor, x: Tensor) -> Tensor:
    """[n, 1] sum p x; terms with p = 0 are 0, also for an infinite x"""
    found = (p * x).sum(-1, keepdim=True)
    if found.isnan().any():  # 0 times infinity; to mask first would cost more than the sum
        found = (p * x).masked_fill_(p == 0, 0.0).sum(-1, keepdim=True)
    return found


def _compared(c: Chunk, name: str, *, normalise: bool = False) -> Tensor:
    """The log-probs of "ref" or "old"; normalise: compute their top and log first."""
    other = c.others[f"{name}_kl"]
    y = at_least_float32(other.logits)
    if other.is_log_prob:
        return y
    if normalise:
        c[f"{name}_top"].copy_(y.amax(-1, keepdim=True))
        z = _centred(y, c[f"{name}_top"], other.temperature)
        c[f"{name}_log"].copy_(z.exp().sum(-1, keepdim=True).log_())
        return z.sub_(c[f"{name}_log"])
    return _centred(y, c[f"{name}_top"], other.temperature).sub_(c[f"{name}_log"])


def _grad(c: Chunk, upstream: Mapping[str, Tensor]) -> None:
    g = {name: value / c.temperature for name, value in upstream.items()}
    x = at_least_float32(c.logits)
    target = c.targets[:, None]
    kept = x.gather(-1, target) > -torch.inf if c.cut else None  # before the logits are overwritten
    # overwrites the chunk if it is float32 or float64
    logq = _centred(x, c["top"], c.temperature, out=x).sub_(c["log"])
    dx = logq.exp_().mul_(-g["logp"]) if g.keys() == {"logp"} else _mixed(c, g, logq)
    if "logp" in g:
        dx.scatter_add_(-1, target, g["logp"] if kept is None else g["logp"] * kept)
    if dx.data_ptr() != c.logits.data_ptr():
        c.logits.copy_(dx)


def _mixed(c: Chunk, g: Mapping[str, Tensor], logq: Tensor) -> Tensor:
    """q (logq (g_ref - g_entropy) + the position's constant - g_ref log r) - g_old o"""
    zero = torch.zeros_like(c["log"])
    g_entropy, g_ref, g_old = (g.get(name, zero) for name in ("entropy", "ref_kl", "old_kl"))
    constant = g_old - g.get("logp", zero)
    constant = constant - g_entropy * c["entropy"] if "entropy" in g else constant
    constant = constant - g_ref * c["ref_kl"] if "ref_kl" in g else constant
    q = logq.exp()
    dx = logq.mul_(g_ref - g_entropy).add_(constant)
    if "ref_kl" in g:
        dx.addcmul_(g_ref, _compared(c, "ref"), value=-1)
    if dx.mul_(q).sum().isnan():
        dx.masked_fill_(q == 0, 0.0)
    if "old_kl" in g:
        dx.addcmul_(g_old, _compared(c, "old").exp(), value=-1)
    return dx


class VocabBackend(Backend):
    """Computes the statistics of a chunk of logits and their gradient; this class itself does so in plain torch."""

    name = "plain"

    def covers(self, logits: Tensor) -> str | None:
        """The reason why it cannot compute such a chunk, or None if it can."""
        return None

    def stats(self, chunk: Chunk) -> None:
        """Write the statistics that the chunk wants, and those that its gradient reads, into its table."""
        stats(chunk)

    def grad(self, chunk: Chunk, upstream: Mapping[str, Tensor]) -> None:
        """Overwrite the logits with their gradient; upstream: the gradient of each statistic, [n]."""
        grad(chunk, upstream)

    def covers_head(self, rows: "HeadRows", plan: "Plan") -> str | None:
        """The reason why it cannot multiply with the head and compute the statistics in one step, or None if it can."""
        return "it needs logits"

    def head_stats(self, rows: "HeadRows", plan: "Plan", table: Tensor, *, logits: Tensor | None) -> None:
        """Write the plan's statistics into the table; logits: if given, is overwritten with the logits, [N, V]."""
        raise NotImplementedError


PLAIN = VocabBackend()


def vocab_backend(logits: Tensor) -> VocabBackend:
    """The first backend that covers such logits, or PLAIN."""
    return next((b for b in backends_for(VocabBackend) if b.covers(logits) is None), PLAIN)


def head_backend(rows: "HeadRows", plan: "Plan") -> VocabBackend | None:
    """The first backend that computes the statistics from hidden states, or None."""
    return next((b for b in backends_for(VocabBackend) if b.covers_head(rows, plan) is None), None)


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The distributions softmax(h W' / temperature) as LogRows: computed for the positions of each call.

    support: the tokens that the sampler could have drawn under top-k, top-p or min-p; the others have no probability.
    The gradient takes the choice of these tokens as a constant.
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
        logits = at_least_float32(F.linear(self.hidden[at], self.weight))
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
        """The rows of the other distribution, or ValueError if their shape is another."""
        if rows.shape != torch.Size(shape):
            raise ValueError(f"{name}: distribution of shape {tuple(rows.shape)}, expected {tuple(shape)}")
        return rows


def by_autograd(rows: HeadRows, plan: Plan) -> list[Tensor]:
    """The plan's statistics, [N] each. If there are several chunks, the backward pass recomputes them."""

    def at_chunk(hidden: Tensor, weight: Tensor, at: slice) -> tuple[Tensor, ...]:
        logq = HeadRows(hidden, weight, rows.temperature, rows.support, rows.finish)(at)
        return tuple(_stat(name, logq, plan, at) for name in plan.names)

    if len(plan.slices) > 1 and torch.is_grad_enabled():
        parts = [checkpoint(at_chunk, rows.hidden, rows.weight, at, use_reentrant=False) for at in plan.slices]
    else:
        parts = [at_chunk(rows.hidden, rows.weight, at) for at in plan.slices]
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


def differentiable_gradients(rows: HeadRows, plan: Plan, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and head as `grad` defines them, differentiable; given: [N] by statistic.

    Autograd cannot compute them: where the head is tied to the embedding, it would also go through the hidden states.
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
        return -_expectation(logq_nV.exp(), logq_nV)
    with torch.no_grad():
        logr = plan.check(name, plan.others[name](at), logq_nV.shape)
    if name == "ref_kl":
        return _expectation(logq_nV.exp(), logq_nV - logr)
    return _expectation(logr.exp(), logr - logq_nV)


def _expectation(p: Tensor, x: Tensor) -> Tensor:
    """sum p x; terms with p = 0 are 0, also for an infinite x"""
    return (p * x.masked_fill(p == 0, 0.0)).sum(-1)
