"""GRPO with a verifier; needs the SFT model and problems that `hone demo` leaves. Other online algorithms fit too."""

from hone import Choice, ModelSpec, OptimSpec, Recipe, SampleSpec, TrainSpec


def recipe() -> Recipe:
    """24 prompts x 8 samples a step, rewarded for the right answer and, a little, for its form."""
    return Recipe(
        name="grpo",
        model=ModelSpec(path="runs/demo/sft/model"),
        data="runs/demo/data/problems.jsonl",
        eval_data="runs/demo/data/held_out.jsonl",
        reward={"math": 1.0, "format": 0.1},
        algo=Choice("grpo", {"beta": 0.0}),
        sample=SampleSpec(group=8, max_tokens=44),
        train=TrainSpec(steps=60, prompts=24, minibatches=4),
        optim=OptimSpec(lr=1e-4, warmup=10),
    )
