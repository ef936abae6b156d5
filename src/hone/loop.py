"""The two loops. Read this file first: one stage a line, and one function behind each stage.

`online` samples its own data; `offline` reads it. Both are generators: they yield after each iteration, which is when
logs are written and checkpoints taken. What changes from step to step is held by the learner, the sampler and the feed.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from hone.algo.table import Algorithm
from hone.data.collate import collate
from hone.data.feed.source import Feed
from hone.data.feed.token_batches import TokenBatches
from hone.dist import collect
from hone.errors import HoneError
from hone.log.rollouts import rollout_statistics
from hone.log.stats import Stats
from hone.rollout.supply import Roll, RolloutQueue, Score, Supply, as_queue, check_lag
from hone.train import trust_region
from hone.train.annotate import Annotator, annotate, mismatched_batch
from hone.train.learner import Learner
from hone.train.update import (
    Correct,
    adapt_controls,
    assign_credit,
    measure_update_kl,
    summary,
    totals,
    trained_on,
    update,
    weigh,
)
from hone.types import Group, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one pass through the loop did."""

    number: int  # counts from 1
    metrics: dict[str, float]
    groups: list[Group]  # as sampled and scored, before selection


def online(
    tasks: Feed[Task] | RolloutQueue,
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
    """Prompts -> rollouts -> rewards -> batch -> credit -> updates -> publish, again and again."""
    queue = as_queue(tasks)
    algo = check_algorithm(algo, lag=queue.lag, updates=epochs * minibatches, corrected=correct is not None)
    annotator = Annotator(algo, learner, epochs=epochs, lag=queue.lag, corrected=correct is not None)
    supply = Supply(
        queue,
        roll,
        score,
        algo,
        prompts=prompts,
        refill_rounds=refill_rounds,
        on_sampled=annotator.start_passes,
        publish=publish,
    )
    take_step = trust_region.step if algo.trust_region else update
    ranks = collect.world()[1]
    learner.start_controls(algo)
    while True:
        rounds = supply.next(learner.version)  # prompts -> rollouts -> rewards
        kept = [algo.select(groups) for groups in rounds]  # which of them to learn from
        stats = rollout_statistics(rounds, kept, ranks=ranks, version=learner.version if queue.lag else None)
        batch = annotator.collate(kept)  # one row a rollout; None if no rank kept any
        if batch is not None:
            batch = annotator.annotate(batch)  # what the old policy, the reference and the critic say of each token
            batch = assign_credit(batch, algo)  # rewards -> advantages
            supply.timer("annotate")
            for epoch in range(epochs):
                shuffle = hash_seed(seed, learner.version, epoch)
                cut = annotator.minibatches(batch, count=minibatches, seed=shuffle)
                for minibatch, counts in trained_on(cut):
                    minibatch = weigh(minibatch, algo, counts, correct=correct)  # each token's weight in the loss
                    stats.merge(take_step(learner, minibatch, algo))
            measure_update_kl(stats, learner, batch, algo)
        seconds = supply.wait()  # with a lag, for the rollouts that were sampled beside these updates
        metrics = summary(stats, seconds=seconds)
        adapt_controls(learner, algo, metrics)  # moves adaptive coefficients, such as beta
        learner.end_iteration()  # counts the version of the weights up
        metrics |= learner.control | supply.publish(learner.version)  # the sampler gets the new weights
        yield Iteration(number=learner.version, metrics=metrics, groups=[g for groups in rounds for g in groups])


def offline(
    rows: Feed[Group], learner: Learner, algo: Algorithm, *, size: int, context: int = 0
) -> Iterator[Iteration]:
    """Rows -> batch -> update, again and again; `size` groups (rows or pairs) a step, or a budget of tokens.

    context: the most tokens that the model reads (0: no limit). KTO's mismatched pairs may be longer than any row.
    """
    learner.start_controls(algo)
    while True:
        start = time.perf_counter()
        groups = collect.together(rows.step if isinstance(rows, TokenBatches) else partial(rows.take, size))
        mismatched = mismatched_batch(groups, algo, context, device=learner.device)  # KTO's baseline reads these
        groups = groups[collect.share(len(groups))]
        batch = collate(groups).to(learner.device)
        batch = annotate(batch, algo, learner, mismatched=mismatched)
        counts = totals(batch)
        batch = weigh(batch, algo, counts)
        stats = update(learner, batch, algo) if counts.rows else Stats()
        stats.add("tokens", float(batch.mask.sum()), 1 / collect.world()[1])
        metrics = summary(stats, seconds=time.perf_counter() - start)
        adapt_controls(learner, algo, metrics)
        learner.end_iteration()
        yield Iteration(number=learner.version, metrics=metrics, groups=groups)


def check_algorithm(algo: Algorithm, *, lag: int, updates: int, corrected: bool) -> Algorithm:
    """The algorithm with what the correction reads, or HoneError where it may not be used like this."""
    name = algo.name or "this algorithm"
    if (algo.on_policy or algo.trust_region) and updates > 1:
        # a trust region bounds each step's KL, and not their sum
        why = "bounds one step an iteration" if algo.trust_region else "is strictly on policy"
        raise HoneError(f"{name} {why}: set train.epochs=1 and train.minibatches=1")
    if lag:
        check_lag(algo, name=name, corrected=corrected)
    # the factor is pi_old / pi_gen
    return replace(algo, needs=algo.needs | {"old_logp"}) if corrected else algo


def hash_seed(*parts: int) -> int:
    """One seed from several numbers, different for different ones.

    >>> hash_seed(0, 1) != hash_seed(1, 0)
    True
    """
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % (2**63 - 1)
    return seed
