"""Old log-probs without a pass: where sampler and learner compute the same numbers to the bit, the sampler's are they.

On a CPU C++ samples and trains small models, and adds up in one order (model/native). Nothing is taken on trust: those
rows of an iteration that say most are read all the same, and other weights or another sampler show there. A pass that
threads cannot share evenly is made layer by layer and would round differently: few groups are not borrowed from.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from hone.algo.table import Algorithm
from hone.dist import collect
from hone.model.decoder import same_bits_as_sampler
from hone.train.evaluate import evaluate
from hone.train.learner import Learner
from hone.types import ABSENT, Batch, Group

PROBED = 4  # rows that are read: those whose tokens were the least probable


def may_borrow(learner: Learner) -> bool:
    """Whether sampler and learner may compute the same numbers at all: the same code, on this rank alone."""
    return collect.world()[1] == 1 and same_bits_as_sampler(cast(nn.Module, learner.policy))


def unaltered(groups: list[Group]) -> bool:
    """Whether every token was drawn from the policy's own distribution: no temperature, truncation or penalty."""
    return all(r.gen_logp and r.raw_logp == r.gen_logp for g in groups for r in g)


def borrowed(batch: Batch, learner: Learner) -> Tensor | None:
    """old_logp [B, T] of rows that the policy has just written, or None where its own pass would give other numbers."""
    if batch.gen_logp is ABSENT or not may_borrow(learner):
        return None
    if len(batch.group.unique()) < 2 * torch.get_num_threads():
        return None
    surprise = torch.where(batch.mask, batch.gen_logp, 0.0).sum(-1)
    probe = batch.rows(surprise.argsort(stable=True)[:PROBED].sort().values)
    if not (probe.gen_logp[probe.mask] < 0).any():  # what is certain is so for any sampler
        return None
    own = evaluate(learner.policy, probe, frozenset({"logp"}), rows=len(probe)).logp
    same = own.dtype == batch.gen_logp.dtype and torch.equal(own[probe.mask], probe.gen_logp[probe.mask])
    return torch.where(batch.mask, batch.gen_logp, 0.0) if same else None


def lent(batch: Batch, algo: Algorithm, learner: Learner) -> Batch:
    """With old_logp where the algorithm reads it and no other pass of the policy is needed anyway."""
    if "old_logp" not in algo.needs or algo.needs & {"old_value", "bootstrap", "ref_kl"}:
        return batch
    found = borrowed(batch, learner)
    return batch if found is None else replace(batch, old_logp=found)
