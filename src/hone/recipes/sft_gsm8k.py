"""SFT of SmolLM2-135M-Instruct on GSM8K's worked solutions; needs `hone fetch smollm2-135m` and the dataset."""

from hone import Choice, ModelSpec, OptimSpec, ReadSpec, Recipe, SaveSpec, TrainSpec


def recipe() -> Recipe:
    """Three epochs of 7,473 problems, 64 a step; held-out loss on the test split every 50 steps."""
    return Recipe(
        name="sft_gsm8k",
        model=ModelSpec(path="smollm2-135m"),
        data="gsm8k:train",
        eval_data="gsm8k:test",
        algo=Choice("sft"),
        train=TrainSpec(steps=350, prompts=64, micro_tokens=16_384, eval_every=50),
        read=ReadSpec(overlong="drop"),
        optim=OptimSpec(lr=1e-4, warmup=20, schedule="cosine", weight_decay=0.01),
        save=SaveSpec(every=100),
    )
