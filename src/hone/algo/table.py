"""The record of an algorithm: which rollouts to select, how to credit, what to minimise, how to weigh tokens. It is a
value, not a base class. Functions of the published names in online.py and offline.py make one."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

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
    cg_steps: int = 10  # of the conjugate gradient
    backtracks: int = 10  # the most steps that the line search tries
    shrink: float = 0.5  # the length of each of them over that of the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The reference is another model, which the policy learns to imitate."""

    top_k: int = 0  # compare the policy's most likely tokens, and the rest as one; 0: every token


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A whole method, as data."""

    name: str = ""  # as published; the factory's name
    loss: Loss  # what is minimised: terms, each with its coefficient
    credit: Callable[[Batch], Tensor] | None = None  # None: the loss reads no advantage
    whiten: bool = False  # normalise advantages over the iteration
    weigh: weight.Weigh = weight.token_mean  # how much each token counts
    select: Select = everything  # which rollouts to learn from, before they become a batch
    needs: frozenset[str] = frozenset()  # columns the annotate stage must fill
    wants: frozenset[str] = frozenset({"logp"})  # fields of the forward pass that the loss reads
    control: tuple[Control, ...] = ()  # columns adapted between iterations
    watch: tuple[tuple[str, Term], ...] = ()  # logged, not minimised
    trust_region: TrustRegion | None = None  # the policy takes natural-gradient steps (TRPO)
    teacher: Teacher | None = None  # the reference is a teacher (distil)
    online: bool = False  # samples its own data
    on_policy: bool = False  # its loss is right only for the policy that sampled: one update an iteration
    refill: bool = False  # ask for more prompts until the selected groups fill the iteration
    group: int = 1  # the fewest samples a prompt it can learn from
    unit: int = 1  # rows that must stay together: 2 for preference pairs


# the remedy when a column that a loss or a credit reads is absent
FILLED_BY: dict[str, str] = {
    "reward": "give each row its reward",
    "step_reward": "give the rewards of the steps, NaN where no step ends",
    "label": "give each row its label",
    "old_logp": "fill it with the policy's log-probs of the targets, taken before the first update",
    "ref_logp": "fill it with the reference model's log-probs of the targets, or leave an optional KL out by beta=0",
    "ref_kl": "fill it with the KL to the reference at each token, or leave an optional KL out by beta=0",
    "kl_coef": "fill it with the coefficient of the KL, batch.constant(beta), or leave an optional KL out by beta=0",
    "kl_baseline": "fill it with KTO's z0, or with batch.constant(0.0)",
    "margin": "fill it with by how much each chosen one is better, or with batch.constant(0.0)",
    "baseline": "fill it with the mean of earlier rewards, batch.constant(mean)",
    "bootstrap": "fill it with the critic's value after the last token, 0.0 where the episode finished",
    "old_value": "fill it with the critic's values, taken before the first update",
    "adv": "assign_credit(batch, algo) adds it",
    "returns": "assign_credit(batch, algo) adds it",
    "token_weight": "weigh(batch, algo) adds it",
}


def objective(fwd: Forward, batch: Batch, loss: "Algorithm | Loss") -> Tensor:
    """The weighted sum of an algorithm's loss terms: a scalar that adds up over micro-batches and ranks.

    >>> import torch
    >>> from hone.algo import Batch, Forward, objective, sft, weigh
    >>> token, yes = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool)
    >>> batch = Batch(inputs=token, targets=token, mask=yes, real=yes, group=torch.zeros(1, dtype=torch.long))
    >>> objective(Forward(logp=torch.tensor([[-1.0, -3.0]])), weigh(batch, sft()), sft()).item()
    2.0
    """
    name, parts = (loss.name, loss.loss) if isinstance(loss, Algorithm) else ("", loss)
    _check_shapes(fwd, batch, loss)
    anchor = fwd.value if fwd.logp is ABSENT else fwd.logp
    if anchor is ABSENT:
        raise ValueError(f"{name or 'the loss'} reads logp, which this forward pass lacks: fill Forward(logp=...)")
    if batch.token_weight is ABSENT or batch.row_weight is ABSENT:
        raise missing_column(name or "objective", "token_weight")
    total = 0.0 * anchor.sum()  # an empty micro-batch still takes part in every collective
    for coefficient, term in parts:
        x = _value(term, fwd, batch, name)
        used = batch.mask if x.ndim == 2 else batch.row_weight > 0
        weights = (batch.token_weight if x.ndim == 2 else batch.row_weight).to(x.dtype)
        total = total + coefficient * (x.where(used, 0.0) * weights).sum()
    return total


def missing_column(name: str, column: str) -> ValueError:
    """The error for a column that is read but absent."""
    remedy = FILLED_BY.get(column, f"fill it, as in replace(batch, {column}=...)")
    return ValueError(f"{name} reads {column}, which this batch lacks: {remedy}")


def _check_shapes(fwd: Forward, batch: Batch, loss: "Algorithm | Loss") -> None:
    """Refuse shapes that broadcasting would turn into another loss, and half a pair."""
    if callable(loss) or isinstance(loss, str):
        raise ValueError(f"the loss is {loss!r:.40}: give an algorithm, as in grpo()")
    for field in fields(Forward):
        x = getattr(fwd, field.name)
        if x is not ABSENT and x.shape != batch.mask.shape:
            raise ValueError(f"{field.name} has shape {tuple(x.shape)}, expected {tuple(batch.mask.shape)}")
    if isinstance(loss, Algorithm) and len(batch) % loss.unit:
        raise ValueError(
            f"{loss.name} reads pairs, a chosen row and then a rejected one: {len(batch)} rows are no pairs"
        )


def _value(term: Term, fwd: Forward, batch: Batch, name: str) -> Tensor:
    """The term's value. If it fails on an ABSENT column, or returns one, the error names the column."""
    try:
        found = term(fwd, batch)
        if found is ABSENT:
            raise TypeError("the term gives nothing")
        return found
    except (TypeError, AttributeError) as error:
        inner: Any = term.func if isinstance(term, partial) else term
        name = name or inner.__name__
        try:
            term(_Present(fwd), _Present(batch))  # pyright: ignore[reportArgumentType]
        except _AbsentRead as read:
            if read.record is fwd:
                raise ValueError(
                    f"{name} reads {read.column}, which this forward pass lacks: fill Forward({read.column}=...)"
                ) from error
            raise missing_column(name, read.column) from error
        raise


