"""A folder of small models and rows, as the tests of runs, checks and servers share it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder


@dataclass(frozen=True)
class Place:
    """Where everything is."""

    folder: Path

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def decoder(vocab: int, *, seed: int = 0, context: int = 48, layers: int = 1, spread: float = 0.2) -> Decoder:
    """Weights that the seed draws, `spread` apart."""
    config = DecoderConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=context, initializer_range=spread,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config)
