"""Supervised fine-tuning on prompts and completions; needs the pre-trained model that `hone demo` leaves."""

from hone import Choice, ModelSpec, OptimSpec, Recipe, TrainSpec


def recipe() -> Recipe:
    """150 steps of 64 rows on the response tokens, the stop token included."""
    return Recipe(
        name="sft",
        model=ModelSpec(path="runs/demo/pretrain/model"),
        data="runs/demo/data/answers.jsonl",
        algo=Choice("sft"),
        train=TrainSpec(steps=150, prompts=64),
        optim=OptimSpec(lr=2e-3, warmup=10, schedule="cosine"),
    )
