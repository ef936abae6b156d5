"""A decoder of a few thousand numbers, a learner around it, and tasks whose answer is known."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hone.algo import Algorithm, terms
from hone.data.collate import collate
from hone.data.feed.source import Source
from hone.dist.spread import full_tensor
from hone.engine.params import SampleParams
from hone.loop import Iteration, offline, online
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.policy import OwnCritic, Policy, SharedCritic, frozen_copy
from hone.model.scorer import Scorer
from hone.model.teacher import TopKTeacher
from hone.rollout.local import LocalSampler
from hone.train import optim
from hone.train.learner import Learner
from hone.train.optim import Masters
from hone.types import Batch, Group, Outcome, Rollout, Stop, Task

VOCAB, STOP, LENGTH = 10, 9, 5
TASKS = [Task(prompt=f"{a} {b}") for a, b in itertools.product(range(1, 5), range(5, 9))]
Reward = Callable[[Rollout], float | None]


def decoder(seed: int = 0, *, width: int = 32, layers: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=24, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config).to(dtype)


def policy_for(algo: Algorithm, base: Decoder, *, shared: bool = True, layout: str = "padded") -> Policy:
    """With a critic where the algorithm reads a value."""
    critic = None
    if "value" in algo.wants:
        critic = SharedCritic(base.config.hidden_size) if shared else OwnCritic(decoder(99))
    policy = Policy(base, critic=critic, layout=layout).to(base.model.embed_tokens.weight.dtype)
    if algo.needs & {"ref_logp", "ref_kl"} or "ref_kl" in algo.wants:
        policy.reference = frozen_copy(policy)
    if algo.teacher is not None:
        teacher = Policy(decoder(7, width=16, dtype=base.model.embed_tokens.weight.dtype)).requires_grad_(False)
        policy.reference = TopKTeacher(teacher, algo.teacher.top_k) if algo.teacher.top_k else teacher
    return policy


def learner_for(
    algo: Algorithm, *, lr: float = 0.01, seed: int = 0, base: Decoder | None = None, shared: bool = True,
    layout: str = "padded", micro_rows: int = 64,
) -> Learner:  # fmt: skip
    """All that the algorithm needs, on a fresh decoder unless one is given."""
    base = decoder(seed) if base is None else base
    if algo.wants == {"value"}:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Scorer(base, layout=layout).to(base.model.embed_tokens.weight.dtype)
        optimizer = optim.adamw(model.actor_parameters(), model.critic_parameters(), lr=lr)
        return Learner(policy=model, optimizer=optimizer, micro_rows=micro_rows)
    policy = policy_for(algo, base, shared=shared, layout=layout)
    optimizer = optim.adamw(policy.actor_parameters(), policy.critic_parameters(), lr=lr)
    reference = policy.reference if isinstance(policy.reference, Policy) else None
    return Learner(policy=policy, optimizer=optimizer, reference=reference, micro_rows=micro_rows)


def step_copies(learner: Learner, *, lr: float) -> None:
    """The optimiser steps copies, as a run's does with optim.offload."""
    actor, critic = learner.policy.actor_parameters(), learner.policy.critic_parameters()
    learner.masters = Masters([*actor, *critic], device=torch.device("cpu"))
    learner.optimizer = optim.adamw(learner.masters.of(actor), learner.masters.of(critic), lr=lr)
    learner.optimizer.register_step_post_hook(learner.masters.publish)


def written(r: Rollout) -> list[int]:
    return [t for t, m in zip(r.tokens, r.mask, strict=True) if m]


def share_of_threes(r: Rollout) -> float:
    """Of the tokens the policy may write, how many are a 3: short answers earn little."""
    return written(r).count(3) / r.limit


def scorer(reward: Reward) -> Callable[[list[Group]], list[Group]]:
    return lambda groups: [[replace(r, outcome=Outcome(value=reward(r))) for r in g] for g in groups]


class Roller:
    """Samples from the learner's own decoder; each request draws random numbers of its own."""

    def __init__(self, base: Decoder, *, group: int, seed: int = 0, length: int = LENGTH, copy: bool = False) -> None:
        self.sampler, self.group, self.requests = LocalSampler(base, copy=copy), group, 0
        self.params = SampleParams(max_tokens=length, stop_ids=frozenset({STOP}), seed=seed)

    def __call__(self, tasks: list[Task], mine: slice = slice(None)) -> list[Group]:
        first = self.requests + self.group * mine.indices(len(tasks))[0]
        self.requests += self.group * len(tasks)
        prompts = [[int(t) for t in str(task.prompt).split()] for task in tasks[mine]]
        return self.sampler.sample(prompts, n=self.group, params=self.params, first_request=first)


