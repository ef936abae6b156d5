"""SFT of a low-rank adapter only; the base under it stays as it is."""

from dataclasses import replace

from hone import LoraSpec, OptimSpec, Recipe
from hone.config.load import load_recipe


def recipe() -> Recipe:
    """The recipe `sft` with rank 8 on every linear layer."""
    full = load_recipe("sft")()
    return replace(full, name="sft_lora", lora=LoraSpec(rank=8, alpha=16.0), optim=OptimSpec(lr=5e-3, warmup=10))
