"""Small decoders and ragged tables in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.types import Batch

VOCAB = 23


def build(seed: int = 0, **settings: Any) -> Decoder:
    base = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(DecoderConfig(**{**base, "initializer_range": 0.3, **settings})).double()


def table(rows: list[list[int]], *, place: str = "right", extra: int = 0, garbage: int = 0) -> Batch:
    """Rows of tokens as a Batch with padding right, left, in the middle or on both sides of each row."""
    T = max(len(r) for r in rows) + extra
    inputs = torch.full((len(rows), T), garbage)
    targets = torch.full((len(rows), T), garbage)
    mask, real = torch.zeros(len(rows), T, dtype=torch.bool), torch.zeros(len(rows), T, dtype=torch.bool)
    for b, row in enumerate(rows):
        n, room = len(row), T - len(row)
        at = {
            "right": list(range(n)),
            "left": list(range(room, T)),
            "middle": [*range(n // 2), *range(n // 2 + room, T)],
            "both": list(range(room // 2, room // 2 + n)),
        }[place]
        inputs[b, at] = torch.tensor(row)
        targets[b, at[:-1]] = torch.tensor(row[1:])
        mask[b, at[1:-1]] = True  # the first token is a prompt, the last has no target
        real[b, at] = True
    return Batch(inputs=inputs, targets=targets, mask=mask, real=real, group=torch.zeros(len(rows)).long())


def sequences(lengths: tuple[int, ...] = (7, 3, 12, 5, 3, 9), seed: int = 1) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=drawn).tolist() for n in lengths]


def direct_logits(decoder: Decoder, row: list[int]) -> Tensor:
    """One row alone, no padding, no packing, no chunks: [T, V]."""
    return decoder.lm_head(decoder(torch.tensor([row])))[0]


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    return build


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return table


@pytest.fixture
def rows() -> list[list[int]]:
    return sequences()


@pytest.fixture
def logits_of() -> Callable[[Decoder, list[int]], Tensor]:
    return direct_logits
