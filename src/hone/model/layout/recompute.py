"""Whether a backward pass has memory for what the layers would keep; if not, they keep their inputs alone."""

import torch

from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder

SHARE = 0.7  # of the free memory that layers may fill: logits, gradients and what is being computed need the rest


def kept(config: DecoderConfig) -> int:
    """Numbers that a layer keeps for each token (model/backends/fused/layer.py): two streams, queries, keys and values, what attention
    made of them, gate and up."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return 2 * config.hidden_size + heads * config.head_dim + 2 * config.intermediate_size


def crowded(decoder: Decoder, tokens: int, *, free: int | None = None) -> bool:
    """Whether so many tokens would fill the memory that is free; None: what the GPU has, and never on a CPU."""
    weight, config = decoder.model.embed_tokens.weight, decoder.config
    if free is None and not weight.is_cuda:
        return False
    needed = tokens * config.num_hidden_layers * kept(config) * weight.element_size()
    return needed > SHARE * (_free(weight.device) if free is None else free)


def _free(gpu: torch.device) -> int:
    return torch.cuda.get_device_properties(gpu).total_memory - torch.cuda.memory_allocated(gpu)
