"""The demo's stages as recipes. `hone run` could run each of them on the files of the stages before it.

`FULL` are the sizes of the README's journey, `QUICK` those of a smoke test.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from hone.config.overrides import Choice
from hone.config.recipe import CriticSpec, ModelSpec, OptimSpec, Recipe, SampleSpec, TrainSpec
from hone.log.limits import LimitSpec

FAR = LimitSpec(ref_kl_warn=None, ref_kl_stop=None)  # a model this small has to move far from the SFT model
ORDER = ("pretrain", "sft", "reward", "grpo", "ppo", "dpo")
STARTS = dict.fromkeys(ORDER[2:], "sft") | {"sft": "pretrain"}  # the stage whose model this stage begins with
FILES = {
    "corpus": "corpus.jsonl",
    "answers": "answers.jsonl",
    "problems": "problems.jsonl",
    "preferences": "preferences.jsonl",
    "held_out": "held_out.jsonl",
}


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
    ppo: int = 20  # more steps please the reward model and not the verifier
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


def recipe(stage: str, out: Path, sizes: Sizes, *, seed: int) -> Recipe:
    """The stage's recipe."""
    return {
        "pretrain": _pretrain,
        "sft": _sft,
        "reward": _reward,
        "grpo": _grpo,
        "ppo": _ppo,
        "dpo": _dpo,
    }[stage](out, sizes, seed)


def model_folder(out: Path, stage: str) -> Path:
    """Where the stage leaves its model."""
    return out / stage / "model"


def _finetune_base(stage: str, out: Path, seed: int, *, data: str) -> Recipe:
    """What all stages but the first share: another stage's model, and one of the demo's files."""
    return Recipe(
        name=stage,
        seed=seed,
        out=str(out / "{name}"),
        model=ModelSpec(path=str(model_folder(out, STARTS[stage]))),
        data=_file(out, data),
    )


def _file(out: Path, name: str) -> str:
    return str(out / "data" / FILES[name])


def _pretrain(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return Recipe(
        name="pretrain",
        seed=seed,
        out=str(out / "{name}"),
        model=ModelSpec(
            tokenizer=str(out / "tokenizer"),
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            layers=sizes.layers,
            heads=sizes.heads,
            kv_heads=sizes.heads,
            context=sizes.context,
        ),
        data=_file(out, "corpus"),
        algo=Choice("pretrain"),
        train=TrainSpec(steps=sizes.pretrain, prompts=128, micro_rows=128),
        optim=OptimSpec(lr=3e-3, warmup=min(20, sizes.pretrain), schedule="cosine", weight_decay=0.01),
    )


def _sft(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return replace(
        _finetune_base("sft", out, seed, data="answers"),
        algo=Choice("sft"),
        train=TrainSpec(steps=sizes.sft, prompts=64, micro_rows=64),
        optim=OptimSpec(lr=5e-4, warmup=min(10, sizes.sft), schedule="cosine"),
    )


def _reward(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return replace(
        _finetune_base("reward", out, seed, data="preferences"),
        algo=Choice("reward_model", {"centre": 0.01}),
        train=TrainSpec(steps=sizes.reward, prompts=32, micro_rows=64),
        optim=OptimSpec(lr=5e-4, warmup=min(5, sizes.reward), schedule="cosine"),
    )


def _grpo(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return replace(
        _finetune_base("grpo", out, seed, data="problems"),
        reward={"math": 1.0, "format": 0.1},
        algo=Choice("grpo", {"beta": 0.01}),
        sample=SampleSpec(group=8, max_tokens=sizes.completion),
        train=TrainSpec(steps=sizes.grpo, prompts=24, minibatches=4, micro_rows=96),
        optim=OptimSpec(lr=1e-4, warmup=min(10, 4 * sizes.grpo)),
        limits=FAR,
    )


def _ppo(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return replace(
        _finetune_base("ppo", out, seed, data="problems"),
        reward={f"model:{model_folder(out, 'reward')}": 1.0},
        algo=Choice("ppo", {"beta": 0.1, "lam": 0.95, "value_clip": None}),
        critic=CriticSpec(kind="own"),
        sample=SampleSpec(group=8, max_tokens=sizes.completion),
        train=TrainSpec(steps=sizes.ppo, prompts=24, minibatches=4, micro_rows=96),
        optim=OptimSpec(lr=1e-4, critic_lr=5e-4, warmup=min(10, 4 * sizes.ppo)),
        limits=FAR,
    )


def _dpo(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return replace(
        _finetune_base("dpo", out, seed, data="preferences"),
        algo=Choice("dpo", {"beta": 0.1}),
        train=TrainSpec(steps=sizes.dpo, prompts=32, micro_rows=64),
        optim=OptimSpec(lr=1e-4, warmup=min(5, sizes.dpo), schedule="cosine"),
        limits=FAR,
    )
