"""How much of everything the demo does. `FULL` is the journey of the README, `QUICK` a smoke test."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows of data and steps of each stage."""

    documents: int = 20_000
    answers: int = 1_500
    problems: int = 4_000
    held_out: int = 200
    vocabulary: int = 320
    hidden: int = 128
    intermediate: int = 384
    layers: int = 4
    heads: int = 8
    context: int = 64
    completion: int = 44  # tokens a completion may have
    pretrain: int = 360
    sft: int = 60
    reward: int = 60
    grpo: int = 48
    ppo: int = 20  # more of it serves the reward model and not the verifier
    dpo: int = 50
    preference_problems: int = 300  # problems whose sampled answers are compared
    examined: int = 4  # samples a held-out problem
    written_pairs: bool = False  # prefer worked to untidy answers by the writers: a model of six steps is never right


FULL = Sizes()
QUICK = Sizes(
    documents=400,
    answers=200,
    problems=100,
    held_out=16,
    hidden=32,
    intermediate=64,
    layers=2,
    heads=2,
    pretrain=6,
    sft=6,
    reward=3,
    grpo=3,
    ppo=3,
    dpo=3,
    preference_problems=64,
    examined=1,
    written_pairs=True,
)
