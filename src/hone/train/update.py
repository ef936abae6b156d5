"""From an annotated batch to one weight update. Each stage takes a Batch and returns it with more columns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hone.algo import table, weight
from hone.algo.table import Algorithm, objective, old_logp_from_first_pass
from hone.algo.terms import k3
from hone.dist import collect
from hone.log.stats import Stats
from hone.train import optim
from hone.train.annotate import forward_in_slices
from hone.train.guard import NonFiniteTensor, find_nonfinite, mark_nonfinite_loss
from hone.train.learner import Learner, retry_smaller
from hone.types import ABSENT, Batch, Forward

Correct = Callable[[Batch], Tensor]  # a factor on each token's weight


def assign_credit(batch: Batch, algo: Algorithm) -> Batch:
    """Adds advantages and, for a critic, returns; whitened over all ranks where the algorithm says so."""
    return table.assign_credit(batch, algo, reduce=collect.total)


def weigh(
    batch: Batch, algo: Algorithm, counts: weight.Totals | None = None, *, correct: Correct | None = None
) -> Batch:
    """Adds the loss weights of one optimiser step, times the correction for the sampler's mismatch.

    counts: `totals(batch)`, where the caller has them.
    """
    batch = weight.weigh(batch, algo, totals(batch) if counts is None else counts)
    if correct is None:
        return batch
    return replace(batch, token_weight=batch.token_weight * correct(batch))


def totals(batch: Batch) -> weight.Totals:
    """Rows and tokens trained on, over all ranks: the only numbers the loss's scale depends on."""
    return weight.totals(batch, reduce=collect.total)


def trained_on(minibatches: Iterable[Batch]) -> Iterator[tuple[Batch, weight.Totals]]:
    """The minibatches with their totals, without those in which no rank has a row that is trained on.

    A step on such a one would move the weights all the same, by Adam's momentum and weight decay.
    """
    return ((batch, counts) for batch in minibatches if (counts := totals(batch)).rows)


def update(learner: Learner, batch: Batch, algo: Algorithm) -> Stats:
    """One optimiser step: the gradients of all micro-batches, summed over ranks and clipped.

    If a loss or gradient is not finite, the update is skipped and counted. If memory runs out, all gradients are
    computed again in smaller micro-batches.
    """
    parameters = optim.parameters_of(learner.optimizer)
    stats, losses = retry_smaller(
        lambda: _gradients(learner, batch, algo), lambda: learner.halve_micro_batches(batch, algo.unit)
    )
    stats.add("loss", 0.0, 1 / collect.world()[1])  # token weights make the loss a sum over micro-batches and ranks
    mark_nonfinite_loss(parameters, losses)
    return stats if apply_gradients(learner, stats, parameters) else record_skip(learner, batch, algo)


def _gradients(learner: Learner, batch: Batch, algo: Algorithm) -> tuple[Stats, list[Tensor]]:
    """The gradients of all micro-batches, added up in the parameters. Returns statistics and each loss."""
    stats, losses = Stats(), list[Tensor]()
    learner.optimizer.zero_grad(set_to_none=True)
    cut = learner.cut(batch, algo.unit)
    for micro in cut if learner.shards is None else learner.shards.passes(cut, batch.rows(slice(0))):
        fwd = learner.policy(micro, algo.wants)
        micro = old_logp_from_first_pass(fwd, micro, algo)
        loss = objective(fwd, micro, algo.loss)
        loss.backward()
        losses.append(loss.detach())
        stats.add("loss", losses[-1], 0)
        if len(micro):
            add_statistics(stats, fwd, micro, algo)
    return stats, losses


def apply_gradients(learner: Learner, stats: Stats, parameters: Sequence[nn.Parameter]) -> bool:
    """Sum gradients over ranks, clip, step. If their norm is not finite, move nothing and return False."""
    parts = frozenset[nn.Parameter]() if learner.shards is None else learner.shards.parts
    whole = [p for p in parameters if p not in parts]
    collect.total_gradients(whole)
    norm = optim.clip_gradients(parameters, learner.clip_norm, parts=parts)
    finite = bool(norm.isfinite())
    if finite:
        learner.moved = True
        rate = optim.set_rate(learner.optimizer, learner.schedule(learner.updates))
        learner.optimizer.step()
        learner.updates += 1
        learner.guard.record_update()
        stats.add_all(lr=(rate, 1), skipped=(0.0, 1), grad_norm=(norm.detach(), 1))
    learner.optimizer.zero_grad(set_to_none=True)
    return finite


def record_skip(learner: Learner, batch: Batch, algo: Algorithm) -> Stats:
    """A skipped update: note why and keep its rows. Its statistics are part of no mean."""
    about = {"algo": algo.name, "updates": learner.updates, "control": learner.control}
    about |= {"micro_rows": learner.micro_rows, "micro_tokens": learner.micro_tokens, "ranks": collect.world()[1]}
    learner.guard.record_skip(batch, step=learner.version + 1, about=about, found=explain_skip(learner, batch, algo))
    stats = Stats()
    stats.add("skipped", 1.0, 1)
    return stats


