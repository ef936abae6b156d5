"""The tokens, masks, rewards, groups, pairs and log-probs that both sides are given: drawn once, unequal in length."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hone.data.collate import collate, mismatched_pairs
from hone.types import Batch, Group, Outcome, Rollout, Stop

VOCAB, PAD, STOP, LIMIT, GROUP = 16, 0, 15, 6, 4
LENGTHS = (6, 2, 4, 1, 3, 6, 5, 2)  # of the completions; those as long as the limit are cut off
PROMPTS = (2, 1, 3, 2)  # lengths
REWARDS = (0.9, 0.2, 0.5, 0.1, 1.0, 0.0, 0.0, 1.0)
LABELS = (1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0)
MARGINS = (0.0, 0.5, 1.5, 0.25)
FULL = torch.float64


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt and one completion of it."""

    prompt: list[int]
    completion: list[int]

    @property
    def truncated(self) -> bool:
        return self.completion[-1] != STOP

    def rollout(self) -> Rollout:
        mask = [False] * len(self.prompt) + [True] * len(self.completion)
        stop = Stop.LENGTH if self.truncated else Stop.TOKEN
        return Rollout(tokens=[*self.prompt, *self.completion], mask=mask, stop=stop, limit=LIMIT)


def draw(*, share: int, seed: int = 0) -> list[Row]:
    """Eight rows, `share` neighbours at a time with one prompt."""
    g = torch.Generator().manual_seed(seed)
    rows, prompt = list[Row](), list[int]()
    for i, length in enumerate(LENGTHS):
        if i % share == 0:
            prompt = torch.randint(1, STOP, (PROMPTS[i // share % len(PROMPTS)],), generator=g).tolist()
        completion = torch.randint(1, STOP, (length,), generator=g).tolist()
        if length < LIMIT:
            completion[-1] = STOP
        rows.append(Row(prompt=prompt, completion=completion))
    return rows


def grouped(rewards: tuple[float | None, ...] = REWARDS) -> Batch:
    """Two groups of four, rewarded; None is an invalid reward."""
    rollouts = [
        replace(row.rollout(), outcome=Outcome(value=r)) for row, r in zip(draw(share=GROUP), rewards, strict=True)
    ]
    return collate([rollouts[i : i + GROUP] for i in range(0, len(rollouts), GROUP)], pad_id=PAD, dtype=FULL)


def pair_groups() -> list[Group]:
    """Four pairs, chosen first, each with a margin."""
    rows = [row.rollout() for row in draw(share=2)]
    return [[replace(r, margin=m) for r in rows[2 * i : 2 * i + 2]] for i, m in enumerate(MARGINS)]


def pairs() -> Batch:
    """The pairs as a table: row 2p chosen, row 2p+1 rejected."""
    return collate(pair_groups(), pad_id=PAD, dtype=FULL)


def labelled() -> tuple[Batch, Batch]:
    """Eight rows of eight prompts, desirable or not, and their mismatched twins."""
    rows = [replace(row.rollout(), label=x) for row, x in zip(draw(share=1), LABELS, strict=True)]
    return collate([[r] for r in rows], pad_id=PAD, dtype=FULL), collate(
        [mismatched_pairs(rows)], pad_id=PAD, dtype=FULL
    )


def near(logp: Tensor, *, spread: float, seed: int) -> Tensor:
    """Log-probs of another policy: these and normal noise, so that some ratios lie outside of every clip."""
    noise = torch.randn(logp.shape, generator=torch.Generator().manual_seed(seed), dtype=logp.dtype)
    return (logp + spread * noise).clamp(max=-1e-3)
