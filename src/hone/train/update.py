"""From an annotated batch to one weight update. Each stage takes a Batch and returns it with more columns."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hone.algo import table, weight
from hone.algo.kl import k3
from hone.algo.table import Algorithm, begun, objective
from hone.dist import collect
from hone.log.stats import Stats
from hone.train import metrics, optim
from hone.train.annotate import evaluate
from hone.train.guard import Found, examine, mark
from hone.train.learner import Learner, retry_smaller
from hone.types import Batch

Correct = Callable[[Batch], Tensor]  # a factor on each token's weight


def assign_credit(batch: Batch, algo: Algorithm) -> Batch:
    """Adds advantages and, for a critic, returns; whitened over all ranks where the algorithm says so."""
    return table.assign_credit(batch, algo, reduce=collect.total)


def weigh(batch: Batch, algo: Algorithm, *, correct: Correct | None = None) -> Batch:
    """Adds the loss weights of one optimiser step, times the correction for the sampler's mismatch."""
    batch = weight.weigh(batch, algo, totals(batch))
    if correct is None:
        return batch
    return replace(batch, token_weight=batch.token_weight * correct(batch))


def totals(batch: Batch) -> weight.Totals:
    """Rows and tokens trained on, over all ranks: the only numbers the loss's scale depends on."""
    return weight.totals(batch, reduce=collect.total)


def update(learner: Learner, batch: Batch, algo: Algorithm) -> Stats:
    """Gradients of every micro-batch, summed over ranks, clipped, one optimiser step.

    A loss or gradient that is not finite changes nothing: the step is skipped and counted. Where memory runs out, all
    gradients are forgotten and computed again in smaller micro-batches.
    """
    parameters = optim.parameters_of(learner.optimizer)
    stats, losses = retry_smaller(lambda: _gradients(learner, batch, algo), lambda: learner.halve(batch, algo.unit))
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
            metrics.observe(stats, fwd, micro, algo)
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
def kl_of_update(learner: Learner, batch: Batch, algo: Algorithm) -> Stats:
    """update_kl, the mean k3 of KL(old || now) per trained token after the updates, over all ranks.

    It takes a pass, so it is measured only for an algorithm whose adaptive numbers follow it.
    """
    stats = Stats()
    if any(c.reads == "update_kl" for c in algo.control):
        now = evaluate(learner.policy, batch, frozenset({"logp"}), rows=learner.rows_of(batch))
        d = torch.where(batch.mask, now.logp - batch.old_logp, 0.0)
        sums = torch.stack([k3(-d).double().sum(), batch.mask.double().sum()])
        summed, count = collect.total(sums).tolist()
        stats.add("update_kl", summed / max(count, 1.0))
    return stats


def steer(learner: Learner, algo: Algorithm, metrics: dict[str, float]) -> None:
    """Move each adaptive number by the metric it follows; none, where an update was skipped."""
    for c in () if metrics.get("skipped") else algo.control:
        if c.reads in metrics:
            learner.control[c.column] = c.update(learner.control[c.column], metrics[c.reads])
