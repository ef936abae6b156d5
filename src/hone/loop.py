"""The two loops. Read this file first: one stage a line, and one file behind each stage.

`online` samples its own data; `offline` reads it. Both are generators: they yield after each iteration, which is when
logs are written and checkpoints taken, and all that changes lives in the learner, the roller and the source.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hone.algo.select import reward_of
from hone.algo.table import Algorithm
from hone.data.collate import collate, mismatched
from hone.data.feed.budget import Budgeted
from hone.data.feed.source import Feed
from hone.dist import collect
from hone.errors import HoneError
from hone.log import hacking
from hone.log.laps import Laps
from hone.log.monitor import repeated
from hone.log.stats import Stats, merged
from hone.rollout import overlap
from hone.rollout.supply import Ahead, Rounds, check_lag
from hone.train import diagnose, trust_region
from hone.train.borrowed import lent, may_borrow, unaltered
from hone.train.early import Early
from hone.train.learner import Learner
from hone.train.step import (
    Correct,
    annotate,
    begun_batches,
    credited,
    remember,
    shortened,
    steer,
    update,
    update_kl,
    weighed,
)
from hone.types import Batch, Group, Stop, Task, sent

Roll = Callable[[list[Task], slice], list[Group]]  # sample a group for each task of this rank's part
Score = Callable[[list[Group]], list[Group]]  # give each rollout its outcome
Scored = Callable[[Callable[[], list[Task]], Laps], list[Group]]  # both, of the tasks that a function takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one pass through the loop did."""

    number: int  # counts from 1
    metrics: dict[str, float]
    groups: list[Group]  # as sampled and scored, before selection


def online(
    tasks: Feed[Task] | Ahead,
    roll: Roll,
    score: Score,
    learner: Learner,
    algo: Algorithm,
    *,
    prompts: int,
    epochs: int = 1,
    minibatches: int = 1,
    refill_rounds: int = 8,
    correct: Correct | None = None,
    publish: Callable[[int], None] = lambda version: None,
    seed: int = 0,
) -> Iterator[Iteration]:
    """Prompts -> rollouts -> rewards -> batch -> credit -> updates -> publish, for as long as it is asked."""
    supply = tasks if isinstance(tasks, Ahead) else Ahead(tasks)
    algo = _fitting(algo, supply, updates=epochs * minibatches, corrected=correct is not None)
    declared = shortened(algo) if epochs == 1 and correct is None else algo
    learner.begin(algo)
    early = Early(declared, learner, lag=supply.lag)
    # a correction compares the sampler's numbers with the learner's
    lone = not supply.lag and correct is None and may_borrow(learner)
    scored = partial(_scored, roll, score, supply.stop, early)
    fill = partial(_fill, supply, scored, algo, prompts=prompts, rounds=refill_rounds)
    while True:
        laps = Laps()
        sampled = supply.next(fill, laps, partial(publish, learner.version))
        groups, rounds = [g for made in sampled for g in made], [algo.select(made) for made in sampled]
        kept, batch = [g for chosen in rounds for g in chosen], None
        fresh = lone and unaltered(kept)
        if collect.count(len(kept)):  # a rank that kept nothing takes part with no rows
            batch = numbered(early.collated(kept), rounds)
            batch = annotate(lent(batch, declared, learner) if fresh else batch, declared, learner)
            remember(learner, algo)
        stats = describe(groups, kept)  # while a GPU is still at work on the columns
        batch = batch if batch is None else credited(batch, algo)
        if supply.lag:
            stats.add("lag", sum(learner.version - r.version for g in groups for r in g), sum(map(len, groups)))

        laps("annotate")
        if batch is not None:
            seeds = [hash_seed(seed, learner.version, epoch) for epoch in range(epochs)]
            stats.merge(
                _updated(learner, batch, algo, seeds=seeds, minibatches=minibatches, correct=correct, fresh=fresh)
            )

        laps("update")
        supply.wait(laps)
        metrics = summary(stats, seconds=laps.total())
        steer(learner, algo, metrics)
        learner.end()
        laps("update")
        if not supply.owes:  # else its weights are still to write what could not be written beside this iteration
            publish(learner.version)
        laps("publish")
        metrics |= learner.control | laps.metrics()
        yield Iteration(number=learner.version, metrics=metrics, groups=groups)


