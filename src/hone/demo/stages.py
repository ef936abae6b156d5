"""The demo's stages as recipes: each is what `hone run` would run, on the files the stages before it left."""

from pathlib import Path

from hone.config import Choice
from hone.demo.data import FILES
from hone.demo.sizes import Sizes
from hone.log.limits import Limits
from hone.recipe import CriticSpec, ModelSpec, OptimSpec, Recipe, SampleSpec, TrainSpec

ORDER = ("pretrain", "sft", "reward", "grpo", "ppo", "dpo")


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


def _from(out: Path, stage: str) -> ModelSpec:
    return ModelSpec(path=str(model_folder(out, stage)))


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
    return Recipe(
        name="sft",
        seed=seed,
        out=str(out / "{name}"),
        model=_from(out, "pretrain"),
        data=_file(out, "answers"),
        algo=Choice("sft"),
        train=TrainSpec(steps=sizes.sft, prompts=64, micro_rows=64),
        optim=OptimSpec(lr=5e-4, warmup=min(10, sizes.sft), schedule="cosine"),
    )


def _reward(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return Recipe(
        name="reward",
        seed=seed,
        out=str(out / "{name}"),
        model=_from(out, "sft"),
        data=_file(out, "preferences"),
        algo=Choice("reward_model", {"centre": 0.01}),
        train=TrainSpec(steps=sizes.reward, prompts=32, micro_rows=64),
        optim=OptimSpec(lr=5e-4, warmup=min(5, sizes.reward), schedule="cosine"),
    )


def _online(out: Path, sizes: Sizes) -> dict[str, object]:
    return {
        "out": str(out / "{name}"),
        "model": _from(out, "sft"),
        "data": _file(out, "problems"),
        "sample": SampleSpec(group=8, max_tokens=sizes.completion),
        "limits": Limits(ref_kl_warn=None, ref_kl_stop=None),
    }


def _grpo(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return Recipe(
        name="grpo",
        seed=seed,
        reward={"math": 1.0, "format": 0.1},
        algo=Choice("grpo", {"beta": 0.01}),
        train=TrainSpec(steps=sizes.grpo, prompts=24, minibatches=4, micro_rows=96),
        optim=OptimSpec(lr=1e-4, warmup=min(10, 4 * sizes.grpo)),
        **_online(out, sizes),  # pyright: ignore[reportArgumentType]
    )


def _ppo(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return Recipe(
        name="ppo",
        seed=seed,
        reward={f"model:{model_folder(out, 'reward')}": 1.0},
        algo=Choice("ppo", {"beta": 0.1, "lam": 0.95, "value_clip": None}),
        critic=CriticSpec(kind="own"),
        train=TrainSpec(steps=sizes.ppo, prompts=24, minibatches=4, micro_rows=96),
        optim=OptimSpec(lr=1e-4, critic_lr=5e-4, warmup=min(10, 4 * sizes.ppo)),
        **_online(out, sizes),  # pyright: ignore[reportArgumentType]
    )


def _dpo(out: Path, sizes: Sizes, seed: int) -> Recipe:
    return Recipe(
        name="dpo",
        seed=seed,
        out=str(out / "{name}"),
        model=_from(out, "sft"),
        data=_file(out, "preferences"),
        algo=Choice("dpo", {"beta": 0.1}),
        train=TrainSpec(steps=sizes.dpo, prompts=32, micro_rows=64),
        optim=OptimSpec(lr=1e-4, warmup=min(5, sizes.dpo), schedule="cosine"),
        limits=Limits(ref_kl_warn=None, ref_kl_stop=None),
    )
