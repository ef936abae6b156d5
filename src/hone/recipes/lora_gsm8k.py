"""The recipe `sft_gsm8k` for a low-rank adapter: the base stays as it is, and the adapter is saved in PEFT's format."""

from dataclasses import replace

from hone import LoraSpec, OptimSpec, Recipe
from hone.config.load import load_recipe


def recipe() -> Recipe:
    """Rank 16 on every linear layer."""
    full = load_recipe("sft_gsm8k")()
    optim = OptimSpec(lr=1e-3, warmup=20, schedule="cosine")
    return replace(full, name="lora_gsm8k", lora=LoraSpec(rank=16, alpha=32.0), optim=optim)
