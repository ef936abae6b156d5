"""From a batch to one weight update. Each stage takes a Batch and returns it with more columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from hone.algo import credit, weight
from hone.algo.prefer import last_value, reference_gain
from hone.algo.table import Algorithm, assign_credit, begun, objective
from hone.dist import collect
from hone.errors import HoneError
from hone.log.stats import Stats
from hone.model.policy import Policy, frozen_copy
from hone.train import diagnose, memory, optim
from hone.train.examine import Found, examine
from hone.train.guard import Guard, mark
from hone.train.masters import Masters, trained
from hone.types import ABSENT, Batch, Forward, Model

if TYPE_CHECKING:
    from hone.train.shards import Shards  # loading torch's sharding takes half a second


class Trainable(Model, Protocol):
    """A model whose parameters are the actor's and the critic's; `old` is what KL(old || now) compares with."""

    old: Any

    def actor_parameters(self) -> list[nn.Parameter]: ...

    def critic_parameters(self) -> list[nn.Parameter]: ...


@dataclass(slots=True, kw_only=True)
class Learner:
    """The policy with its optimiser, and all else that changes from update to update."""

    policy: Trainable
    optimizer: torch.optim.Optimizer
    schedule: optim.Schedule = optim.constant
    reference: Model | None = None
    masters: Masters | None = None  # copies that are stepped: of a model in half precision, or on the host
    shards: "Shards | None" = None  # where each rank holds a part of the weights
    micro_rows: int = 64
    micro_tokens: int = 0  # in place of micro_rows, where it is set
    clip_norm: float = 1.0
    updates: int = 0  # optimiser steps taken
    guard: Guard = field(default_factory=Guard)  # of updates that are not finite
    version: int = 0  # iterations done: the version of the weights the sampler reads
    moved: bool = False  # whether weights may be others than when the last iteration ended
    control: dict[str, float] = field(default_factory=dict[str, float])  # adaptive numbers, by column

    @property
    def device(self) -> torch.device:
        """Where the policy computes, and its batches have to be."""
        if self.masters is None:
            return optim.parameters_of(self.optimizer)[0].device
        return next(cast(nn.Module, self.policy).parameters()).device  # the copies may be elsewhere

    def end(self) -> None:
        """An iteration is done."""
        self.version, self.moved = self.version + 1, False

    def trained(self) -> dict[str, nn.Parameter]:
        """What gradients end up in, by name."""
        policy = cast(nn.Module, self.policy)
        return trained(policy, self.masters) if self.shards is None else self.shards.trained()

    def frozen_copy(self) -> Policy:
        """The policy as it is now, without gradients."""
        return frozen_copy(cast(Policy, self.policy)) if self.shards is None else self.shards.frozen_copy()

    def rows_of(self, batch: Batch) -> int:
        """How many rows of the batch are in memory at once when they are only read."""
        longest = int(batch.host.real.sum(-1).max()) if len(batch) else 0
        fit = fitting(longest, rows=self.micro_rows, tokens=self.micro_tokens, device=self.device)
        return max(1, fit // self.guard.divisor)

    def cut(self, batch: Batch, unit: int) -> "Iterator[Batch]":
        """The micro-batches of an update."""
        return micro_batches(
            batch, rows=self.micro_rows, tokens=self.micro_tokens, unit=unit, divisor=self.guard.divisor
        )

    def halve(self, batch: Batch, unit: int) -> None:
        """Smaller micro-batches from here on, or HoneError where they cannot be: memory ran out on this batch."""
        before = self._largest(batch, unit)
        if before <= unit:
            tokens = int(batch.real.sum(-1).max()) if len(batch) else 0
            raise HoneError(
                f"out of memory with {before} rows at once, of up to {tokens} tokens: set train.recompute=always, "
                "train.micro_rows=1, or shorter rows (model.context, sample.max_tokens)"
            )
        while (now := self._largest(batch, unit)) == before:
            self.guard.divisor *= 2
        if self.shards is not None:  # other ranks are in the middle of a pass that takes this one too
            self.guard.leave()
            raise HoneError(
                f"out of memory with {before} rows at once: resume, which goes on with at most {now} on every rank "
                "(torchrun --max-restarts=3 -m hone run RECIPE --resume does so by itself)"
            )
        self.guard.events.append(f"out of memory with {before} rows at once: at most {now} from here on")

    def _largest(self, batch: Batch, unit: int) -> int:
        return max((len(micro) for micro in self.cut(batch, unit)), default=0)

    def begin(self, algo: Algorithm) -> None:
        """Give each adaptive number its start unless a checkpoint has given it a value."""
        for c in algo.control:
            self.control.setdefault(c.column, c.start)


# --- cutting ---

CACHE = 4096  # tokens: with more at once a CPU's caches hold too little of them, and each takes longer


def fitting(longest: int, *, rows: int, tokens: int, device: torch.device) -> int:
    """How many rows of so many tokens are computed at once: `rows`, or what `tokens` hold; on a CPU what suits it."""
    fit = tokens // max(1, longest) if tokens else rows
    return max(1, min(fit, CACHE // max(1, longest)) if device.type == "cpu" else fit)


def micro_batches(batch: Batch, *, rows: int, tokens: int = 0, unit: int = 1, divisor: int = 1) -> Iterator[Batch]:
    """Slices of at most about `rows` rows, longest first so that padding is little and memory peaks at once.

    With `tokens`, slices of as many rows as that many tokens hold, padding included, and at least one unit: rows of
    a unit (a preference pair) stay together. Weights are columns by now, so any cut gives the same gradient.
    divisor: by how much slices are smaller than that.
    """
    length = batch.host.real.sum(-1).view(-1, unit).amax(-1)
    units = length.argsort(descending=True, stable=True)
    index = (units[:, None] * unit + torch.arange(unit, device=units.device)).flatten()
    start, widths = 0, length[units].tolist()
    while start < len(index):
        longest = widths[start // unit]  # the first of a slice is its longest
        fit = fitting(longest, rows=rows, tokens=tokens, device=batch.mask.device)
        size = max(1, fit // divisor // unit) * unit
        yield batch.rows(index[start : start + size])
        start += size


def mini_batches(batch: Batch, *, count: int, unit: int, seed: int) -> Iterator[Batch]:
    """The iteration's rows, shuffled by `seed`, in `count` nearly equal parts: one optimiser step each.

    The parts are cut from the rows of all ranks, so that each step learns from the same rows whatever their number.
    """
    return (batch,).__iter__() if count == 1 else map(batch.rows, _parts(batch, count=count, unit=unit, seed=seed))


def _parts(batch: Batch, *, count: int, unit: int, seed: int) -> list[Tensor]:
    """The numbers of each part's rows here."""
    rows = collect.count(len(batch))
    here = torch.full((rows,), -1)  # where each row of all ranks lies on this one
    mine = torch.arange(len(batch))
    here[mine if batch.place is ABSENT else batch.place.cpu()] = mine
    order = torch.randperm(rows // unit, generator=torch.Generator().manual_seed(seed))
    found = [here[(part[:, None] * unit + torch.arange(unit)).flatten()] for part in order.tensor_split(count)]
    return [index[index >= 0] for index in found]


def begun_batches(batch: Batch, algo: Algorithm, learner: "Learner", *, count: int, seed: int) -> Iterator[Batch]:
    """The minibatches of the only epoch, where annotate left old_logp out: that of the first is left to its own forward
    pass, that of the others is read before it."""
    if count == 1 or "old_logp" not in algo.needs or batch.old_logp is not ABSENT:
        yield from mini_batches(batch, count=count, unit=algo.unit, seed=seed)
        return
    first, *others = _parts(batch, count=count, unit=algo.unit, seed=seed)
    rest = torch.cat(others).sort().values  # in the order of the batch, where rows of a group are neighbours
    logp = evaluate(learner.policy, batch.rows(rest), frozenset({"logp"}), rows=learner.rows_of(batch)).logp
    old = logp.new_zeros(batch.mask.shape).index_copy(0, rest.to(logp.device), logp)
    yield batch.rows(first)
    yield from map(replace(batch, old_logp=old).rows, others)


@torch.no_grad()
def evaluate(model: Model, batch: Batch, want: frozenset[str], *, rows: int) -> Forward:
    """The forward pass of the whole batch, in slices, without gradients."""
    # a rank without rows still gets columns, of no rows; and a pass may need every rank to put a layer together
    number = collect.most(-(-max(len(batch), 1) // rows))
    parts = [x for i in range(number) for x in _passed(model, batch.rows(slice(i * rows, (i + 1) * rows)), want)]
    columns = {f.name: [getattr(p, f.name) for p in parts] for f in fields(Forward)}
    return Forward(**{name: torch.cat(xs) for name, xs in columns.items() if xs[0] is not ABSENT})


def _passed(model: Model, batch: Batch, want: frozenset[str]) -> list[Forward]:
    """One pass, or two over half the rows where memory runs out."""
    try:
        return [model(batch, want)]
    except (RuntimeError, MemoryError) as error:
        # ranks may share each layer: all have to make as many passes
        if not memory.ran_out(error) or len(batch) < 2 or collect.world()[1] > 1:
            raise
    memory.release()
    half = len(batch) // 2
    return [x for part in (slice(half), slice(half, None)) for x in _passed(model, batch.rows(part), want)]


# --- the stages between collate and update ---


def shortened(algo: Algorithm) -> Algorithm:
    """For annotate, in a run of one epoch: old_logp is left to the first update's own forward pass (see begun_batches),
    if nothing before or after the updates reads the column and no other pass of the policy is needed anyway."""
    before = credit.reads_log_probs(algo.credit) or algo.needs & {"old_value", "ref_kl"}
    after = algo.trust_region or any(c.reads == "update_kl" for c in algo.control)
    return algo if before or after else replace(algo, needs=algo.needs - {"old_logp"})


def annotate(batch: Batch, algo: Algorithm, learner: Learner, *, mismatched: Batch | None = None) -> Batch:
    """Fill the columns the algorithm declares, with one forward pass per model at most."""
    columns: dict[str, Tensor] = {
        c.column: batch.constant(learner.control[c.column]) for c in algo.control if c.column in algo.needs
    }
    sources = {"old_logp": "logp", "old_value": "value", "bootstrap": "value", "ref_kl": "ref_kl"}
    if want := frozenset(sources[c] for c in algo.needs & sources.keys()):
        old = evaluate(learner.policy, batch, want, rows=learner.rows_of(batch))
        columns |= {c: getattr(old, sources[c]) for c in algo.needs & (sources.keys() - {"bootstrap"})}
        if "bootstrap" in algo.needs:
            columns["bootstrap"] = torch.where(batch.truncated, last_value(old, batch), 0.0)
    if "ref_logp" in algo.needs:
        columns["ref_logp"] = _reference(learner, batch)
    if "kl_baseline" in algo.needs:
        columns["kl_baseline"] = batch.constant(_mismatched_kl(learner, mismatched))
    batch = replace(batch, **columns)
    if missing := [c for c in sorted(algo.needs) if getattr(batch, c) is ABSENT]:
        names = ", ".join(missing)
        raise HoneError(f"the algorithm reads {names}, which the rows lack: use data or a reward that gives it")
    return batch


def remember(learner: Learner, algo: Algorithm) -> None:
    """Keep a copy of the policy as it is now where the loss reads the exact KL(old || now)."""
    if "old_kl" in algo.wants:
        learner.policy.old = learner.frozen_copy()


def _reference(learner: Learner, batch: Batch) -> Tensor:
    if learner.reference is None:
        raise ValueError("the algorithm compares with a reference model and the learner has none")
    return evaluate(learner.reference, batch, frozenset({"logp"}), rows=learner.rows_of(batch)).logp


def _mismatched_kl(learner: Learner, batch: Batch | None) -> float:
    """KTO's z0 = max(0, mean log pi/ref over mismatched pairs), over every rank's rows."""
    if batch is None:
        raise ValueError("KTO needs the mismatched pairs of its rows")
    now = evaluate(learner.policy, batch, frozenset({"logp"}), rows=learner.rows_of(batch))
    gain = reference_gain(now, replace(batch, ref_logp=_reference(learner, batch)))
    summed, count = collect.total(torch.stack([gain.double().sum(), gain.new_tensor(len(gain)).double()])).tolist()
    return max(0.0, summed / max(count, 1.0))


def credited(batch: Batch, algo: Algorithm) -> Batch:
    """Adds advantages and, for a critic, returns; whitened over all ranks where the algorithm says so."""
    return replace(batch, **assign_credit(batch, algo, reduce=collect.total))


def totals(batch: Batch) -> weight.Totals:
    """Rows and tokens trained on, over all ranks: the only numbers the loss's scale depends on."""
    counts = torch.stack([batch.mask.any(-1).sum(), batch.mask.sum()])
    rows, tokens = collect.total(counts).tolist()
    return weight.Totals(rows=rows, tokens=tokens)


Correct = Callable[[Batch], Tensor]  # a factor on each token's weight


def weighed(batch: Batch, algo: Algorithm, *, correct: Correct | None = None) -> Batch:
    """Adds the loss weights of one optimiser step, times the correction for the sampler's mismatch."""
    batch = weight.weigh(batch, algo.weigh, totals(batch))
    if correct is None:
        return batch
    return replace(batch, token_weight=batch.token_weight * correct(batch))


# --- the update ---


def update(learner: Learner, batch: Batch, algo: Algorithm) -> Stats:
    """Gradients of every micro-batch, summed over ranks, clipped, one optimiser step.

    A loss or gradient that is not finite changes nothing: the step is skipped and counted. Where memory runs out, all
    gradients are forgotten and computed again in smaller micro-batches.
    """
    parameters = optim.parameters_of(learner.optimizer)
    stats, losses = memory.retried(lambda: _gradients(learner, batch, algo), lambda: learner.halve(batch, algo.unit))
    stats.add("loss", 0.0, 1 / collect.world()[1])  # the weights make the losses of micro-batches and ranks one sum
    mark(parameters, losses)
    return stats if apply_gradients(learner, stats, parameters) else skipped(learner, batch, algo)


def _gradients(learner: Learner, batch: Batch, algo: Algorithm) -> tuple[Stats, list[Tensor]]:
    """Every micro-batch's gradient is added to the parameters', which begin at nothing; what was seen, and losses."""
    stats, losses = Stats(), list[Tensor]()
    learner.optimizer.zero_grad(set_to_none=True)
    cut = learner.cut(batch, algo.unit)
    for micro in cut if learner.shards is None else learner.shards.passes(cut, batch.rows(slice(0))):
        fwd = learner.policy(micro, algo.wants)
        micro = begun(fwd, micro, algo)
        loss = objective(fwd, micro, algo.loss)
        loss.backward()
        losses.append(loss.detach())
        stats.add("loss", losses[-1], 0)
        if len(micro):
            diagnose.observe(stats, fwd, micro, algo)
    return stats, losses


def apply_gradients(learner: Learner, stats: Stats, parameters: Sequence[nn.Parameter]) -> bool:
    """Sum over ranks, clip, step; or move nothing and return False when the norm is not finite."""
    parts = frozenset[nn.Parameter]() if learner.shards is None else learner.shards.parts
    whole = [p for p in parameters if p not in parts]
    collect.total_gradients(whole)
    norm = optim.clip_gradients(parameters, learner.clip_norm, parts=parts)
    finite = bool(norm.isfinite())
    if finite:
        learner.moved = True
        stats.add("lr", optim.set_rate(learner.optimizer, learner.schedule(learner.updates)), 1)
        learner.optimizer.step()
        learner.updates += 1
        learner.guard.taken()
        stats.add("skipped", 0.0, 1)
        stats.add("grad_norm", norm.detach(), 1)
    learner.optimizer.zero_grad(set_to_none=True)
    return finite


def skipped(learner: Learner, batch: Batch, algo: Algorithm) -> Stats:
    """An update that moved nothing: say why, keep its rows; what it computed is part of no mean."""
    about = {"algo": algo.name, "updates": learner.updates, "control": learner.control}
    about |= {"micro_rows": learner.micro_rows, "micro_tokens": learner.micro_tokens, "ranks": collect.world()[1]}
    learner.guard.caught(batch, step=learner.version + 1, about=about, found=explain(learner, batch, algo))
    stats = Stats()
    stats.add("skipped", 1.0, 1)
    return stats


def explain(learner: Learner, batch: Batch, algo: Algorithm) -> list[Found]:
    """What is not finite in an update on these rows, which is not taken; one pass over this rank's own."""
    parameters = learner.trained()
    numbered = replace(batch, place=torch.arange(len(batch), device=batch.mask.device))
    cut = learner.cut(numbered, algo.unit)
    if learner.shards is not None:
        learner.shards.sum_gradients(True)
        cut = collect.padded(cut, numbered.rows(slice(0)))
    found = examine(learner.policy, cut, algo, trained=parameters)
    for p in parameters.values():
        p.grad = None
    return found


@torch.no_grad()
def update_kl(learner: Learner, batch: Batch) -> float:
    """Mean k3 of KL(old || now) per trained token after the update, over all ranks."""
    now = evaluate(learner.policy, batch, frozenset({"logp"}), rows=learner.rows_of(batch))
    d = torch.where(batch.mask, now.logp - batch.old_logp, 0.0)
    sums = torch.stack([(d.expm1() - d).double().sum(), batch.mask.double().sum()])
    summed, count = collect.total(sums).tolist()
    return summed / max(count, 1.0)


def steer(learner: Learner, algo: Algorithm, metrics: dict[str, float]) -> None:
    """Move each adaptive number by the metric it follows; none, where an update was skipped."""
    for c in () if metrics.get("skipped") else algo.control:
        if c.reads in metrics:
            learner.control[c.column] = c.update(learner.control[c.column], metrics[c.reads])
