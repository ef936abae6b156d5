"""PPO of SmolLM2-135M-Instruct on GSM8K, with the maths verifier and a critic that shares the model.

It needs what grpo_gsm8k needs. The model is seldom right at first: `hone run sft_gsm8k` before it, then
model.path=runs/sft_gsm8k, gives more signal.
"""

from hone import Choice, CriticSpec, LoraSpec, ModelSpec, OptimSpec, ReadSpec, Recipe, SampleSpec, SaveSpec, TrainSpec


def recipe() -> Recipe:
    """32 prompts x 4 samples of up to 256 tokens a step in 4 minibatches; lam 1, for the reward comes at the end."""
    return Recipe(
        name="ppo_gsm8k",
        model=ModelSpec(path="smollm2-135m"),
        data="gsm8k:train",
        reward={"math": 1.0},
        algo=Choice("ppo", {"beta": 0.01, "lam": 1.0, "value": 0.1, "value_clip": None}),
        critic=CriticSpec(kind="shared"),
        lora=LoraSpec(rank=16, alpha=32.0),
        sample=SampleSpec(group=4, max_tokens=256),
        train=TrainSpec(steps=200, prompts=32, minibatches=4, micro_tokens=16_384),
        read=ReadSpec(overlong="drop"),
        optim=OptimSpec(lr=5e-5, critic_lr=5e-4, warmup=20),
        save=SaveSpec(every=50),
    )
