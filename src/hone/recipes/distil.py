"""On-policy distillation: the pre-trained model learns from the GRPO model; needs both, as `hone demo` leaves them."""

from hone import Choice, ModelSpec, OptimSpec, Recipe, SampleSpec, TrainSpec


def recipe() -> Recipe:
    """24 prompts x 4 samples a step, each token marked by the teacher; the reward is only watched."""
    return Recipe(
        name="distil",
        model=ModelSpec(path="runs/demo/pretrain/model"),
        teacher="runs/demo/grpo/model",
        data="runs/demo/data/problems.jsonl",
        eval_data="runs/demo/data/held_out.jsonl",
        reward={"math": 1.0},
        algo=Choice("distil", {"top_k": 0}),
        sample=SampleSpec(group=4, max_tokens=44),
        train=TrainSpec(steps=60, prompts=24),
        optim=OptimSpec(lr=3e-4, warmup=10),
    )
