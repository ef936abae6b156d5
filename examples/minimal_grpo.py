"""GRPO from nothing but torch and `hone.algo`: a small recurrent model learns to sort three digits.

    python examples/minimal_grpo.py

The whole method is in `online`, which reads like `hone.loop.online`: sample, score, collate, annotate, credit, weigh,
update. Everything that Hone adds around these lines (a real decoder, caches, checkpoints, logs) changes no number.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from hone.algo import Algorithm, Batch, Forward, assign_credit, grpo, objective, weigh

DIGITS, STOP, START = 10, 10, 11  # tokens 0..9 are digits; STOP ends a completion; START opens it
VOCABULARY, LENGTH = 12, 4  # three digits and the stop token
GROUP, PROMPTS, STEPS = 8, 64, 200


class Policy(nn.Module):
    """Embedding, GRU, logits: enough to read three digits and write three."""

    def __init__(self, size: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size)
        self.cell = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> log-probs of the next token [B, T, V]"""
        return self.head(self.cell(self.embed(tokens))[0]).log_softmax(-1)

    def score(self, batch: Batch) -> Forward:
        """The log-prob of every target, as the loss reads it."""
        return Forward(logp=self(batch.inputs).gather(-1, batch.targets[..., None])[..., 0])


def problem(rng: random.Random) -> list[int]:
    """Three digits to be sorted."""
    return [rng.randrange(DIGITS) for _ in range(3)]


def verify(prompt: list[int], completion: list[int]) -> float:
    """The share of places that hold the right digit: a reward a program can check."""
    wanted = [*sorted(prompt), STOP]
    return sum(a == b for a, b in zip(completion, wanted, strict=False)) / len(wanted)


@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]]) -> Tensor:
    """One completion of LENGTH tokens for each prompt: int64 [B, prompt + LENGTH]."""
    tokens = torch.tensor([[*p, START] for p in prompts])
    for _ in range(LENGTH):
        following = policy(tokens)[:, -1].exp().multinomial(1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


def collate(tokens: Tensor, rewards: list[float]) -> Batch:
    """Shift once: targets[t] is the token after inputs[t]; trained on is what the policy wrote, up to its stop."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    written = torch.arange(targets.shape[1]) >= targets.shape[1] - LENGTH
    stopped = (targets == STOP).cumsum(-1) - (targets == STOP).long() > 0  # after the first stop
    return Batch(
        inputs=inputs,
        targets=targets,
        mask=written & ~stopped,
        real=torch.ones_like(targets, dtype=torch.bool),
        group=torch.arange(len(tokens)) // GROUP,
        reward=torch.tensor(rewards),
    )


@torch.no_grad()
def annotate(policy: Policy, batch: Batch) -> Batch:
    """Adds what the policy says of each token before it is updated."""
    return replace(batch, old_logp=policy.score(batch).logp)


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, algo: Algorithm) -> None:
    """One optimiser step, in two micro-batches: the weights are fixed before the cut, so the cut changes nothing."""
    optimizer.zero_grad()
    for half in (slice(None, len(batch) // 2), slice(len(batch) // 2, None)):
        micro = batch.rows(half)
        objective(policy.score(micro), micro, algo).backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def online(policy: Policy, optimizer: torch.optim.Optimizer, algo: Algorithm, rng: random.Random) -> Iterator[float]:
    """The mean reward of each iteration, again and again.

    One update an iteration, so there are no epochs. Sampler and learner are one model, so nothing is published.
    """
    while True:
        prompts = [p for p in (problem(rng) for _ in range(PROMPTS)) for _ in range(GROUP)]
        tokens = sample(policy, prompts)  # prompts -> rollouts
        rewards = [verify(p, row[-LENGTH:]) for p, row in zip(prompts, tokens.tolist(), strict=True)]  # -> rewards
        batch = collate(tokens, rewards)  # one row a rollout; GRPO selects all of them
        batch = annotate(policy, batch)  # what the old policy says of each token
        batch = assign_credit(batch, algo)  # rewards -> advantages
        batch = weigh(batch, algo)  # each token's weight in the loss
        update(policy, optimizer, batch, algo)
        yield sum(rewards) / len(rewards)


def train(seed: int = 0, steps: int = STEPS, *, quiet: bool = False) -> list[float]:
    """The mean reward of every step."""
    torch.manual_seed(seed)
    policy, algo = Policy(), grpo(beta=0.0)  # no reference model: only the clipped, group-relative policy gradient
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    history: list[float] = []
    for step, reward in zip(range(1, steps + 1), online(policy, optimizer, algo, random.Random(seed)), strict=False):
        history.append(reward)
        if not quiet and step % 25 == 0:
            print(f"step {step:3d}  reward {sum(history[-25:]) / 25:.3f}")
    return history


if __name__ == "__main__":
    train()
