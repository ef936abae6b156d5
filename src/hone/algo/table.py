"""What an algorithm is: which rollouts to select, how to credit, what to minimise, how to weigh. A value, not a class
to inherit from; the published names in online.py and offline.py are functions that make one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from hone.algo import credit, weight
from hone.algo.control import Control
from hone.algo.select import Select, everything
from hone.algo.terms import Term
from hone.types import ABSENT, Batch, Forward

Loss = tuple[tuple[float, Term], ...]  # (coefficient, term), summed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRegion:
    """How TRPO steps: natural gradient by conjugate gradient, then a line search inside the KL ball."""

    delta: float = 0.01  # bound on the mean KL(old || new)
    damping: float = 0.1  # added to the Fisher matrix
    cg_steps: int = 10
    backtracks: int = 10
    shrink: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The reference is another model, which the policy learns to be like."""

    top_k: int = 0  # compare the policy's likeliest tokens, and the rest together; 0: every token


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The whole of a method, as data."""

    name: str = ""  # as published; the factory's name
    loss: Loss
    credit: Callable[[Batch], Tensor] | None = None  # None: the loss reads no advantage
    whiten: bool = False  # normalise advantages over the iteration
    weigh: weight.Weigh = weight.token_mean
    select: Select = everything  # before collate
    needs: frozenset[str] = frozenset()  # columns the annotate stage must fill
    wants: frozenset[str] = frozenset({"logp"})  # fields of the forward pass that the loss reads
    control: tuple[Control, ...] = ()  # columns adapted between iterations
    watch: tuple[tuple[str, Term], ...] = ()  # logged, not minimised
    trust_region: TrustRegion | None = None
    teacher: Teacher | None = None
    online: bool = False  # samples its own data
    on_policy: bool = False  # its loss is right for the policy that sampled only: one update an iteration
    refill: bool = False  # ask for more prompts until the selected groups fill the iteration
    group: int = 1  # the fewest samples a prompt it can learn from
    unit: int = 1  # rows that must stay together: 2 for preference pairs


def objective(fwd: Forward, batch: Batch, loss: Loss) -> Tensor:
    """The weighted sum of the terms: a scalar that adds up over micro-batches and ranks."""
    anchor = fwd.value if fwd.logp is ABSENT else fwd.logp
    total = 0.0 * anchor.sum()  # an empty micro-batch still takes part in every collective
    for coefficient, term in loss:
        x = term(fwd, batch)
        used = batch.mask if x.ndim == 2 else batch.row_weight > 0
        weights = (batch.token_weight if x.ndim == 2 else batch.row_weight).to(x.dtype)
        total = total + coefficient * (x.where(used, 0.0) * weights).sum()
    return total


def begun(fwd: Forward, batch: Batch, algo: Algorithm) -> Batch:
    """With old_logp where it is needed and no pass of its own has filled it: then these weights are the old ones."""
    if "old_logp" not in algo.needs or batch.old_logp is not ABSENT:
        return batch
    return replace(batch, old_logp=fwd.logp.detach())


def assign_credit(batch: Batch, algo: Algorithm, *, reduce: credit.Reduce = credit.alone) -> dict[str, Tensor]:
    """The columns `adv` and, for a critic, `returns` (its target, before any whitening)."""
    if algo.credit is None:
        return {}
    adv = algo.credit(batch)
    columns = {"returns": adv + batch.old_value} if batch.old_value is not ABSENT else {}
    columns["adv"] = credit.whiten(adv, batch.mask, reduce=reduce) if algo.whiten else adv
    return columns
