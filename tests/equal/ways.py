"""Every registered algorithm, and the ways to compute one of its trajectories that must not matter."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import tiny
import torch
from torch import Tensor

from hone import loop
from hone.algo import ALGORITHMS, Algorithm
from hone.algo.weight import mismatch
from hone.data.feed.source import Source
from hone.model import layout
from hone.model.decoder import Decoder
from hone.model.lora import add_lora
from hone.rollout.supply import RolloutQueue
from hone.train import annotate as passes
from hone.train.learner import Learner
from hone.types import ABSENT, Batch

STEPS = 2  # the second reads all that the first has changed; one more for each that samples are ahead
FILL = 7  # what padding holds: neither 0 nor a token that means nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An algorithm with its settings, and the learner it trains."""

    algo: Callable[[], Algorithm]
    own_critic: bool = False
    lora: bool = False
    correct: str = ""  # what corrects for the sampler's mismatch
    once: bool = False  # one update an iteration
    parts: int = 0  # so many updates in one epoch, where it is not two epochs of two
    lag: int = 0  # samples are made while the learner updates


QUICK: dict[str, dict[str, Any]] = {"trpo": {"cg_steps": 2}, "expert_iteration": {"threshold": 0.2}}
CASES = {name: Case(algo=partial(make, **QUICK.get(name, {}))) for name, make in ALGORITHMS.items()} | {
    "ppo, own critic, entropy, bootstrap": Case(
        algo=partial(ALGORITHMS["ppo"], entropy=0.01, bootstrap=True, dual=3.0), own_critic=True
    ),
    "ppo, adaptive KL in the reward": Case(algo=partial(ALGORITHMS["ppo"], beta=0.1, kl_target=0.001)),
    "ppo, exact KL in the loss": Case(algo=partial(ALGORITHMS["ppo"], beta=0.1, kl="loss:exact")),
    "ppo penalty, exact": Case(algo=partial(ALGORITHMS["ppo_penalty"], exact=True)),
    "grpo, k2 by the ratio": Case(algo=partial(ALGORITHMS["grpo"], kl="loss:k2*ratio")),
    "grpo, one ratio a row": Case(algo=partial(ALGORITHMS["grpo"], ratio="row", beta=0.0), parts=3),
    "grpo, sampler corrected": Case(algo=ALGORITHMS["grpo"], correct="truncate"),
    "grpo, sampled ahead": Case(algo=ALGORITHMS["grpo"], correct="truncate", lag=1),
    "grpo with a LoRA": Case(algo=ALGORITHMS["grpo"], lora=True),
    "dpo with a LoRA": Case(algo=ALGORITHMS["dpo"], lora=True),
    "grpo, one update": Case(algo=ALGORITHMS["grpo"], once=True),
    "gspo, one update": Case(algo=ALGORITHMS["gspo"], once=True),
    "grpo, one update, KL in the reward": Case(algo=partial(ALGORITHMS["grpo"], kl="reward:k1"), once=True),
    "ppo, one update": Case(algo=ALGORITHMS["ppo"], once=True),
    "pointwise reward model, bce": Case(algo=partial(ALGORITHMS["pointwise_reward_model"], loss="bce")),
    "sft by row": Case(algo=partial(ALGORITHMS["sft"], average="row")),
    "distil, top 3": Case(algo=partial(ALGORITHMS["distil"], top_k=3)),
    "distil with a LoRA": Case(algo=ALGORITHMS["distil"], lora=True),
    "dapo, filtered": Case(algo=partial(ALGORITHMS["dapo"], overlong="filter")),
}  # fmt: skip
FEW = (  # those that differ most: in what they read, train and draw
    "grpo", "ppo, own critic, entropy, bootstrap", "ppo, exact KL in the loss", "trpo", "dpo with a LoRA", "sft",
    "reward_model", "distil",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the same numbers are computed."""

    micro_rows: int = 64
    micro_tokens: int = 0
    layout: str = "padded"
    left: int = 0  # columns of padding before and after the table
    right: int = 0
    order: int = 0  # shuffles the rows; 0: as they came
    checkpoint: bool = False
    early: bool = False  # old log-probs always by a pass of their own
    begun: bool = False  # passes over the samples are made before they are scored, as on a GPU
    backends: tuple[str, ...] | None = ()  # of every decoder: fused, graphs, native; None: as it chooses itself
    tiles: bool = False  # rows shared out as for a GPU's kernels, in whose place a table is put together
    chunk: int = 4096
    prompts: int = 4
    shard: str = "none"  # fsdp: ranks hold parts of the weights; fsdp_lean: and of gradients
    clip: float = 1.0
    copies: bool = False  # the optimiser steps copies of the weights, as it does with optim.offload
    dtype: torch.dtype = torch.float64
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Where it ended, and what was logged on the way."""

    weights: list[Tensor]
    metrics: list[dict[str, float]]


def disturbed(batch: Batch, way: Way, *, unit: int) -> Batch:
    """The same rows in another order, with padding of any content around them."""
    if way.order:
        pairs = torch.randperm(len(batch) // unit, generator=torch.Generator().manual_seed(way.order))
        batch = batch.rows((pairs[:, None] * unit + torch.arange(unit)).flatten())
    if not way.left + way.right:
        return batch

    def widened(name: str, x: Tensor) -> Tensor:
        fill = False if name in ("mask", "real") else FILL
        return torch.nn.functional.pad(x, (way.left, way.right), value=fill)

    # at once: a record checks that its columns have one shape
    return replace(batch, **{name: widened(name, x) for name, x in batch.columns().items() if x.ndim == 2})


@contextmanager
def collated(way: Way, algo: Algorithm) -> Iterator[None]:
    """Whatever the loops collate is disturbed before anything else reads it."""
    real, devices, kernels = passes.annotate, passes.ASYNCHRONOUS, layout.has_row_kernels

    def annotate(batch: Batch, declared: Algorithm, *args: Any, **rest: Any) -> Batch:
        if algo.online and batch.reward is ABSENT:  # passes that were begun before rewards were known
            return real(batch, declared, *args, **rest)
        declared = replace(declared, needs=declared.needs | algo.needs) if way.early else declared
        return real(disturbed(batch, way, unit=algo.unit), declared, *args, **rest)

    loop.annotate = passes.annotate = annotate
    passes.ASYNCHRONOUS = devices | {"cpu"} if way.begun else devices
    layout.has_row_kernels = (lambda *_: True) if way.tiles else kernels
    try:
        yield
    finally:
        loop.annotate = passes.annotate = real
        passes.ASYNCHRONOUS = devices
        layout.has_row_kernels = kernels


def start(case: Case, way: Way) -> tuple[Learner, Algorithm]:
    """The learner before its first step."""
    algo = case.algo()
    base = tiny.decoder(way.seed, width=8, layers=2, dtype=way.dtype)
    if case.lora:
        add_lora(base, rank=2, alpha=4.0, targets=("all-linear",), seed=way.seed)
    learner = tiny.learner_for(
        algo, base=base, lr=0.01, micro_rows=way.micro_rows, layout=way.layout, seed=way.seed,
        shared=not case.own_critic,
    )  # fmt: skip
    learner.micro_tokens = way.micro_tokens
    learner.policy.to(way.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    for model in (learner.policy, learner.reference):
        if model is not None:
            model.chunk, model.checkpoint_layers = way.chunk, way.checkpoint  # pyright: ignore
            for decoder in (m for m in model.modules() if isinstance(m, Decoder)):  # pyright: ignore
                decoder.backends = way.backends
    learner.clip_norm = way.clip
    if way.copies and algo.trust_region is None:  # which moves the weights itself, and is refused with copies
        tiny.step_copies(learner, lr=0.01)
    if way.shard != "none":
        tiny.spread_learner(learner, lr=0.01, lean=way.shard == "fsdp_lean")
    return learner, algo


def iterations(case: Case, way: Way, learner: Learner, algo: Algorithm) -> Iterator[loop.Iteration]:
    """The real loop on the real sampler, or on rows."""
    if not algo.online:
        rows = Source(tiny.groups_for(algo, groups=4, seed=way.seed), seed=way.seed)
        return loop.offline(rows, learner, algo, size=way.prompts + (way.prompts > 2))
    several = 1 if algo.on_policy or algo.trust_region or case.once else 2
    base: Any = learner.policy.decoder  # pyright: ignore[reportAttributeAccessIssue]
    base = base if learner.shards is None else learner.shards.publish()
    correct = partial(mismatch, how=case.correct, cap=1.5) if case.correct else None
    roll = tiny.Roller(base, group=4, seed=way.seed, copy=case.lag > 0 and learner.shards is None)
    return loop.online(
        RolloutQueue(Source(tiny.TASKS, seed=way.seed), lag=case.lag), roll,
        tiny.scorer(tiny.share_of_threes), learner, algo,
        prompts=way.prompts, epochs=1 if case.parts else several, minibatches=case.parts or several, correct=correct,
        seed=way.seed, publish=partial(published, learner, roll),
    )  # fmt: skip


def published(learner: Learner, roll: tiny.Roller, version: int) -> None:
    """The sampler reads the learner's own weights, unless no rank holds all of them or it samples ahead."""
    if learner.shards is not None:
        learner.shards.publish()
    roll.sampler.publish(version)


def trajectory(case: Case, way: Way) -> Trajectory:
    """A few steps through the real model, packing and optimiser."""
    learner, algo = start(case, way)
    with collated(way, algo):
        done = list(itertools.islice(iterations(case, way, learner, algo), STEPS + case.lag))
    timed = ("seconds", "tokens_per_second")
    metrics = [{k: v for k, v in d.metrics.items() if not k.startswith(timed)} for d in done]
    return Trajectory(tiny.parameters_of(learner), metrics)


@cache
def alone(name: str, way: Way) -> Trajectory:
    """The trajectory of one process, computed once for all that are compared with it."""
    return trajectory(CASES[name], way)


def furthest(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference of two lists of weights."""
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))
