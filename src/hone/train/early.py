"""Annotation begun before rewards are known: a GPU makes its passes while the host writes texts and scores them."""

from dataclasses import replace

import torch

from hone.algo.select import everything
from hone.algo.table import Algorithm
from hone.data.collate import collate, judged, table
from hone.dist import collect
from hone.log.laps import Laps
from hone.train.learner import Learner
from hone.train.step import annotate
from hone.types import ABSENT, Batch, Group, sent

AT_MASK = ("old_logp", "ref_logp", "ref_kl")  # 0 where nothing is trained on
PASSES = frozenset({*AT_MASK, "old_value", "bootstrap"})  # what forward passes give, whatever the reward
BESIDE = frozenset({"cuda"})  # devices that compute while the host goes on


def may_begin(algo: Algorithm, learner: Learner, *, lag: int) -> bool:
    """Whether all that is sampled is learned from, by this rank alone, and the host need not wait for a pass."""
    whole = algo.select is everything and not algo.refill and not lag and collect.world()[1] == 1
    return whole and bool(algo.needs & PASSES) and learner.device.type in BESIDE


class Early:
    """The passes of one iteration's annotation, begun on its tokens; what they gave is taken over by its batch."""

    def __init__(self, algo: Algorithm, learner: Learner, *, lag: int) -> None:
        self.on = may_begin(algo, learner, lag=lag)
        self._algo, self._learner = replace(algo, needs=algo.needs & PASSES), learner
        self._groups: list[Group] = []
        self._begun: Batch | None = None

    def begin(self, groups: list[Group], laps: Laps) -> None:
        """Launch the passes over rollouts that are still to be scored."""
        if not self.on or not any(groups):
            return
        self._groups = groups
        self._begun = annotate(table(groups).to(self._learner.device), self._algo, self._learner)
        laps("annotate")

    def collated(self, groups: list[Group]) -> Batch:
        """The scored groups where the learner computes, with the columns that were begun for these very tokens."""
        begun, before = self._begun, self._groups
        self._begun, self._groups = None, []
        if begun is None or not _same(before, groups):
            return collate(groups).to(self._learner.device)
        return _taken_over(begun, groups)


def _taken_over(begun: Batch, groups: list[Group]) -> Batch:
    """What was begun, and what else the scored rollouts hold."""
    whole, device = judged(begun.host, groups), begun.targets.device
    added = {name: sent(x, device) for name, x in whole.columns().items() if getattr(begun, name) is ABSENT}
    if torch.equal(whole.mask, begun.host.mask):
        return replace(begun, **added)
    mask = sent(whole.mask, device)  # rows whose reward is invalid
    filled = {name: x for name in AT_MASK if (x := getattr(begun, name)) is not ABSENT}
    zeroed = {name: torch.where(mask, x, 0.0) for name, x in filled.items()}
    home = None if begun.home is None else replace(begun.home, mask=whole.mask)
    return replace(begun, mask=mask, home=home, **added, **zeroed)


def _same(before: list[Group], after: list[Group]) -> bool:
    """Whether scoring has left every rollout's tokens and end as they were."""
    return [len(g) for g in before] == [len(g) for g in after] and all(
        r.tokens is s.tokens and r.mask is s.mask and r.stop is s.stop
        for g, h in zip(before, after, strict=True)
        for r, s in zip(g, h, strict=True)
    )