def run_online(
    learner: Learner, algo: Algorithm, reward: Reward = share_of_threes, *, prompts: int = 8, group: int = 4,
    epochs: int = 1, minibatches: int = 1, seed: int = 0,
) -> Iterator[Iteration]:  # fmt: skip
    """loop.online with the real sampler."""
    roll = Roller(learner.policy.decoder, group=group, seed=seed)  # pyright: ignore[reportAttributeAccessIssue]
    return online(
        Source(TASKS, seed=seed), roll, scorer(reward), learner, algo,
        prompts=prompts, epochs=epochs, minibatches=minibatches, seed=seed,
    )  # fmt: skip


def run_offline(
    learner: Learner, algo: Algorithm, rows: list[Group], *, size: int, seed: int = 0
) -> Iterator[Iteration]:
    return offline(Source(rows, seed=seed), learner, algo, size=size)


def parameters_of(learner: Learner) -> list[torch.Tensor]:
    """Whole, on every rank, in the optimiser's order."""
    found = optim.parameters_of(learner.optimizer)
    origin = {} if learner.shards is None else learner.shards._origin
    return [full_tensor(origin.get(p, p)).detach().clone() for p in found]


def spread_learner(
    learner: Learner, *, lr: float, lean: bool = False, bits: int = 32, half: torch.dtype | None = None
) -> None:
    """The learner as it is, its policy and reference spread over ranks."""
    from hone.train.shards import Shards, shard_decoder

    policy: Any = learner.policy
    reference = getattr(policy, "reference", None)
    reference = reference.policy if isinstance(reference, TopKTeacher) else reference
    if isinstance(reference, Policy):
        shard_decoder(reference.decoder, device=torch.device("cpu"), half=half)
    shards = learner.shards = Shards(policy, device=torch.device("cpu"), half=half, each=lean)
    actor, critic = shards.parts_of(policy.actor_parameters()), shards.parts_of(policy.critic_parameters())
    learner.optimizer = optim.adamw(actor, critic, lr=lr, bits=bits, sizes=shards.sizes)


def random_rows(number: int, *, seed: int = 0) -> list[Rollout]:
    """Unequal prompts and completions, some cut off by the limit, with the log-probs of some sampler."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, n: int = 1) -> list[int]:
        return torch.randint(low, high, (n,), generator=g).tolist()

    rows = list[Rollout]()
    for _ in range(number):
        (prompt,), (length,), (cut,) = draw(1, 4), draw(2, 8), draw(0, 2)
        tokens = [*draw(0, STOP, prompt + length - 1), 3 if cut else STOP]
        logp = (-2 * torch.rand(length, generator=g)).tolist()
        rows.append(
            Rollout(
                tokens=tokens,
                mask=[False] * prompt + [True] * length,
                gen_logp=[0.0] * prompt + logp,
                stop=Stop.LENGTH if cut else Stop.TOKEN,
                limit=8,
                text=str(tokens),
            )
        )
    return rows


def collated(rows: list[Rollout]) -> Batch:
    return collate([[r] for r in rows])


def groups_for(algo: Algorithm, *, groups: int = 3, size: int = 4, seed: int = 0) -> list[Group]:
    """Rows with what the algorithm reads: rewards (one invalid), pairs with margins, labels or step labels."""
    rows = random_rows(groups * size, seed=seed)
    if algo.online:
        values = [None if i == 1 else float(written(r).count(3)) + 0.1 * i for i, r in enumerate(rows)]
        rows = [replace(r, outcome=Outcome(value=v)) for r, v in zip(rows, values, strict=True)]
        kept = [rows[i : i + size] for i in range(0, len(rows), size)]
        return algo.select(kept) if algo.unit == 2 else kept
    rows = [replace(r, gen_logp=(), limit=0) for r in rows]
    if algo.unit == 2:
        return [[replace(r, margin=0.1) for r in rows[i : i + 2]] for i in range(0, len(rows), 2)]
    if any(term is terms.step_bce for _, term in algo.loss):
        labels = [
            [float(t % 2) if m and t < 5 else math.nan for t, m in zip(r.tokens, r.mask, strict=True)] for r in rows
        ]
        return [[replace(r, step_label=x)] for r, x in zip(rows, labels, strict=True)]
    if "label" in algo.needs:
        return [[replace(r, label=float(i % 2))] for i, r in enumerate(rows)]
    return [[r] for r in rows]
