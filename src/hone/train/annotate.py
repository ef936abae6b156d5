"""The columns that forward passes fill: old log-probs, the reference's log-probs, values.

`annotate` is the definition: at most one pass a model, without gradients. `Annotator` is what the online loop calls. It
gives the same numbers with fewer passes, wherever a pass would only repeat what is known:

- from the first update: with one epoch, its own forward pass already has the old weights;
- from the sampler: on a CPU the C++ sampler and learner of a small model compute the same log-probs to the bit;
- early passes: no pass depends on a reward, so on a GPU they start while the host scores.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from hone.algo import credit
from hone.algo.prefer import last_value, reference_gain
from hone.algo.select import everything
from hone.algo.table import Algorithm
from hone.data.collate import add_scores, collate, mismatched_pairs, token_table
from hone.dist import collect
from hone.errors import HoneError
from hone.log.stats import StageTimer
from hone.model.decoder import same_bits_as_sampler
from hone.model.layout import run_passes
from hone.train.learner import Learner, is_out_of_memory, minibatch_rows, release_memory, split_minibatches
from hone.types import ABSENT, Batch, Forward, ForwardModel, Group, to_device

PROBED = 4  # rows whose log-probs verify the sampler's: those with the least probable tokens
AT_MASK = ("old_logp", "ref_logp", "ref_kl")  # 0 where nothing is trained on
PASSES = frozenset({*AT_MASK, "old_value", "bootstrap"})  # what forward passes give, whatever the reward
ASYNCHRONOUS = frozenset({"cuda"})  # devices that compute while the host goes on


def annotate(batch: Batch, algo: Algorithm, learner: Learner, *, mismatched: Batch | None = None) -> Batch:
    """Fill the columns that the algorithm needs and the batch lacks, with at most one forward pass a model."""
    needs = frozenset(c for c in algo.needs if getattr(batch, c) is ABSENT)
    columns: dict[str, Tensor] = {
        c.column: batch.constant(learner.control[c.column]) for c in algo.control if c.column in needs
    }
    sources = {"old_logp": "logp", "old_value": "value", "bootstrap": "value", "ref_kl": "ref_kl"}
    if want := frozenset(sources[c] for c in needs & sources.keys()):
        old = forward_in_slices(learner.policy, batch, want, rows=learner.rows_of(batch))
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


def _reference(learner: Learner, batch: Batch) -> Tensor:
    if learner.reference is None:
        raise ValueError("the algorithm compares with a reference model and the learner has none")
    return forward_in_slices(learner.reference, batch, frozenset({"logp"}), rows=learner.rows_of(batch)).logp


def _mismatched_kl(learner: Learner, batch: Batch | None) -> float:
    """KTO's z0 = max(0, mean log pi/ref over mismatched pairs), over every rank's rows."""
    if batch is None:
        raise ValueError("KTO needs the mismatched pairs of its rows")
    now = forward_in_slices(learner.policy, batch, frozenset({"logp"}), rows=learner.rows_of(batch))
    gain = reference_gain(now, replace(batch, ref_logp=_reference(learner, batch)))
    summed, count = collect.total(torch.stack([gain.double().sum(), gain.new_tensor(len(gain)).double()])).tolist()
    return max(0.0, summed / max(count, 1.0))


def mismatched_batch(groups: list[Group], algo: Algorithm, context: int, *, device: torch.device) -> Batch | None:
    """This rank's part of KTO's mismatched pairs, which combine the rows of all ranks. None for other algorithms."""
    if "kl_baseline" not in algo.needs:
        return None
    pairs = mismatched_pairs([r for g in groups for r in g], max_tokens=context)
    return collate([[r] for r in pairs[collect.share(len(pairs))]]).to(device)


# --- one pass over a whole batch ---


@torch.no_grad()
def forward_in_slices(model: ForwardModel, batch: Batch, want: frozenset[str], *, rows: int) -> Forward:
    """The forward pass of the whole batch, in slices, without gradients."""
    # a rank without rows takes part too: it needs the columns, and ranks may share each layer
    number = collect.largest(-(-max(len(batch), 1) // rows))
    slices = [slice(i * rows, (i + 1) * rows) for i in range(number)]
    if number > 1 and collect.world()[1] == 1:
        passes = [partial(_forward, model, batch.rows(at), want) for at in slices]
        each = run_passes(passes, batch.mask.device, _tensors)
    else:
        each = [_forward(model, batch.rows(at), want) for at in slices]
    parts = [part for made in each for part in made]
    columns = {f.name: [getattr(p, f.name) for p in parts] for f in fields(Forward)}
    return Forward(**{name: torch.cat(xs) for name, xs in columns.items() if xs[0] is not ABSENT})


def _tensors(parts: list[Forward]) -> list[Tensor]:
    return [x for part in parts for f in fields(part) if (x := getattr(part, f.name)) is not ABSENT]


def _forward(model: ForwardModel, batch: Batch, want: frozenset[str]) -> list[Forward]:
    """One pass, or two over half the rows where memory runs out."""
    try:
        return [model(batch, want)]
    except (RuntimeError, MemoryError) as error:
        # ranks may share each layer: all have to make as many passes
        if not is_out_of_memory(error) or len(batch) < 2 or collect.world()[1] > 1:
            raise
    release_memory()
    half = len(batch) // 2
    return [x for part in (slice(half), slice(half, None)) for x in _forward(model, batch.rows(part), want)]


# --- the loop's annotation, with as few passes as possible ---


class Annotator:
    """Collates and annotates the rollouts of one iteration at a time, and cuts their batch into minibatches.

    corrected: the loss weights compare the sampler's log-probs with the learner's, so both have to be computed.
    """

    def __init__(
        self, algo: Algorithm, learner: Learner, *, epochs: int = 1, lag: int = 0, corrected: bool = False
    ) -> None:
        self._algo, self._learner = algo, learner
        self._annotated_algo = without_old_logp(algo) if epochs == 1 and not corrected else algo
        self._early = EarlyPasses(self._annotated_algo, learner, lag=lag)
        self._sampler_agrees = not lag and not corrected and sampler_agrees(learner)
        self._from_sampler = False  # whether this iteration's tokens were drawn from the learner's own distribution

    def start_passes(self, groups: list[Group], timer: StageTimer) -> None:
        """Start passes over rollouts that are not scored yet, on a device that computes beside the host."""
        self._early.start(groups, timer)

    def collate(self, rounds: list[list[Group]]) -> Batch | None:
        """The rows of the kept groups, each with its place among the rows of all ranks. None if no rank has any."""
        kept = [g for chosen in rounds for g in chosen]
        if not collect.count(len(kept)):  # a rank that kept nothing takes part with no rows
            return None
        self._from_sampler = self._sampler_agrees and drawn_from_policy(kept)
        return number_rows(self._early.collate(kept), rounds)

    def annotate(self, batch: Batch) -> Batch:
        """Adds the columns that the algorithm needs."""
        if self._from_sampler:
            batch = add_sampler_logp(batch, self._annotated_algo, self._learner)
        batch = annotate(batch, self._annotated_algo, self._learner)
        keep_old_policy(self._learner, self._algo)
        return batch

    def minibatches(self, batch: Batch, *, count: int, seed: int) -> Iterator[Batch]:
        """The batch in at most `count` parts. All but the first have old log-probs, where the algorithm needs them."""
        return annotated_minibatches(
            batch, self._algo, self._learner, count=count, seed=seed, from_sampler=self._from_sampler
        )


def number_rows(batch: Batch, rounds: list[list[Group]]) -> Batch:
    """Adds each row's place among the rows of all ranks. Minibatches are cut by it."""
    sizes = [sum(len(g) for g in chosen) for chosen in rounds]
    place = torch.tensor(collect.places(sizes), dtype=torch.int64)
    host_copy = None if batch.host_copy is None else replace(batch.host_copy, place=place)
    return replace(batch, place=to_device(place, batch.targets.device), host_copy=host_copy)