def offline(
    rows: Feed[Group], learner: Learner, algo: Algorithm, *, size: int, context: int = 0
) -> Iterator[Iteration]:
    """Rows -> batch -> update, for as long as it is asked; `size` groups (rows or pairs) a step, or a budget of tokens.

    context: the most tokens the model reads (0: no limit), for KTO's mismatched pairs may be longer than any row.
    """
    learner.begin(algo)
    while True:
        start = time.perf_counter()
        groups = collect.together(rows.step if isinstance(rows, Budgeted) else partial(rows.take, size))
        mismatched = mismatched_batch(groups, algo, context, device=learner.device)
        groups = groups[collect.share(len(groups))]
        batch = collate(groups).to(learner.device)
        batch = annotate(batch, algo, learner, mismatched=mismatched)
        batch = weighed(batch, algo)
        stats = update(learner, batch, algo)
        stats.add("tokens", float(batch.mask.sum()), 1 / collect.world()[1])

        metrics = summary(stats, seconds=time.perf_counter() - start)
        steer(learner, algo, metrics)
        learner.end()
        yield Iteration(number=learner.version, metrics=metrics, groups=groups)


def _updated(
    learner: Learner,
    batch: Batch,
    algo: Algorithm,
    *,
    seeds: Sequence[int],
    minibatches: int,
    correct: Correct | None,
    fresh: bool,
) -> Stats:
    """What was seen in the updates on one iteration's batch; seeds: of each epoch, by which minibatches are cut."""
    stats, take = Stats(), trust_region.step if algo.trust_region else update
    for seed in seeds:
        for part in begun_batches(batch, algo, learner, count=minibatches, seed=seed, fresh=fresh):
            stats.merge(take(learner, weighed(part, algo, correct=correct), algo))
    if any(c.reads == "update_kl" for c in algo.control):
        stats.add("update_kl", update_kl(learner, batch))
    return stats


def _fitting(algo: Algorithm, supply: Ahead, *, updates: int, corrected: bool) -> Algorithm:
    """The algorithm with what the correction reads, or HoneError where it may not be used like this."""
    if algo.on_policy and updates > 1:
        raise HoneError("this algorithm is strictly on policy: set train.epochs=1 and train.minibatches=1")
    if algo.trust_region and updates > 1:  # each step's KL is bounded, their sum would not be
        raise HoneError("a trust region bounds one step an iteration: set train.epochs=1 and train.minibatches=1")
    if supply.lag:
        check_lag(algo, name=algo.name or "this algorithm", corrected=corrected)
    # the factor is pi_old / pi_gen
    return replace(algo, needs=algo.needs | {"old_logp"}) if corrected else algo


def _fill(supply: Ahead, scored: Scored, algo: Algorithm, laps: Laps, *, prompts: int, rounds: int) -> Rounds:
    """This rank's part of everything sampled, scored, by round of asking.

    With refill, ask for as many prompts as all ranks together still miss. Each rank's source hands out the same tasks.
    """
    found: Rounds = []
    missing = prompts
    while missing > 0 and len(found) < (rounds if algo.refill else 1):
        make = partial(scored, partial(supply.feed.take, missing), laps)
        # a rank that fails must not leave the others waiting; with a lag they agree when they wait for the thread
        found.append(make() if supply.lag else collect.together(make))
        if algo.refill:  # else ranks have nothing to tell each other here, where a lag has a thread of its own
            missing -= collect.count(len(algo.select(found[-1])))
    return found


