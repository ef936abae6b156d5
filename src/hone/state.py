"""What a checkpoint holds: a model folder ready to load, and beside it all that a run needs to go on exactly.
And what a run's folder says of the run: its settings, and what it was run with."""

import json
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hone.config import Choice, from_yaml, to_json
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.fetch import resolve
from hone.model.peft import save_peft
from hone.model.policy import Policy, Scorer
from hone.model.whole import save_whole
from hone.recipe import Recipe, plan
from hone.train import checkpoint
from hone.train.step import Learner

if TYPE_CHECKING:
    from hone.train.shards import Shards

STATE, WEIGHTS, MOMENTS = "state.json", "learner.safetensors", "optimizer.safetensors"
REFERENCE = "reference.safetensors"  # where it is no longer the model of the start
ADAPTER = "adapter"  # a folder in PEFT's format, where adapters are trained
RECIPE, CONFIG = "recipe.json", "config.json"  # what `resume` reads, and what a person does


class Resumable(Protocol):
    """A part with a state of its own, as JSON."""

    def state(self) -> Mapping[str, Any]: ...

    def load(self, state: Any) -> None: ...


def write_model(folder: Path, model: Policy | Scorer | Decoder, tokenizer: Tokenizer) -> None:
    """The folder that `hone eval`, `hone run model.path=` and transformers load."""
    save_whole(model.decoder if isinstance(model, Policy) else model, tokenizer, folder)


def _base(recipe: Recipe) -> str:
    """The base model's folder in full: a name of the model cache means nothing to peft."""
    return str(resolve(recipe.model.path).resolve()) if recipe.model.path else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The weights of a run, all of each; where ranks hold parts, on the first rank alone."""

    model: Decoder | Scorer
    tensors: Mapping[str, Mapping[str, Tensor]]  # by file: trained ones as they are (adapters unmerged), moments


def collected(policy: Policy | Scorer, learner: Learner, *, recipe: Recipe) -> Whole:
    """What a checkpoint holds of the learner; every rank takes part."""
    shards, reference = learner.shards, dict[str, Tensor]()
    if recipe.train.reference_refresh and isinstance(learner.reference, Policy):
        reference = learner.reference.decoder.state_dict()
    if shards is None:
        weights, moments = learner.trained(), checkpoint.optimizer_tensors(learner.optimizer)
        model = policy.decoder if isinstance(policy, Policy) else policy
    else:
        weights, moments = shards.whole_weights(), shards.whole_moments(learner.optimizer)
        model, reference = shards.saved(), shards.whole_state(reference)
    tensors = {WEIGHTS: weights, MOMENTS: moments} | ({REFERENCE: reference} if reference else {})
    return Whole(model=model, tensors=tensors)


def write_state(
    folder: Path, whole: Whole, learner: Learner, *, recipe: Recipe, parts: Mapping[str, Resumable]
) -> None:
    """Tensors, counters and cursors, and the adapter that is trained."""
    for name, tensors in whole.tensors.items():
        checkpoint.save_tensors(folder / name, tensors)
    state = {
        "updates": learner.updates,
        "version": learner.version,
        "control": learner.control,
        "parts": {name: part.state() for name, part in parts.items()},
    }
    (folder / STATE).write_text(json.dumps(state, indent=1))
    if recipe.lora.used:
        scorer = isinstance(whole.model, Scorer)
        decoder = whole.model.decoder if isinstance(whole.model, Scorer) else whole.model
        save_peft(decoder, folder / ADAPTER, base=_base(recipe), task=None if scorer else "CAUSAL_LM")


def restore(
    folder: Path, policy: Policy | Scorer, learner: Learner, *, recipe: Recipe, parts: Mapping[str, Resumable]
) -> None:
    """Put everything back as `write_state` found it."""
    restore_weights(folder, policy, learner)
    moments = checkpoint.load_tensors(folder / MOMENTS)
    if learner.shards is not None:
        moments = learner.shards.own_moments(learner.optimizer, moments)
    checkpoint.load_optimizer(learner.optimizer, moments)
    state = checkpoint.read_json(folder / STATE)
    learner.updates, learner.version = state["updates"], state["version"]
    learner.control = dict(state["control"])
    if parts.keys() != state["parts"].keys():
        raise _of_another_run(folder)
    for name, part in parts.items():
        part.load(state["parts"][name])


def restore_weights(folder: Path, policy: Policy | Scorer, learner: Learner) -> None:
    """The trained weights, and the reference where it has moved: all that a loss depends on."""
    checkpoint.verify(folder)
    _load_weights(learner.trained(), checkpoint.load_tensors(folder / WEIGHTS), folder, shards=learner.shards)
    if learner.masters is not None:
        learner.masters.publish()
    if (folder / REFERENCE).is_file() and isinstance(policy, Policy):
        twin = learner.frozen_copy()
        tensors = checkpoint.load_tensors(folder / REFERENCE)
        if learner.shards is None:
            twin.decoder.load_state_dict(tensors)
        else:
            learner.shards.load(dict(twin.decoder.named_parameters()), tensors)
        learner.reference = policy.reference = twin


def _of_another_run(folder: Path) -> HoneError:
    return HoneError(f"{folder} was saved from another model: resume with the settings the run was started with")


@torch.no_grad()
def _load_weights(
    parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor], folder: Path, *, shards: "Shards | None"
) -> None:
    if parameters.keys() != tensors.keys():
        raise _of_another_run(folder)
    for name, p in parameters.items():
        if p.shape != tensors[name].shape:
            raise HoneError(f"{folder}: {name} has shape {tuple(tensors[name].shape)}, the model's is {tuple(p.shape)}")
    if shards is not None:
        return shards.load(parameters, tensors)
    for name, p in parameters.items():
        p.copy_(tensors[name])


# --- the run's folder ---


def describe(recipe: Recipe, folder: Path) -> None:
    """Write the settings; the first file marks the folder as a run's."""
    about = {
        "recipe": to_json(recipe),
        "plan": plan(recipe),
        "python": in_python(recipe),
        "versions": versions(),
        "commit": _commit(),
    }
    for name, content in ((RECIPE, about["recipe"]), (CONFIG, about)):
        # as it is, not escaped: YAML, which reads it again, does not join the two halves of an escaped emoji
        checkpoint.write_atomically(folder / name, json.dumps(content, indent=1, ensure_ascii=False))


