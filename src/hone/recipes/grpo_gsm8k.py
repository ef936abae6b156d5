"""GRPO of SmolLM2-135M-Instruct on GSM8K with the maths verifier; needs `hone fetch smollm2-135m` and the dataset.

The model is seldom right at first: `hone run sft_gsm8k` before it, then model.path=runs/sft_gsm8k, gives more signal.
"""

from hone import Choice, LoraSpec, ModelSpec, OptimSpec, ReadSpec, Recipe, SampleSpec, SaveSpec, TrainSpec


def recipe() -> Recipe:
    """16 prompts x 8 samples of up to 256 tokens a step, an adapter of rank 16; the KL holds it to the start."""
    return Recipe(
        name="grpo_gsm8k",
        model=ModelSpec(path="smollm2-135m"),
        data="gsm8k:train",
        reward={"math": 1.0},
        algo=Choice("grpo", {"beta": 0.01}),
        lora=LoraSpec(rank=16, alpha=32.0),
        sample=SampleSpec(group=8, max_tokens=256),
        train=TrainSpec(steps=200, prompts=16, micro_tokens=16_384),
        read=ReadSpec(overlong="drop"),
        optim=OptimSpec(lr=5e-5, warmup=10),
        save=SaveSpec(every=50),
    )