def _scored(
    roll: Roll, score: Score, stop: threading.Event, early: Early, take: Callable[[], list[Task]], laps: Laps
) -> list[Group]:
    """Rollouts of this rank's part of the tasks with their outcomes; where neither minds, both at the same time."""
    tasks = take()
    mine = collect.share(len(tasks))
    if isinstance(roll, overlap.Streaming) and isinstance(score, overlap.Scoring) and score.one_by_one:
        return overlap.scored(roll, score, laps, tasks=tasks, mine=mine, stop=stop, begin=early.begin)
    streams = isinstance(roll, overlap.Streaming)
    rolled = roll.sampled(tasks, mine) if streams else roll(tasks, mine)
    laps("sample")
    early.begin(rolled, laps)
    rolled = roll.told(rolled, tasks[mine]) if streams else rolled
    start = time.perf_counter()
    fresh = score(rolled)
    laps("score")
    laps.beside("scoring", time.perf_counter() - start)
    return fresh


def numbered(batch: Batch, rounds: list[list[Group]]) -> Batch:
    """Adds each row's place among the rows of every rank, by which minibatches are cut."""
    sizes = [sum(len(g) for g in chosen) for chosen in rounds]
    place = torch.tensor(collect.places(sizes), dtype=torch.int64)
    home = None if batch.home is None else replace(batch.home, place=place)
    return replace(batch, place=sent(place, batch.targets.device), home=home)


def mismatched_batch(groups: list[Group], algo: Algorithm, context: int, *, device: torch.device) -> Batch | None:
    """This rank's part of KTO's pairs, which are made of all ranks' rows."""
    if "kl_baseline" not in algo.needs:
        return None
    pairs = mismatched([r for g in groups for r in g], max_tokens=context)
    return collate([[r] for r in pairs[collect.share(len(pairs))]]).to(device)


def describe(groups: list[Group], kept: list[Group]) -> Stats:
    """Rewards, lengths and how rollouts ended; an invalid reward is counted, never averaged in."""
    stats = Stats()
    rollouts = [r for g in groups for r in g]
    lengths = [sum(r.mask) for r in rollouts]
    values = [value for r in rollouts if (value := reward_of(r)) is not None]
    stats.add("reward", sum(values), len(values))
    stats.add("invalid", len(rollouts) - len(values), len(rollouts))
    stats.add("length", sum(lengths), len(rollouts))
    stats.add("truncated", sum(r.stop is Stop.LENGTH for r in rollouts), len(rollouts))
    stats.add("varied", *varied(groups))
    stats.add("kept", len(kept), len(groups))
    stats.add("tokens", sum(lengths), 1 / collect.world()[1])  # of all ranks
    stats.add("repetition", *repeated([r.completion() for r in rollouts]))
    parts = [(name, x) for r in rollouts if r.outcome for name, x in r.outcome.parts.items()]
    for name, x in parts:
        stats.add(f"reward/{name}", x)
    hacking.watch(stats, rollouts)
    return stats


def varied(groups: list[Group]) -> tuple[int, int]:
    """(groups whose valid rewards differ, groups of more than one); a rank's single rollouts count as one group."""
    compared = groups if any(len(g) > 1 for g in groups) else [[r for g in groups for r in g]]
    compared = [g for g in compared if len(g) > 1]
    found = [{value for r in g if (value := reward_of(r)) is not None} for g in compared]
    return sum(len(values) > 1 for values in found), len(compared)


def summary(stats: Stats, *, seconds: float) -> dict[str, float]:
    """The means over all ranks' sums, with what follows from them."""
    everyone = merged(Stats.of(plain) for plain in collect.gather(stats.plain()))  # pyright: ignore
    metrics = diagnose.derived(everyone.means())
    metrics["seconds"] = seconds
    if "tokens" in metrics:
        metrics["tokens_per_second"] = metrics["tokens"] / seconds
    return metrics


def hash_seed(*parts: int) -> int:
    """One seed from several numbers, different for different ones.

    >>> hash_seed(0, 1) != hash_seed(1, 0)
    True
    """
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % (2**63 - 1)
    return seed
