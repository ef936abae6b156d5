"""From a batch to one weight update. Each stage takes a Batch and returns it with more columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hone.algo import credit, weight
from hone.algo.kl import k3
from hone.algo.prefer import last_value, reference_gain
from hone.algo.table import Algorithm, assign_credit, begun, objective
from hone.dist import collect
from hone.errors import HoneError
from hone.log.stats import Stats
from hone.train import diagnose, memory, optim
from hone.train.borrowed import borrowed
from hone.train.cut import mini_batches, parts
from hone.train.evaluate import evaluate
from hone.train.examine import Found, examine
from hone.train.guard import mark
from hone.train.learner import Learner
from hone.types import ABSENT, Batch


def begun_batches(
    batch: Batch, algo: Algorithm, learner: Learner, *, count: int, seed: int, fresh: bool = False
) -> Iterator[Batch]:
    """The minibatches of the only epoch, where annotate left old_logp out: that of the first is left to its own forward
    pass, that of the others is read before it, or is the sampler's. fresh: these weights wrote the rows."""
    if count == 1 or "old_logp" not in algo.needs or batch.old_logp is not ABSENT:
        yield from mini_batches(batch, count=count, unit=algo.unit, seed=seed)
        return
    first, *others = parts(batch, count=count, unit=algo.unit, seed=seed)
    old = borrowed(batch, learner) if fresh else None
    if old is None:
        rest = torch.cat(others).sort().values  # in the order of the batch, where rows of a group are neighbours
        logp = evaluate(learner.policy, batch.rows(rest), frozenset({"logp"}), rows=learner.rows_of(batch)).logp
        old = logp.new_zeros(batch.mask.shape).index_copy(0, rest.to(logp.device), logp)
    yield batch.rows(first)
    yield from map(replace(batch, old_logp=old).rows, others)


# --- the stages between collate and update ---


def shortened(algo: Algorithm) -> Algorithm:
    """For annotate, in a run of one epoch: old_logp is left to the first update's own forward pass (see begun_batches),
    if nothing before or after the updates reads the column and no other pass of the policy is needed anyway."""
    before = credit.reads_log_probs(algo.credit) or algo.needs & {"old_value", "ref_kl"}
    after = algo.trust_region or any(c.reads == "update_kl" for c in algo.control)
    return algo if before or after else replace(algo, needs=algo.needs - {"old_logp"})


def annotate(batch: Batch, algo: Algorithm, learner: Learner, *, mismatched: Batch | None = None) -> Batch:
    """Fill the columns that the algorithm declares and the batch lacks, with one forward pass per model at most."""
    needs = frozenset(c for c in algo.needs if getattr(batch, c) is ABSENT)
    columns: dict[str, Tensor] = {
        c.column: batch.constant(learner.control[c.column]) for c in algo.control if c.column in needs
    }
    sources = {"old_logp": "logp", "old_value": "value", "bootstrap": "value", "ref_kl": "ref_kl"}
    if want := frozenset(sources[c] for c in needs & sources.keys()):
        old = evaluate(learner.policy, batch, want, rows=learner.rows_of(batch))
        columns |= {c: getattr(old, sources[c]) for c in needs & (sources.keys() - {"bootstrap"})}
        if "bootstrap" in needs:
            columns["bootstrap"] = torch.where(batch.truncated, last_value(old, batch), 0.0)
    if "ref_logp" in needs:
        columns["ref_logp"] = _reference(learner, batch)
    if "kl_baseline" in needs:
        columns["kl_baseline"] = batch.constant(_mismatched_kl(learner, mismatched))
    batch = replace(batch, **columns)
    if missing := [c for c in sorted(needs) if getattr(batch, c) is ABSENT]:
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
    mask = batch.host.mask
    counts = torch.stack([mask.any(-1).sum(), mask.sum()])
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
    sums = torch.stack([k3(-d).double().sum(), batch.mask.double().sum()])
    summed, count = collect.total(sums).tolist()
    return summed / max(count, 1.0)


def steer(learner: Learner, algo: Algorithm, metrics: dict[str, float]) -> None:
    """Move each adaptive number by the metric it follows; none, where an update was skipped."""
    for c in () if metrics.get("skipped") else algo.control:
        if c.reads in metrics:
            learner.control[c.column] = c.update(learner.control[c.column], metrics[c.reads])