def keep_old_policy(learner: Learner, algo: Algorithm) -> None:
    """Keep a copy of the policy as it is now where the loss reads the exact KL(old || now)."""
    if "old_kl" in algo.wants:
        learner.policy.old = learner.frozen_copy()


# --- old log-probs from the first update's own pass ---


def without_old_logp(algo: Algorithm) -> Algorithm:
    """The algorithm for `annotate` in a run of one epoch: old_logp is left to the first update's forward pass.

    It stays if something before or after the updates reads the column, or if the policy makes another pass anyway.
    """
    before = credit.reads_log_probs(algo.credit) or algo.needs & {"old_value", "ref_kl"}
    after = algo.trust_region or any(c.reads == "update_kl" for c in algo.control)
    return algo if before or after else replace(algo, needs=algo.needs - {"old_logp"})


def annotated_minibatches(
    batch: Batch, algo: Algorithm, learner: Learner, *, count: int, seed: int, from_sampler: bool = False
) -> Iterator[Batch]:
    """The minibatches of one epoch. If annotate left old_logp out, the first minibatch gets it from its own forward
    pass, and the others get it before the first update, from a pass or from the sampler."""
    if count == 1 or "old_logp" not in algo.needs or batch.old_logp is not ABSENT:
        yield from split_minibatches(batch, count=count, unit=algo.unit, seed=seed)
        return
    first, *others = minibatch_rows(batch, count=count, unit=algo.unit, seed=seed)
    if not others:
        yield batch.rows(first)
        return
    old = old_logp_from_sampler(batch, learner) if from_sampler else None
    if old is None:
        rest = torch.cat(others).sort().values  # in the order of the batch, where rows of a group are neighbours
        logp = forward_in_slices(
            learner.policy, batch.rows(rest), frozenset({"logp"}), rows=learner.rows_of(batch)
        ).logp
        old = logp.new_zeros(batch.mask.shape).index_copy(0, rest.to(logp.device), logp)
    yield batch.rows(first)
    yield from map(replace(batch, old_logp=old).rows, others)


