"""A process reward model from step labels, which `hone label-steps` makes of the demo's SFT model and problems.

    hone label-steps runs/demo/sft/model runs/demo/data/problems.jsonl --separator ' ' --max-tokens 44 --samples 4 \
        --limit 400 --out runs/demo/data/steps.jsonl
"""

from hone import Choice, ModelSpec, OptimSpec, Recipe, TrainSpec


def recipe() -> Recipe:
    """80 steps of 64 solutions."""
    return Recipe(
        name="process",
        model=ModelSpec(path="runs/demo/sft/model"),
        data="runs/demo/data/steps.jsonl",
        algo=Choice("process_reward_model"),
        train=TrainSpec(steps=80, prompts=64),
        optim=OptimSpec(lr=5e-4, warmup=5, schedule="cosine"),
    )
