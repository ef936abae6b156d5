"""Models of transformers with random weights, to compare ours with."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def random_model(family: str, **settings: Any) -> Any:
    """Biases and norms are random too, so that none of them is at a value that hides it."""
    config = AutoConfig.for_model(family, **settings, attn_implementation="eager")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for key, p in model.named_parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, mean=float("norm" in key), std=0.3)
    return model
