"""The examination after each stage: held-out accuracy, format, length, and how far the policy is from SFT."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hone.algo.select import reward_of
from hone.data.collate import collate
from hone.data.text.tokenizer import Tokenizer
from hone.demo import world
from hone.engine.params import SampleParams
from hone.launch.measure import sample_groups, summarise
from hone.model.formats.folder import load_decoder
from hone.model.policy import Policy
from hone.reward.score import Reward, score
from hone.reward.verify.math.verdict import math_reward
from hone.train.annotate import forward_in_slices
from hone.types import Group, Stop, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What the table shows of a stage."""

    accuracy: float  # sampled at temperature 1, as in training
    greedy: float
    format: float
    length: float
    kl: float | None  # exact KL(stage || SFT), mean nats a token of the stage's own completions; None: no SFT yet


def examine(
    model: Path, tasks: Sequence[Task], *, sft: Path | None, tokens: int, samples: int
) -> tuple[Marks, list[Group]]:
    """Sample the held-out problems and mark the answers; returns marks and answers."""
    tokenizer, decoder = Tokenizer.load(model), load_decoder(model)
    marked: dict[float, list[Group]] = {}
    for temperature, n in ((1.0, samples), (0.0, 1)):
        params = SampleParams(max_tokens=tokens, temperature=temperature, stop_ids=tokenizer.stop_ids)
        groups = sample_groups(decoder, tokenizer, tasks, params=params, samples=n)
        marked[temperature] = score(groups, Reward(math_reward))
    sampled, greedy = summarise(marked[1.0]), summarise(marked[0.0])
    kl = kl_between(Policy(decoder), Policy(load_decoder(sft)), marked[1.0]) if sft else None
    marks = Marks(
        accuracy=sampled["pass@1"], greedy=greedy["pass@1"], format=sampled["format"], length=sampled["length"], kl=kl
    )
    return marks, marked[1.0]


@torch.no_grad()
def kl_between(policy: Policy, other: Policy, groups: Sequence[Group]) -> float:
    """Exact KL(policy || other) of the next token, averaged over the tokens of the policy's own completions."""
    policy.reference = other
    batch = collate(groups)
    kl = forward_in_slices(policy, batch, frozenset({"ref_kl"}), rows=128).ref_kl
    return float(kl[batch.mask].double().mean())


def preference_pairs(groups: Sequence[Group], *, seed: int) -> list[dict[str, str]]:
    """Pair right answers with wrong ones of the same problem at random, each as often as it was sampled.

    If each text counted once, a rare error would weigh as much as a common one, and short answers would look better.
    """
    rng = random.Random(seed)
    pairs: list[dict[str, str]] = []
    for group in groups:
        task = group[0].task
        finished = [r for r in group if r.stop is Stop.TOKEN and r.text]  # an empty answer is no row
        right, wrong = ([r.text for r in finished if reward_of(r) == mark] for mark in (1, 0))
        rng.shuffle(right)
        rng.shuffle(wrong)
        if task is not None and isinstance(task.prompt, str):
            pairs += [
                {"prompt": task.prompt, "chosen": good, "rejected": bad}
                for good, bad in zip(right, wrong, strict=False)
            ]
    return pairs


def written_pairs(tasks: Sequence[Task]) -> list[dict[str, str]]:
    """The writers' own answers: a worked one preferred to an untidy one."""
    sums = [world.Sum(tuple(map(int, task.id.split("+")))) for task in tasks]
    return [{"prompt": p.prompt, "chosen": world.careful(p), "rejected": world.untidy(p)} for p in sums]
