"""What is worth watching in rollouts and updates, as sums and counts, so that no cut of the batch can skew it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.algo.kl import k3
from hone.algo.select import reward_of
from hone.algo.table import Algorithm
from hone.dist import collect
from hone.log import hacking
from hone.log.monitor import repeated
from hone.log.stats import Stats, merged
from hone.types import ABSENT, Batch, Forward, Group, Stop


def describe(rounds: Sequence[Sequence[Group]], kept: Sequence[Sequence[Group]]) -> Stats:
    """Rewards, lengths and how rollouts ended, by round of asking; an invalid reward is counted, never averaged in."""
    groups = [g for made in rounds for g in made]
    rollouts = [r for g in groups for r in g]
    lengths = [sum(r.mask) for r in rollouts]
    values = [value for r in rollouts if (value := reward_of(r)) is not None]
    stats = Stats()
    stats.add_all(
        reward=(sum(values), len(values)),
        invalid=(len(rollouts) - len(values), len(rollouts)),
        length=(sum(lengths), len(rollouts)),
        truncated=(sum(r.stop is Stop.LENGTH for r in rollouts), len(rollouts)),
        varied=varied(groups),
        kept=(sum(map(len, kept)), len(groups)),
        tokens=(sum(lengths), 1 / collect.world()[1]),  # of all ranks
        repetition=repeated([r.completion() for r in rollouts]),
    )
    for name, x in ((name, x) for r in rollouts if r.outcome for name, x in r.outcome.parts.items()):
        stats.add(f"reward/{name}", x)
    hacking.watch(stats, rollouts)
    return stats


def varied(groups: list[Group]) -> tuple[int, int]:
    """(groups whose valid rewards differ, groups of more than one); a rank's single rollouts count as one group."""
    compared = groups if any(len(g) > 1 for g in groups) else [[r for g in groups for r in g]]
    compared = [g for g in compared if len(g) > 1]
    found = [{value for r in g if (value := reward_of(r)) is not None} for g in compared]
    return sum(len(values) > 1 for values in found), len(compared)


def observe(stats: Stats, fwd: Forward, batch: Batch, algo: Algorithm) -> None:
    """Adds what this micro-batch shows: entropy, KLs, ratios, clipping, the critic's fit, the sampler's gap."""
    mask = batch.mask
    tokens = mask.sum()

    def mean(name: str, x: Tensor) -> None:
        stats.add(name, torch.where(mask, x.detach(), 0.0).double().sum(), tokens)

    for name, term in algo.watch:
        x = term(fwd, batch).detach()
        if x.ndim == 2:
            mean(name, x)
        else:
            rows = mask.any(-1)
            stats.add(name, torch.where(rows, x, 0.0).double().sum(), rows.sum())
    if fwd.logp is not ABSENT:
        logp = fwd.logp.detach()
        mean("nll", -logp)
        if fwd.entropy is not ABSENT:
            mean("entropy", fwd.entropy)
        elif algo.online:  # on the policy's own samples -log pi is an unbiased estimate; on a dataset's it is not
            mean("entropy", -logp)
        if batch.ref_logp is not ABSENT and algo.online:  # k3 estimates a KL on the policy's own samples only
            mean("ref_kl", k3(torch.where(mask, logp - batch.ref_logp, 0.0)))
        if batch.old_logp is not ABSENT:
            _ratios(stats, logp, batch)
        if batch.gen_logp is not ABSENT:
            _sampler_gap(stats, logp if batch.old_logp is ABSENT else batch.old_logp, batch)
    if fwd.value is not ABSENT and batch.returns is not ABSENT:
        _critic(stats, fwd.value.detach(), batch)


def _ratios(stats: Stats, logp: Tensor, batch: Batch) -> None:
    """KL(old || now) by k3, and the sums of r and r^2 from which the effective sample size follows."""
    d = torch.where(batch.mask, logp - batch.old_logp, 0.0)
    r = torch.where(batch.mask, d.exp(), 0.0).double()
    tokens = batch.mask.sum()
    stats.add("old_kl", k3(-d).double().sum(), tokens)
    stats.add("ratio", r.sum(), tokens)
    stats.add("ratio_square", r.square().sum(), tokens)


def _sampler_gap(stats: Stats, logp: Tensor, batch: Batch) -> None:
    """KL(gen || learner) by k3 on the sampler's own tokens, and the largest difference of log-probs."""
    d = torch.where(batch.mask, logp - batch.gen_logp, 0.0)
    stats.add("gen_kl", k3(-d).double().sum(), batch.mask.sum())
    stats.peak("gen_gap", d.abs().max())


def _critic(stats: Stats, value: Tensor, batch: Batch) -> None:
    """The moments from which the explained variance follows."""
    tokens = batch.mask.sum()
    for name, x in (("return", batch.returns), ("return_error", batch.returns - value)):
        x = torch.where(batch.mask, x, 0.0).double()
        stats.add(name, x.sum(), tokens)
        stats.add(f"{name}_square", x.square().sum(), tokens)


def summary(stats: Stats, *, seconds: float) -> dict[str, float]:
    """The means over all ranks' sums, with what follows from them."""
    everyone = merged(Stats.of(plain) for plain in collect.gather(stats.plain()))  # pyright: ignore
    means = derived(everyone.means())
    means["seconds"] = seconds
    if "tokens" in means:
        means["tokens_per_second"] = means["tokens"] / seconds
    return means


def derived(means: dict[str, float]) -> dict[str, float]:
    """Replaces raw moments by what they are for: effective sample size and explained variance."""
    out = dict(means)
    if "ratio_square" in out:
        out["ess"] = out["ratio"] ** 2 / max(out.pop("ratio_square"), 1e-12)
    if "return_square" in out:
        variance = out.pop("return_square") - out["return"] ** 2
        error = out.pop("return_error_square") - out.pop("return_error") ** 2
        if variance > 1e-12:
            out["explained_variance"] = 1 - error / variance
    return out
