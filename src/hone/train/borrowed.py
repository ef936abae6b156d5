"""Old log-probs without a pass: where sampler and learner compute the same numbers to the bit, the sampler's are they.

On a CPU C++ samples and trains small models, and adds up in one order (model/native). Nothing is taken on trust: some
rows of every iteration are read all the same, and other weights, temperatures or samplers would show in any row.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from hone.algo.table import Algorithm
from hone.dist import collect
from hone.model.native.stacked import bundled
from hone.train.evaluate import evaluate
from hone.train.learner import Learner
from hone.types import ABSENT, Batch

PROBED = 4  # rows that are read


def borrowed(batch: Batch, learner: Learner) -> Tensor | None:
    """old_logp [B, T] of rows that the policy has just written, or None where its own pass would give other numbers."""
    if batch.gen_logp is ABSENT or collect.world()[1] > 1 or not bundled(cast(nn.Module, learner.policy)):
        return None
    written = batch.mask.any(-1).nonzero().squeeze(1)
    if not len(written):
        return None
    at = written[torch.linspace(0, len(written) - 1, min(PROBED, len(written))).long()]
    probe = batch.rows(at)
    own = evaluate(learner.policy, probe, frozenset({"logp"}), rows=len(probe)).logp
    same = own.dtype == batch.gen_logp.dtype and torch.equal(own[probe.mask], probe.gen_logp[probe.mask])
    return torch.where(batch.mask, batch.gen_logp, 0.0) if same else None


def lent(batch: Batch, algo: Algorithm, learner: Learner) -> Batch:
    """With old_logp where the algorithm reads it and no other pass of the policy is needed anyway."""
    if "old_logp" not in algo.needs or algo.needs & {"old_value", "bootstrap", "ref_kl"}:
        return batch
    found = borrowed(batch, learner)
    return batch if found is None else replace(batch, old_logp=found)
