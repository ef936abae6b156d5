"""Held-out evaluation: tasks by the same sampler and rewards as in training with other random numbers, rows by the
algorithm's own loss."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hone.algo.select import reward_of
from hone.algo.table import Algorithm, objective
from hone.algo.weight import weigh
from hone.data.collate import collate
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.eval.sample_metrics import mean_and_error, mean_pass_at_k
from hone.log.stats import Stats
from hone.model.decoder import Decoder
from hone.reward.outcome import commonest
from hone.reward.score import RewardScorer, score
from hone.reward.verify.structure import format_reward
from hone.rollout.local import LocalSampler
from hone.rollout.supply import Roller
from hone.train.annotate import annotate, mismatched_batch
from hone.train.learner import Learner
from hone.train.update import add_statistics, finish_statistics
from hone.types import Group, Rollout, Stop, Task

ANSWERS = ("math", "choice", "exact")  # verifiers that compare an answer with the gold one
VERDICTS = (*ANSWERS, "code")  # parts of a reward that say right or wrong
SEED_OFFSET = 2**63  # evaluation draws from another half of the seeds than training


def sample_groups(
    decoder: Decoder, tokenizer: Tokenizer, tasks: Sequence[Task], *, params: SampleParams, samples: int
) -> list[Group]:
    """`samples` completions of each task."""
    held_out = replace(params, seed=(params.seed + SEED_OFFSET) % 2**64, record_support=False)
    roller = Roller(LocalSampler(decoder), tokenizer, held_out, group=samples)
    return roller(list(tasks)) if tasks else []


def summarise(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward and its standard error over problems, pass@k, format, length, and the share of invalid rewards."""
    rollouts = [r for g in groups for r in g]
    valued = [[value for r in g if (value := reward_of(r)) is not None] for g in groups]
    means = [sum(values) / len(values) for values in valued if values]
    if not means:
        reason, times, _ = commonest(r.outcome for r in rollouts if r.outcome)
        raise HoneError(
            f"no completion got a valid reward, most often ({times} of {len(rollouts)} times): {reason}: "
            "mend the reward function or the data's answers"
        )
    reward = mean_and_error(means)
    metrics = {"reward": reward.mean, "reward_error": reward.stderr or 0.0}
    metrics |= _pass_at_k(groups)
    n = len(rollouts)
    return metrics | {
        "format": sum(format_reward(r.text, r.task) for r in rollouts) / n,
        "length": sum(sum(r.mask) for r in rollouts) / n,
        "truncated": sum(r.stop is Stop.LENGTH for r in rollouts) / n,
        "invalid": 1 - sum(map(len, valued)) / n,
        "problems": float(len(groups)),
    }


def _pass_at_k(groups: Sequence[Group]) -> dict[str, float]:
    """pass@k by a verifier's mark of each completion; {} where a mark is neither 0 nor 1."""
    marks = [[mark for r in g if r.outcome and r.outcome.valid and (mark := _mark(r)) is not None] for g in groups]
    marks = [m for m in marks if m]
    if not marks or any(mark not in (0.0, 1.0) for m in marks for mark in m):
        return {}
    counts = [(len(m), sum(mark == 1 for mark in m)) for m in marks]
    least = min(n for n, _ in counts)
    return {f"pass@{k}": mean_pass_at_k(counts, k).mean for k in (1, 2, 4, 8, 16, 32, 64) if k <= least}


def _mark(rollout: Rollout) -> float | None:
    """The verifier's own part of a combined reward, or the whole reward."""
    parts = rollout.outcome.parts if rollout.outcome else {}
    return next((parts[name] for name in VERDICTS if name in parts), reward_of(rollout))


def evaluate_tasks(
    decoder: Decoder,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    reward: RewardScorer,
    *,
    params: SampleParams,
    samples: int = 1,
    seen: Callable[[list[Group]], None] = lambda groups: None,
) -> dict[str, float]:
    """Sample, score and summarise. seen: called with the scored groups."""
    groups = score(sample_groups(decoder, tokenizer, tasks, params=params, samples=samples), reward)
    seen(groups)
    return summarise(groups)


@torch.no_grad()
def evaluate_rows(learner: Learner, groups: Sequence[Group], algo: Algorithm, *, context: int = 0) -> dict[str, float]:
    """Loss, NLL and accuracy of an offline algorithm on these rows, without an update."""
    rows = list(groups)
    batch = collate(rows).to(learner.device)
    batch = annotate(batch, algo, learner, mismatched=mismatched_batch(rows, algo, context, device=learner.device))
    batch = weigh(batch, algo)  # without a sum over ranks: each rank has all rows
    stats = Stats()
    for micro in learner.cut(batch, algo.unit):
        fwd = learner.policy(micro, algo.wants)
        stats.add("loss", objective(fwd, micro, algo.loss), 0)
        add_statistics(stats, fwd, micro, algo)
    stats.add("loss", 0.0, 1)
    return finish_statistics(stats.means()) | {"rows": float(len(batch))}
