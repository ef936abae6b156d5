"""PPO with a reward model and a critic of its own; needs the models that `hone demo` leaves."""

from dataclasses import replace

from hone import Choice, CriticSpec, OptimSpec, Recipe
from hone.config.load import load_recipe


def recipe() -> Recipe:
    """The recipe `grpo` with PPO: KL to the SFT model in the reward, GAE, a critic that starts from the policy."""
    return replace(
        load_recipe("grpo")(),
        name="ppo",
        reward={"model:runs/demo/reward/model": 1.0},
        algo=Choice("ppo", {"beta": 0.1, "value_clip": None}),
        critic=CriticSpec(kind="own"),
        optim=OptimSpec(lr=1e-4, critic_lr=5e-4, warmup=10),
    )
