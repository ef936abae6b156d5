"""PPO with the verifier's reward and a process model's scores as potentials; needs the model of `hone run process`."""

from hone import Choice, CriticSpec, LimitSpec, ModelSpec, OptimSpec, ProcessSpec, Recipe, SampleSpec, TrainSpec


def recipe() -> Recipe:
    """20 steps of 24 prompts x 8 samples."""
    return Recipe(
        name="ppo_process",
        model=ModelSpec(path="runs/demo/sft/model"),
        data="runs/demo/data/problems.jsonl",
        eval_data="runs/demo/data/held_out.jsonl",
        reward={"math": 1.0, "format": 0.1},
        process=ProcessSpec(path="runs/process", use="shaping"),
        algo=Choice("ppo", {"beta": 0.02, "value_clip": None}),
        critic=CriticSpec(kind="own"),
        sample=SampleSpec(group=8, max_tokens=44),
        train=TrainSpec(steps=20, prompts=24, minibatches=4),
        optim=OptimSpec(lr=1e-4, critic_lr=5e-4, warmup=10),
        limits=LimitSpec(ref_kl_warn=None, ref_kl_stop=None),
    )