class _AbsentRead(Exception):
    """The term read a column that no stage has filled."""

    def __init__(self, record: Batch | Forward, column: str) -> None:
        self.record, self.column = record, column


class _Present:
    """A record that raises when an ABSENT column is read."""

    def __init__(self, record: Batch | Forward) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._record, name)
        if value is ABSENT:
            raise _AbsentRead(self._record, name)
        return value


def old_logp_from_first_pass(fwd: Forward, batch: Batch, algo: Algorithm) -> Batch:
    """Fill old_logp from this pass if it is needed and still absent. The weights of this pass are then the old ones."""
    if "old_logp" not in algo.needs or batch.old_logp is not ABSENT:
        return batch
    return replace(batch, old_logp=fwd.logp.detach())


def assign_credit(batch: Batch, algo: Algorithm, *, reduce: credit.Reduce = credit.one_rank) -> Batch:
    """Adds the columns `adv` and, for a critic, `returns` (its target, before any whitening) to an iteration's batch.

    reduce: sums a tensor over ranks, for an algorithm that whitens.

    >>> import torch
    >>> from hone.algo import Batch, assign_credit, dr_grpo
    >>> token, yes = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.bool)
    >>> batch = Batch(inputs=token, targets=token, mask=yes, real=yes, group=torch.zeros(2, dtype=torch.long),
    ...               reward=torch.tensor([1.0, 0.0]), old_logp=torch.zeros(2, 1))
    >>> assign_credit(batch, dr_grpo()).adv.tolist()
    [[0.5], [-0.5]]
    """
    if not isinstance(algo, Algorithm):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the algorithm is {algo!r:.40}: give what its function makes, as in grpo()")
    if algo.credit is None:
        return batch
    _check_credited(batch, algo)
    adv = algo.credit(batch)
    columns = {"returns": adv + batch.old_value} if batch.old_value is not ABSENT else {}
    columns["adv"] = credit.whiten(adv, batch.mask, reduce=reduce) if algo.whiten else adv
    return replace(batch, **columns)


def _check_credited(batch: Batch, algo: Algorithm) -> None:
    """Refuse a batch without a column that the credit reads. Columns that only the loss reads may come later."""
    reads = algo.needs
    if not credit.reads_log_probs(algo.credit):
        reads = algo.needs & {"step_reward", "old_value", "bootstrap", "baseline"}
    if credit.is_builtin(algo.credit) and "step_reward" not in reads:
        reads = reads | {"reward"}
    absent = [column for column in reads if getattr(batch, column) is ABSENT]
    if absent:
        raise missing_column(algo.name or "the credit", min(absent))
