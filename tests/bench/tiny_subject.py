"""A model that both sides of a benchmark can train within a moment."""

import torch

from benchmarks.learning.work import Subject
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder

TINY = DecoderConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
)  # fmt: skip


def subject(dtype: torch.dtype, *, lora: bool = False) -> Subject:
    def decoder() -> Decoder:
        torch.manual_seed(0)
        return Decoder(TINY).to(dtype)

    return Subject(name="tiny", decoder=decoder, lora=lora)
