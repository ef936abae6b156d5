"""What is worth watching in an update, as sums and counts, so that no cut of the batch can skew it."""

import torch
from torch import Tensor

from hone.algo.kl import k3
from hone.algo.table import Algorithm
from hone.dist import collect
from hone.log.stats import Stats, merged
from hone.types import ABSENT, Batch, Forward


def observe(stats: Stats, fwd: Forward, batch: Batch, algo: Algorithm) -> None:
    """Adds what this micro-batch shows: entropy, KLs, ratios, clipping, the critic's fit, the sampler's gap."""
    mask, rows = batch.mask, batch.mask.any(-1)
    tokens = mask.sum()

    def mean(x: Tensor) -> tuple[Tensor, Tensor]:
        """Over tokens of a [B, T] column, over rows of a [B] one."""
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
    """KL(old || now) by k3, and the sums of r and r^2 from which the effective sample size follows."""
    d = torch.where(batch.mask, logp - batch.old_logp, 0.0)
    r = torch.where(batch.mask, d.exp(), 0.0).double()
    tokens = batch.mask.sum()
    sums = {"old_kl": k3(-d).double().sum(), "ratio": r.sum(), "ratio_square": r.square().sum()}
    return {name: (x, tokens) for name, x in sums.items()}


def _critic(value: Tensor, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """The moments from which the explained variance follows."""
    tokens, sums = batch.mask.sum(), dict[str, tuple[Tensor, Tensor]]()
    for name, x in (("return", batch.returns), ("return_error", batch.returns - value)):
        x = torch.where(batch.mask, x, 0.0).double()
        sums |= {name: (x.sum(), tokens), f"{name}_square": (x.square().sum(), tokens)}
    return sums


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