def explain_skip(learner: Learner, batch: Batch, algo: Algorithm) -> list[NonFiniteTensor]:
    """What is not finite in an update on these rows. One pass over this rank's rows; nothing is stepped."""
    parameters = learner.trained()
    numbered = replace(batch, place=torch.arange(len(batch), device=batch.mask.device))
    cut = learner.cut(numbered, algo.unit)
    if learner.shards is not None:
        learner.shards.sum_gradients(True)
        cut = collect.pad_to_largest(cut, numbered.rows(slice(0)))
    found = find_nonfinite(learner.policy, cut, algo, trained=parameters)
    for p in parameters.values():
        p.grad = None
    return found


@torch.no_grad()
def measure_update_kl(stats: Stats, learner: Learner, batch: Batch, algo: Algorithm) -> None:
    """Adds update_kl, the mean k3 of KL(old || now) per trained token after the updates, over all ranks.

    It takes a pass, so it is measured only for an algorithm whose adaptive numbers follow it.
    """
    if any(c.reads == "update_kl" for c in algo.control):
        now = forward_in_slices(learner.policy, batch, frozenset({"logp"}), rows=learner.rows_of(batch))
        d = torch.where(batch.mask, now.logp - batch.old_logp, 0.0)
        sums = torch.stack([k3(-d).double().sum(), batch.mask.double().sum()])
        summed, count = collect.total(sums).tolist()
        if count:  # a KL of no token is unknown, not 0
            stats.add("update_kl", summed / count)


def adapt_controls(learner: Learner, algo: Algorithm, metrics: dict[str, float]) -> None:
    """Move each adaptive number by the metric that it follows, unless an update was skipped."""
    for c in () if metrics.get("skipped") else algo.control:
        if c.reads in metrics:
            learner.control[c.column] = c.update(learner.control[c.column], metrics[c.reads])


# --- statistics: sums and counts, so that no cut of the batch changes a mean ---


def add_statistics(stats: Stats, fwd: Forward, batch: Batch, algo: Algorithm) -> None:
    """Adds entropy, KLs, ratios, clipping, the critic's fit and the gap between sampler and learner."""
    mask, rows = batch.mask, batch.mask.any(-1)
    tokens = mask.sum()

    def mean(x: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, count) over the tokens of a [B, T] column, or over the rows of a [B] one."""
        if x.ndim == 2:
            return torch.where(mask, x.detach(), 0.0).double().sum(), tokens
        return torch.where(rows, x.detach(), 0.0).double().sum(), rows.sum()

    sums = {name: mean(term(fwd, batch)) for name, term in algo.watch}
    if fwd.logp is not ABSENT:
        logp = fwd.logp.detach()
        sums["nll"] = mean(-logp)
        if fwd.entropy is not ABSENT:
            sums["entropy"] = mean(fwd.entropy)
        elif algo.online:  # on the policy's own samples -log pi is an unbiased estimate; on a dataset's it is not
            sums["entropy"] = mean(-logp)
        if batch.ref_logp is not ABSENT and algo.online:  # k3 estimates a KL on the policy's own samples only
            sums["ref_kl"] = mean(k3(torch.where(mask, logp - batch.ref_logp, 0.0)))
        if batch.old_logp is not ABSENT:
            sums |= _ratios(logp, batch)
        if batch.gen_logp is not ABSENT:
            # KL(gen || learner) by k3 on the sampler's own tokens, and the largest difference of log-probs
            d = torch.where(mask, (logp if batch.old_logp is ABSENT else batch.old_logp) - batch.gen_logp, 0.0)
            sums["gen_kl"] = k3(-d).double().sum(), tokens
            stats.peak("gen_gap", d.abs().max())
    if fwd.value is not ABSENT and batch.returns is not ABSENT:
        sums |= _critic(fwd.value.detach(), batch)
    stats.add_all(**sums)


def _ratios(logp: Tensor, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """KL(old || now) by k3, and the sums of r and r^2 that the effective sample size is computed from."""
    d = torch.where(batch.mask, logp - batch.old_logp, 0.0)
    r = torch.where(batch.mask, d.exp(), 0.0).double()
    tokens = batch.mask.sum()
    sums = {"old_kl": k3(-d).double().sum(), "ratio": r.sum(), "ratio_square": r.square().sum()}
    return {name: (x, tokens) for name, x in sums.items()}


def _critic(value: Tensor, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """The moments that the explained variance is computed from."""
    tokens, sums = batch.mask.sum(), dict[str, tuple[Tensor, Tensor]]()
    for name, x in (("return", batch.returns), ("return_error", batch.returns - value)):
        x = torch.where(batch.mask, x, 0.0).double()
        sums |= {name: (x.sum(), tokens), f"{name}_square": (x.square().sum(), tokens)}
    return sums


def summary(stats: Stats, *, seconds: float) -> dict[str, float]:
    """The means over all ranks, with the statistics that are computed from them."""
    means = finish_statistics(stats.over_ranks(collect.gather).means())
    means["seconds"] = seconds
    if "tokens" in means:
        means["tokens_per_second"] = means["tokens"] / seconds
    return means


def finish_statistics(means: dict[str, float]) -> dict[str, float]:
    """Replaces raw moments by the effective sample size and the explained variance."""
    out = dict(means)
    if "ratio_square" in out:
        out["ess"] = out["ratio"] ** 2 / max(out.pop("ratio_square"), 1e-12)
    if "return_square" in out:
        variance = out.pop("return_square") - out["return"] ** 2
        error = out.pop("return_error_square") - out.pop("return_error") ** 2
        if variance > 1e-12:
            out["explained_variance"] = 1 - error / variance
    return out
