"""What a checkpoint holds: a model folder ready to load, and beside it all that a run needs to go on exactly."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.fetch import resolve
from hone.model.peft import save_peft
from hone.model.policy import Policy, Scorer
from hone.model.whole import save_whole
from hone.recipe import Recipe
from hone.train import checkpoint
from hone.train.step import Learner

if TYPE_CHECKING:
    from hone.train.shards import Shards

STATE, WEIGHTS, MOMENTS = "state.json", "learner.safetensors", "optimizer.safetensors"
REFERENCE = "reference.safetensors"  # where it is no longer the model of the start
ADAPTER = "adapter"  # a folder in PEFT's format, where adapters are trained


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
