"""A Bradley-Terry reward model from preference pairs; needs the SFT model and pairs that `hone demo` leaves."""

from hone import Choice, ModelSpec, OptimSpec, Recipe, TrainSpec


def recipe() -> Recipe:
    """60 steps of 32 pairs."""
    return Recipe(
        name="reward",
        model=ModelSpec(path="runs/demo/sft/model"),
        data="runs/demo/data/preferences.jsonl",
        algo=Choice("reward_model", {"centre": 0.01}),
        train=TrainSpec(steps=60, prompts=32),
        optim=OptimSpec(lr=5e-4, warmup=5, schedule="cosine"),
    )
