"""The work that both sides are given: models, prompts and rows, in the same numbers of tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from benchmarks.sampling.cpu import big_decoder, random_decoder
from hone.demo.stages import FULL
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder

PAD, STOP = 0, 1
RANK, ALPHA = 16, 32.0  # of adapters, beside every linear layer
DEMO = DecoderConfig(
    vocab_size=FULL.vocabulary, hidden_size=FULL.hidden, intermediate_size=FULL.intermediate,
    num_hidden_layers=FULL.layers, num_attention_heads=FULL.heads, num_key_value_heads=FULL.heads,
    max_position_embeddings=512,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to be trained: both sides start from weights that `decoder` makes anew."""

    name: str
    decoder: Callable[[], Decoder]
    lora: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """One iteration: prompts x group completions of exactly so many tokens, cut into minibatches for the updates."""

    prompts: int
    group: int
    prompt: int  # tokens
    completion: int
    minibatches: int = 1
    beta: float = 0.04

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    def __str__(self) -> str:
        updates = "1 update" if self.minibatches == 1 else f"{self.minibatches} updates"
        return f"{self.prompts} x {self.group} completions of {self.completion} after {self.prompt}, {updates}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """One step on ragged rows: a prompt and completions of low to high tokens, the last of which is the stop."""

    groups: int  # rows for SFT, pairs for DPO and reward models
    prompt: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.groups} x ({self.prompt} + {self.low} to {self.high} tokens)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A prompt and two answers, as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def demo(**changes: Any) -> Subject:
    """A model of the demo's shape, all of it trained."""
    return Subject(name="demo's model", decoder=lambda: random_decoder(replace(DEMO, **changes)))


def adapted() -> Subject:
    """The real 135M model if it was fetched, else one of its shape, with adapters."""
    _, what = big_decoder()
    return Subject(name=f"{what} (LoRA)", decoder=lambda: big_decoder()[0], lora=True)


def ids(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random tokens that are neither padding nor the stop."""
    return np.random.default_rng(seed).integers(2, min(vocab, 20_000), (count, length)).tolist()


def prompts_of(work: Online, vocab: int, count: int = 64) -> list[list[int]]:
    return ids(max(count, work.prompts), work.prompt, vocab, seed=0)


def rows_of(work: Offline, vocab: int, steps: int = 8) -> list[Written]:
    """As many different rows as so many steps take."""
    draw, count = np.random.default_rng(1), work.groups * steps
    lengths = draw.integers(work.low, work.high + 1, (count, 2))
    start = ids(count, work.prompt, vocab, seed=2)
    one, other = ids(count, work.high, vocab, seed=3), ids(count, work.high, vocab, seed=4)
    return [
        Written(prompt=p, chosen=[*a[: n - 1], STOP], rejected=[*b[: m - 1], STOP])
        for p, a, b, (n, m) in zip(start, one, other, lengths.tolist(), strict=True)
    ]


@cache
def words(vocab: int) -> tokenizers.Tokenizer:
    """Token i is the word w<i>; one more than the model can write stands for a stop that never comes."""
    inner = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab + 1)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return inner


def text_of(tokens: list[int]) -> str:
    return " ".join(f"w{t}" for t in tokens)


def variety(text: str) -> float:
    """The reward: how many of the words are different ones."""
    written = text.split()
    return len(set(written)) / max(len(written), 1)
