"""Hone's side: the loops as a run has them, without files and logs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from benchmarks.learning.work import ALPHA, RANK, Offline, Online, Subject, prompts_of, rows_of, text_of, variety, words
from hone.algo import ALGORITHMS, Algorithm
from hone.config.recipe import Recipe, TrainSpec
from hone.data.feed.source import Source
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.launch.job import torch_settings
from hone.loop import Iteration, offline, online
from hone.model.decoder import Decoder
from hone.model.lora import add_lora
from hone.model.policy import Policy, ReferenceView, frozen_copy
from hone.model.scorer import Scorer
from hone.reward.score import as_scorer, score
from hone.rollout.local import LocalSampler
from hone.rollout.supply import Roller
from hone.train import optim
from hone.train.learner import Learner
from hone.train.optim import Masters
from hone.types import Group, Rollout, Task

RATE = 1e-6  # small, so that the thousandth step is like the first


def as_in_a_run(device: torch.device) -> AbstractContextManager[None]:
    """With the threads and the fixed order of sums that `hone run` has; TRL and transformers have torch's own."""
    return torch_settings(Recipe(train=TrainSpec(device=device.type)))


def decoder_of(subject: Subject) -> Decoder:
    decoder = subject.decoder().train()
    if subject.lora:
        add_lora(decoder, rank=RANK, alpha=ALPHA, targets=("all-linear",))
    return decoder


def learner_of(
    subject: Subject, algo: Algorithm, *, rows: int, tokens: int = 0, again: bool | None = None
) -> tuple[Learner, Decoder]:
    """again: what `train.recompute` says"""
    decoder = decoder_of(subject)
    made = Scorer if algo.wants == {"value"} else Policy
    policy, reference = made(decoder, checkpoint_layers=again), None
    if isinstance(policy, Policy) and "ref_logp" in algo.needs:
        reference = ReferenceView(policy) if subject.lora else frozen_copy(policy)
    actor, critic, masters = policy.actor_parameters(), policy.critic_parameters(), None
    if decoder.lm_head.weight.dtype == torch.bfloat16:
        masters = Masters([*actor, *critic])
        actor, critic = masters.of(actor), masters.of(critic)
    optimizer = optim.adamw(actor, critic, lr=RATE)
    if masters is not None:
        optimizer.register_step_post_hook(masters.publish)
    learner = Learner(policy=policy, optimizer=optimizer, reference=reference, masters=masters, micro_rows=rows)
    learner.micro_tokens = tokens
    return learner, decoder


def grpo(subject: Subject, work: Online, *, micro_tokens: int = 0, again: bool | None = None) -> Iterator[Iteration]:
    """Iterations of GRPO: sample, score, annotate, update, publish."""
    algo = ALGORITHMS["grpo"](beta=work.beta)
    learner, decoder = learner_of(subject, algo, rows=work.rows, tokens=micro_tokens, again=again)
    vocab = decoder.config.vocab_size
    sampler = LocalSampler(decoder, max_rows=work.rows)
    params = SampleParams(max_tokens=work.completion, stop_ids=frozenset())
    tokenizer = Tokenizer(inner=words(vocab), eos=f"w{vocab}", pad="w0")
    roller = Roller(sampler, tokenizer, params, group=work.group)
    reward = as_scorer(lambda completion: variety(completion))
    tasks = Source([Task(prompt=text_of(tokens)) for tokens in prompts_of(work, vocab)], seed=0)
    return online(
        tasks, roller, lambda groups: score(groups, reward), learner, algo,
        prompts=work.prompts, minibatches=work.minibatches, publish=sampler.publish,
    )  # fmt: skip


def steps(method: str, subject: Subject, work: Offline) -> Iterator[Iteration]:
    """Steps of an offline method on rows read from memory."""
    algo = ALGORITHMS[method]()
    learner, decoder = learner_of(subject, algo, rows=2 * work.groups)
    written = rows_of(work, decoder.config.vocab_size)

    def row(prompt: list[int], answer: list[int]) -> Rollout:
        return Rollout(tokens=prompt + answer, mask=[False] * len(prompt) + [True] * len(answer))

    both = algo.unit == 2
    groups: list[Group] = [[row(w.prompt, w.chosen)] + [row(w.prompt, w.rejected)] * both for w in written]
    return offline(Source(groups, seed=0), learner, algo, size=work.groups)


def turn_of(iterations: Iterator[Iteration]) -> Callable[[], Iteration]:
    """One iteration a call."""
    return lambda: next(iterations)
