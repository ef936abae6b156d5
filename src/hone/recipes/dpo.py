"""DPO on preference pairs; needs the SFT model and pairs that `hone demo` leaves. ipo, orpo and simpo fit too."""

from hone import Choice, ModelSpec, OptimSpec, Recipe, TrainSpec


def recipe() -> Recipe:
    """60 steps of 32 pairs."""
    return Recipe(
        name="dpo",
        model=ModelSpec(path="runs/demo/sft/model"),
        data="runs/demo/data/preferences.jsonl",
        algo=Choice("dpo", {"beta": 0.1}),
        train=TrainSpec(steps=60, prompts=32),
        optim=OptimSpec(lr=1e-4, warmup=5, schedule="cosine"),
    )
