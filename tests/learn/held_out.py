"""Datasets with a rule to learn, cut in two so that the rule is tested on rows never trained on."""

import itertools
import math
import random
from dataclasses import replace

import torch
from tiny import STOP

from hone.algo import Algorithm
from hone.algo.prefer import last_value, pair_margin, reference_gain
from hone.data.collate import collate
from hone.train.learner import Learner
from hone.types import Group, Rollout, sequence_mean

SEED = 7


def row(prompt: list[int], completion: list[int], **more: object) -> Rollout:
    mask = [False] * len(prompt) + [True] * len(completion)
    return Rollout(tokens=prompt + completion, mask=mask, **more)  # pyright: ignore[reportArgumentType]


def cut(rows: list[Group]) -> tuple[list[Group], list[Group]]:
    """(to train on, held out), three to one, the same on every run."""
    random.Random(SEED).shuffle(rows)
    quarter = len(rows) // 4
    return rows[quarter:], rows[:quarter]


def pairs() -> tuple[list[Group], list[Group]]:
    """After (a, b) the better answer says a twice, the worse one another token twice."""
    rows = [
        [row([a, b], [a, a, STOP]), row([a, b], [c, c, STOP])]
        for a, b, c in itertools.product(range(6), range(6), range(6))
        if a != c
    ]
    return cut(rows)


def labelled(paired: list[Group]) -> list[Group]:
    """The same rows, each alone: desirable or not."""
    labels = ((1.0, chosen) if i == 0 else (0.0, chosen) for g in paired for i, chosen in enumerate(g))
    return [[row(list(r.tokens[:2]), list(r.tokens[2:]), label=label)] for label, r in labels]


def sequences(*, trained_prompt: bool) -> tuple[list[Group], list[Group]]:
    """Any token, then two tokens in turn, three times, then the stop token."""
    rows = list[Group]()
    for x, (a, b) in itertools.product(range(9), itertools.permutations(range(9), 2)):
        r = row([x, a, b], [a, b, a, b, STOP])
        rows.append([Rollout(tokens=r.tokens, mask=[True] * len(r.tokens)) if trained_prompt else r])
    return cut(rows)


def steps() -> tuple[list[Group], list[Group]]:
    """Each step is a token and a full stop (8), after which it is judged; it is right when the token is even."""
    rows = list[Group]()
    for a, x, y in itertools.product(range(3), range(8), range(8)):
        right = [float(t % 2 == 0) for t in (x, y)]
        label = [math.nan, math.nan, right[0], math.nan, right[1]]
        r = row([a], [x, 8, y, 8])
        rows.append([Rollout(tokens=r.tokens, mask=r.mask, step_label=label)])
    return cut(rows)


@torch.no_grad()
def accuracy(learner: Learner, algo: Algorithm, held: list[Group]) -> float:
    """How often the chosen one has the higher score, by what the algorithm trains."""
    batch = collate(held)
    if algo.wants == {"value"}:
        margin = pair_margin(last_value(learner.policy(batch, algo.wants), batch))
    else:
        now = learner.policy(batch, frozenset({"logp"}))
        if learner.reference is None:
            margin = pair_margin(sequence_mean(now.logp, batch.mask))
        else:
            ref = learner.reference(batch, frozenset({"logp"})).logp
            margin = pair_margin(reference_gain(now, replace(batch, ref_logp=ref)))
    return (margin > 0).double().mean().item()


@torch.no_grad()
def step_accuracy(learner: Learner, held: list[Group]) -> float:
    batch = collate(held)
    score = learner.policy(batch, frozenset({"value"})).value
    return ((score > 0) == (batch.label == 1))[batch.mask].double().mean().item()


@torch.no_grad()
def nll(learner: Learner, held: list[Group]) -> float:
    """Mean over the tokens that follow from what came before: all but the first three."""
    batch = collate(held)
    logp = learner.policy(batch, frozenset({"logp"})).logp
    return -logp[:, 2:][batch.mask[:, 2:]].mean().item()
