"""Recipes in Python and in files, settings of algorithms and of runs that are refused, and what each message names."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from remedy_world import Case, World, call, command, given, instead, lacks, prepared, recipe, settings, typed

import hone
from hone.algo import weight
from hone.config.load import load_recipe
from hone.config.overrides import Choice, build_choice, from_plain, from_yaml, override
from hone.config.recipe import Recipe
from hone.config.rules import validate
from hone.eval.scaling import LAWS, ModelShape, ScalingLaw, fit, read_runs
from hone.log import sinks
from hone.log.monitor import Monitor
from hone.types import Task


def yaml(wrong: str | bytes, right: str, says: str) -> Case:
    """A file of settings."""
    return given(lambda w, content: from_yaml(w.file(content, ".yaml"), Recipe()), wrong, right, says)


def logged(wrong: str, says: str) -> Case:
    """A log with this line in it."""
    return given(lambda w, text: sinks.read(w.file(text + '{"step": 2}\n', ".jsonl")), wrong, "", says)


def _endless() -> dict[str, Any]:
    made = dict[str, Any]()
    made["train"] = made
    return made


def _made_in_python(world: World, *changes: str) -> None:
    override(Recipe(algo=hone.algo.grpo()), list(changes))


def _needs(*, size: int) -> int:
    return size


def _report(world: World, folder: str) -> None:
    Path(world / "logged").mkdir(exist_ok=True)
    Path(world / "logged/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    typed(world, "report", world / folder)


def _written(world: World) -> None:
    sinks._summary_writer(world.new()).close()


def _runs(count: int) -> list[tuple[float, float, float]]:
    sizes = [(n, d) for n in (1e6, 2e6, 4e6) for d in (1e8, 2e8, 4e8)][:count]
    return [(n, d, LAWS["hoffmann"].loss(n, d)) for n, d in sizes]


def _law(E: float) -> ScalingLaw:
    return ScalingLaw(E=E, A=1.0, B=1.0, alpha=0.3, beta=0.3)


def algo(factory: Callable[..., Any], wrong: dict[str, Any], right: dict[str, Any], says: str) -> Case:
    return given(lambda w, chosen: factory(**chosen), wrong, right, says)


FILES = [
    yaml("- 3", "seed: 3", "expected settings (name: value)"),
    yaml("seed: [", "seed: 3", "correct it"),
    yaml("3: 4", '"seed": 4', "put it in quotes"),
    yaml(b"\xff", "seed: 3", "save the file as UTF-8"),
    given(
        lambda w, values: from_plain(values, Recipe(), where="x"), _endless(), {"seed": 1}, "write each as name: value"
    ),
    given(
        lambda w, path: from_yaml(path(w), Recipe()), lambda w: w / "no.yaml", lambda w: w.file("", ".yaml"), "check"
    ),
    given(lambda w, text: override(Recipe(), [text]), "algo=", "algo=grpo", "give a name, as in algo=NAME"),
    given(lambda w, text: override(Recipe(), [text]), "train.steps.a=3", "train.steps=3", "set train.steps itself"),
    given(_made_in_python, "algo.beta=0.1", "algo=grpo", "choose one with algo=NAME"),
    given(
        lambda w, name: load_recipe(name(w)),
        lambda w: "zzz",
        lambda w: w.file("from hone import Recipe\n\n\ndef recipe():\n    return Recipe()\n", ".py"),
        "or give the path of a .py file",
    ),
    call(lambda w: validate(cast(Any, 3)), lambda w: validate(recipe(w, "sft")), "a recipe returns a hone.Recipe"),
    given(
        lambda w, made: validate(replace(recipe(w, "grpo"), algo=made)),
        cast(Any, 3),
        Choice("grpo"),
        "use Choice('grpo')",
    ),
    given(
        lambda w, made: validate(replace(recipe(w, "grpo"), algo=made)),
        cast(Any, 3),
        hone.algo.grpo(),
        "or hone.algo.grpo()",
    ),
    given(
        lambda w, data: prepared(w, "sft", data=data),
        [Task(prompt="a")],
        [{"prompt": "a", "completion": "b"}],
        "write each as {column: value}",
    ),
]
ALGORITHMS = [
    algo(hone.algo.grpo, {"kl": "loss:exact*ratio"}, {"kl": "loss:k3*ratio"}, "*ratio goes with loss:k1"),
    algo(hone.algo.dapo, {"limit": 1.5}, {"limit": 1}, "it must be a whole number"),
    given(
        lambda w, settings: build_choice(Choice("mine", settings), {"mine": _needs}), {}, {"size": 3}, "give it a value"
    ),
    algo(hone.algo.grpo, {"ratio": "x"}, {"ratio": "token"}, "use one of"),
    algo(hone.algo.grpo, {"process": True, "kl": "reward:k1"}, {"process": True, "kl": "loss:k3"}, "as in kl=loss:k3"),
    algo(hone.algo.dapo, {"limit": 4, "margin": 8}, {"limit": 8, "margin": 4}, "lower it"),
    given(lambda w, how: weight.mismatch(cast(Any, _Batch), how=how, cap=2.0), "x", "mask", "use truncate or mask"),
    settings("grpo", "algo.beta=high", "algo.beta=0.1", "give a number"),
    settings("trpo", "train.shard=fsdp", "train.shard=none", "set train.shard=none"),
    settings("grpo", "algo.process=true", "process.path=WORLD/judge", "set process.path=FOLDER, a process model"),
    settings(
        "grpo",
        "algo.lam=0.5 process.path=WORLD/judge process.use=progress",
        "process.use=reward",
        "set process.use=reward",
    ),
    instead(
        "grpo",
        "algo.lam=0.5 process.path=WORLD/judge process.use=progress",
        "process.path=WORLD/judge process.use=progress",
        "or leave lam out",
    ),
    instead("sft", "read.columns.prompt=", "read.columns.prompt=prompt", "give the name of a column of the data"),
    settings("sft", "lora.path=WORLD/adapter lora.rank=2", "lora.path=", "or leave out lora.path"),
    settings("grpo", "reward={} reward.math=1.0 parts.cache.math=-1", "parts.cache.math=10", "give a number above 0"),
    instead(
        "grpo",
        "reward={} reward.numeric:0.01=1.0 parts.timeout.numeric:0.01=3 train.reward_apart=never",
        "reward={} reward.numeric:0.01=1.0 parts.timeout.numeric:0.01=3",
        "leave out train.reward_apart=never",
    ),
]
PLANS = [
    command("plan scaling --flops -1", "plan scaling --flops 1e18", "give a number above 0"),
    given(lambda w, e: _law(e), -1.0, 1.0, "check the fit"),
    given(lambda w, n: ModelShape(layers=n, width=8, context=8), 0, 1, "give the shape of the model"),
    given(lambda w, runs: fit(runs, bootstrap=0), _runs(2), _runs(9), "with three different model sizes"),
    given(
        lambda w, loss: read_runs([{"params": 1, "tokens": 2, "loss": loss}]),
        -1,
        3.0,
        "expected a number above 0: correct",
    ),
    call(
        lambda w: typed(w, "plan", "scaling", "--fit", _fits(w), "--bootstrap", "-1", "--flops", "1e18"),
        lambda w: typed(w, "plan", "scaling", "--fit", _fits(w), "--bootstrap", "0", "--flops", "1e18"),
        "give 0 or more",
    ),
]
LOGS = [
    logged("x\n", "repair or delete that line"),
    logged('{"step": "x"}\n', "tells of no step"),
    given(_report, "model", "logged", "to report on: give the folder of a run"),
    given(
        lambda w, state: Monitor().load(state), {"count": 3}, {"count": {}, "said": []}, "what the monitor remembers"
    ),
    lacks("tensorboard", _written, "pip install hone[tensorboard]"),
    command("resume nothing", "settings", "give the folder of a run, as in runs/NAME"),
]


class _Batch:
    """What a correction for the sampler reads."""

    mask = torch.tensor([[True]])
    old_logp = gen_logp = torch.zeros(1, 1)


def _fits(world: World) -> str:
    return world.rows([{"params": n, "tokens": d, "loss": loss} for n, d, loss in _runs(9)])


RECIPES: list[Case] = [*FILES, *ALGORITHMS, *PLANS, *LOGS]