# --- old log-probs from the sampler ---


def sampler_agrees(learner: Learner) -> bool:
    """Whether sampler and learner may compute the same numbers at all: the same code, on this rank alone."""
    return collect.world()[1] == 1 and same_bits_as_sampler(cast(nn.Module, learner.policy))


def drawn_from_policy(groups: list[Group]) -> bool:
    """Whether every token was drawn from the policy's own distribution: no temperature, truncation or penalty."""
    return all(r.gen_logp and r.raw_logp == r.gen_logp for g in groups for r in g)


def old_logp_from_sampler(batch: Batch, learner: Learner) -> Tensor | None:
    """old_logp [B, T] of rows that the policy has just written, or None if its own pass would give other numbers.

    A pass over the rows with the least probable tokens verifies this: other weights or another sampler show there. With
    few groups the answer is None: threads cannot share such a pass evenly, so it is made layer by layer and rounds
    differently.
    """
    if batch.gen_logp is ABSENT or not sampler_agrees(learner):
        return None
    if len(batch.group.unique()) < 2 * torch.get_num_threads():
        return None
    surprise = torch.where(batch.mask, batch.gen_logp, 0.0).sum(-1)
    probe = batch.rows(surprise.argsort(stable=True)[:PROBED].sort().values)
    if not (probe.gen_logp[probe.mask] < 0).any():  # a certain token has log-prob 0 under any sampler
        return None
    own = forward_in_slices(learner.policy, probe, frozenset({"logp"}), rows=len(probe)).logp
    same = own.dtype == batch.gen_logp.dtype and torch.equal(own[probe.mask], probe.gen_logp[probe.mask])
    return torch.where(batch.mask, batch.gen_logp, 0.0) if same else None


def add_sampler_logp(batch: Batch, algo: Algorithm, learner: Learner) -> Batch:
    """Adds old_logp where the algorithm reads it and no other pass of the policy is needed anyway."""
    if "old_logp" not in algo.needs or algo.needs & {"old_value", "bootstrap", "ref_kl"}:
        return batch
    found = old_logp_from_sampler(batch, learner)
    return batch if found is None else replace(batch, old_logp=found)


# --- passes that start before rewards are known ---


def may_start_early(algo: Algorithm, learner: Learner, *, lag: int) -> bool:
    """Whether one rank learns from all that is sampled, on a device that computes beside the host."""
    whole = algo.select is everything and not algo.refill and not lag and collect.world()[1] == 1
    return whole and bool(algo.needs & PASSES) and learner.device.type in ASYNCHRONOUS


class EarlyPasses:
    """The passes of one iteration's annotation, started on its tokens. Its batch takes over their columns."""

    def __init__(self, algo: Algorithm, learner: Learner, *, lag: int) -> None:
        self.on = may_start_early(algo, learner, lag=lag)
        self._algo, self._learner = replace(algo, needs=algo.needs & PASSES), learner
        self._groups: list[Group] = []
        self._started: Batch | None = None

    def start(self, groups: list[Group], timer: StageTimer) -> None:
        """Start the passes over rollouts that are not scored yet."""
        if not self.on or not any(groups):
            return
        self._groups = groups
        self._started = annotate(token_table(groups).to(self._learner.device), self._algo, self._learner)
        timer("annotate")

    def collate(self, groups: list[Group]) -> Batch:
        """The batch of the scored groups on the learner's device, with the columns of the early passes."""
        started, before = self._started, self._groups
        self._started, self._groups = None, []
        if started is None or not _same_tokens(before, groups):
            return collate(groups).to(self._learner.device)
        return _add_scores(started, groups)


def _add_scores(started: Batch, groups: list[Group]) -> Batch:
    """The early passes' batch, with the other columns of the scored rollouts."""
    whole, device = add_scores(started.host, groups), started.targets.device
    added = {name: to_device(x, device) for name, x in whole.columns().items() if getattr(started, name) is ABSENT}
    if torch.equal(whole.mask, started.host.mask):
        return replace(started, **added)
    mask = to_device(whole.mask, device)  # rows whose reward is invalid
    filled = {name: x for name in AT_MASK if (x := getattr(started, name)) is not ABSENT}
    zeroed = {name: torch.where(mask, x, 0.0) for name, x in filled.items()}
    host_copy = None if started.host_copy is None else replace(started.host_copy, mask=whole.mask)
    return replace(started, mask=mask, host_copy=host_copy, **added, **zeroed)


def _same_tokens(before: list[Group], after: list[Group]) -> bool:
    """Whether scoring left the tokens and the end of every rollout as they were."""
    return [len(g) for g in before] == [len(g) for g in after] and all(
        r.tokens is s.tokens and r.mask is s.mask and r.stop is s.stop
        for g, h in zip(before, after, strict=True)
        for r, s in zip(g, h, strict=True)
    )