def is_described(recipe: Recipe, folder: Path) -> bool:
    """Whether the folder's files say what the run is made of now: a resumed run may have more steps."""
    files = [folder / RECIPE, folder / CONFIG]
    return all(path.is_file() for path in files) and checkpoint.read_json(files[0]) == to_json(recipe)


HOW_IN_PYTHON = "continue it with `hone run RECIPE --resume`, or hone.run(recipe, resume=True)"


def recorded(folder: Path, *, unread: Collection[str] = (), how: str = HOW_IN_PYTHON) -> Recipe:
    """The recipe that the run in this folder was started with.

    unread: settings that the caller does without; of others made in Python, which no file holds, `how` is the remedy.
    """
    if not (folder / CONFIG).is_file():
        raise HoneError(f"{folder} is not a run: there is no {CONFIG} in it")
    if names := [name for name in checkpoint.read_json(folder / CONFIG).get("python", ()) if name not in unread]:
        raise HoneError(f"{folder} was started with {' and '.join(names)} made in Python: {how}")
    recipe = from_yaml(folder / RECIPE, Recipe())
    if isinstance(recipe.reward, Mapping):  # in the order it was written: samples list the parts in it
        recipe = replace(recipe, reward=checkpoint.read_json(folder / RECIPE)["reward"])
    if recipe.run_dir.resolve() != folder.resolve():  # moved, or called from another folder
        recipe = replace(recipe, out=str(folder))
    return recipe


def in_python(recipe: Recipe) -> list[str]:
    """The settings that a file cannot hold, so that only the recipe itself can continue the run."""
    plain = {"data": str, "eval_data": str, "reward": str | Mapping, "algo": Choice}
    return [name for name, kind in plain.items() if not isinstance(getattr(recipe, name), kind)]


def versions() -> dict[str, str]:
    """The packages whose numbers may differ from version to version."""
    return {name: _version(name) for name in ("hone", "torch", "tokenizers", "numpy")}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"  # run from the source tree


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


# with another of these, another run
FIXED = ("seed", "model", "data", "read", "reward", "algo", "teacher", "lora", "critic")


def check_same(recipe: Recipe, folder: Path) -> None:
    """What was trained so far must be what goes on: HoneError names the settings that differ."""
    before, now = checkpoint.read_json(folder / RECIPE), json.loads(json.dumps(to_json(recipe)))
    changed = [name for name in FIXED if before.get(name) != now[name]]
    if changed:
        raise HoneError(
            f"{folder} was started with another {' and '.join(changed)}: resume it as it was, or choose another out="
        )
