"""What a checkpoint holds: a model folder ready to load, and all that a run needs to go on exactly."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from hone.config.recipe import Recipe
from hone.config.values import Misfit, fit, shown_value
from hone.data.text.tokenizer import Tokenizer
from hone.dist.collect import local_part
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.formats.cache import resolve
from hone.model.formats.foreign import Foreign
from hone.model.formats.peft import save_peft
from hone.model.formats.save import save_model, weights_of
from hone.model.formats.weight_files import tensor_index
from hone.model.lora import adapter_names, lora_state
from hone.model.policy import Policy
from hone.model.scorer import Scorer
from hone.storage import files, names
from hone.storage.files import load_optimizer, load_tensors, optimizer_tensors, save_tensors
from hone.storage.textfile import read_text
from hone.train.learner import Learner

if TYPE_CHECKING:
    from hone.train.shards import Shards

FORMAT = 1  # of all that lies beside the model. It rises when an older Hone would read the files wrongly
FREE = 2**31  # bytes of a GPU's memory that copies leave free


class Resumable(Protocol):
    """A part with a state of its own, as JSON."""

    def state(self) -> Mapping[str, Any]: ...

    def load(self, state: Any) -> None: ...


def _base(recipe: Recipe) -> str:
    """The full path of the base model's folder: peft does not know the names of the model cache."""
    return str(resolve(recipe.model.path).resolve()) if recipe.model.path else ""


# --- saving: all of it as it is now, then the files ---


class Copies:
    """Copies tensors that training changes in place, each of them once; returns other tensors as they are."""

    def __init__(self, moving: Iterable[Tensor]) -> None:
        self._moving = {x.untyped_storage().data_ptr() for x in moving}
        self._copies = dict[tuple[object, ...], Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor as it is now."""
        x = x.detach()
        if x.is_meta or x.untyped_storage().data_ptr() not in self._moving:
            return x
        place = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride())
        if place not in self._copies:
            self._copies[place] = _copy(x)
        return self._copies[place]


def _copy(x: Tensor) -> Tensor:
    """A copy on the same device, which is fastest, or on the CPU if the device is nearly full."""
    full = x.is_cuda and torch.cuda.mem_get_info(x.device)[0] < x.nbytes + FREE
    return x.cpu() if full else x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a checkpoint holds, as it was at one moment. If ranks hold parts, only the first rank's has tensors.

    Updates do not change its tensors, so that it can be written while the run goes on.
    """

    model: Decoder | Scorer  # its structure; its weights are in `weights`
    weights: Mapping[str, Tensor]  # of the model's folder: adapters merged
    tensors: Mapping[str, Mapping[str, Tensor]]  # by file: trained ones as they are (adapters unmerged), moments
    adapter: Mapping[str, Tensor]  # empty: none is trained
    state: str  # JSON: counters and cursors


def take_snapshot(
    policy: Policy | Scorer,
    learner: Learner,
    *,
    recipe: Recipe,
    parts: Mapping[str, Resumable],
    score: float | None = None,
) -> Snapshot:
    """Copy all that a checkpoint holds; every rank takes part. score: the metric save.best, where it was measured."""
    shards, reference = learner.shards, dict[str, Tensor]()
    if recipe.train.reference_refresh and isinstance(learner.reference, Policy):
        reference = learner.reference.decoder.state_dict()
    if shards is None:
        weights, moments = learner.trained(), optimizer_tensors(learner.optimizer)
        model = policy.decoder if isinstance(policy, Policy) else policy
    else:
        weights, moments = shards.whole_weights(), shards.whole_moments(learner.optimizer)
        model, reference = shards.saved(), shards.whole_state(reference)
    tensors = {names.WEIGHTS: weights, names.MOMENTS: moments} | ({names.REFERENCE: reference} if reference else {})
    decoder = model.decoder if isinstance(model, Scorer) else model
    copy = Copies(_changed_in_place(policy, learner))
    return Snapshot(
        model=model,
        weights={name: copy(x) for name, x in weights_of(model).items()},
        tensors={file: {name: copy(x) for name, x in found.items()} for file, found in tensors.items()},
        adapter={name: copy(x) for name, x in lora_state(decoder).items()} if adapter_names(decoder) else {},
        state=json.dumps(_state(learner, recipe=recipe, parts=parts, score=score), indent=1),
    )


def _changed_in_place(policy: Policy | Scorer, learner: Learner) -> Iterator[Tensor]:
    """The tensors that an update changes in place."""
    yield from (local_part(p) for p in policy.parameters() if p.requires_grad)
    yield from (local_part(p) for p in learner.trained().values())
    yield from (local_part(x) for x in optimizer_tensors(learner.optimizer).values())


def _state(learner: Learner, *, recipe: Recipe, parts: Mapping[str, Resumable], score: float | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "updates": learner.updates,
        "version": learner.version,
        "control": learner.control,
        "dtype": "bfloat16" if _is_half(learner) else "float32",
        "score": None if score is None else {"metric": recipe.save.best, "value": score},
        "parts": {name: part.state() for name, part in parts.items()},
    }


def _is_half(learner: Learner) -> bool:
    if learner.masters is not None:
        return learner.masters.half
    return learner.shards is not None and learner.shards.half is not None


def score_of(folder: Path, metric: str) -> float | None:
    """A checkpoint's value of the metric; None where it was not measured, or cannot be read."""
    try:
        score = json.loads(read_text(folder / names.STATE))["score"]
        return float(score["value"]) if score["metric"] == metric else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def write_checkpoint(folder: Path, snapshot: Snapshot, tokenizer: Tokenizer, *, recipe: Recipe) -> None:
    """Write a model folder ready to load, and the state that a run resumes from."""
    save_model(snapshot.model, tokenizer, folder, weights=snapshot.weights)
    write_state(folder, snapshot, recipe=recipe)


def write_state(folder: Path, snapshot: Snapshot, *, recipe: Recipe) -> None:
    """Write tensors, counters and cursors, and the adapter that is trained."""
    for file, tensors in snapshot.tensors.items():
        kept = {
            name: x for name, x in tensors.items() if file != names.WEIGHTS or not _in_model_folder(name, x, snapshot)
        }
        save_tensors(folder / file, kept)
    (folder / names.STATE).write_text(snapshot.state)
    if snapshot.adapter:
        scorer = isinstance(snapshot.model, Scorer)
        decoder = snapshot.model.decoder if isinstance(snapshot.model, Scorer) else snapshot.model
        task = None if scorer else "CAUSAL_LM"
        save_peft(decoder, folder / names.ADAPTER, base=_base(recipe), task=task, weights=snapshot.adapter)


def _model_key(name: str) -> str:
    """The name of a trained weight in a model's folder; "" where the folder lacks it."""
    if name.startswith(("decoder.inner.", "critic.")):  # transformers writes its models under names of its own
        return ""
    return "score." + name.removeprefix("head.") if name.startswith("head.") else name.removeprefix("decoder.")


def _in_model_folder(name: str, x: Tensor, snapshot: Snapshot) -> bool:
    """Whether the model's folder holds the same bits, so that they need not be written twice."""
    decoder = snapshot.model.decoder if isinstance(snapshot.model, Scorer) else snapshot.model
    twin = None if isinstance(decoder, Foreign) else snapshot.weights.get(_model_key(name))
    if twin is None or twin.dtype != x.dtype or twin.shape != x.shape:
        return False
    return x is twin or torch.equal(_bits(x), _bits(twin))


def _bits(x: Tensor) -> Tensor:
    """The bytes of a tensor. As numbers -0.0 equals 0.0, and NaN does not equal itself."""
    return x.cpu().contiguous().view(-1).view(torch.uint8)


# --- resuming ---


def saved_weights(folder: Path, wanted: Iterable[str]) -> dict[str, Tensor]:
    """The trained weights of a checkpoint by name: those in a file of their own, and those `wanted` from its model."""
    weights = load_tensors(folder / names.WEIGHTS)
    if missing := [name for name in wanted if name not in weights]:
        model = tensor_index(folder)
        weights |= {name: model[key].read() for name in missing if (key := _model_key(name)) in model}
    return weights


def restore(
    folder: Path,
    policy: Policy | Scorer,
    learner: Learner,
    *,
    parts: Mapping[str, Resumable],
    changed: bool = False,
) -> list[str]:
    """Put everything back as `write_state` found it.

    changed: the settings changed. A part that cannot go on with them begins anew; returns a line for each.
    """
    state = read_state(folder)
    restore_learned(folder, policy, learner)
    learner.updates, learner.version = state["updates"], state["version"]
    learner.control = state["control"]
    saved: Mapping[str, Any] = state["parts"]
    if parts.keys() != saved.keys() and (not changed or ("roller" in parts) != ("roller" in saved)):
        raise _of_another_run(folder)
    notes = list[str]()
    for name, part in parts.items() if not changed else ((n, p) for n, p in parts.items() if n in saved):
        try:
            _load(part, saved[name])
        except HoneError as error:
            if not changed:
                raise HoneError(f"{error}; --allow-change goes on, and begins the {name} anew") from error
            notes.append(f"the {name} begins anew ({error})")
    return notes


def _load(part: Resumable, saved: Any) -> None:
    """Give the part its saved state. HoneError if the state does not have the form that the part saves."""
    try:
        part.load(saved)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise HoneError(f"cannot resume: its state is damaged ({reason}): resume from another checkpoint") from error


NEEDED: dict[str, Any] = {"updates": int, "version": int, "control": dict[str, float], "parts": dict[str, Any]}


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's counters and cursors; HoneError where they are damaged, or written by another version of Hone."""
    state = files.read_json(folder / names.STATE)
    of = state.get("format", FORMAT) if isinstance(state, dict) and state.keys() >= NEEDED.keys() else "unknown"
    if of != FORMAT:
        raise HoneError(
            f"{folder} has the format {shown_value(of).strip(chr(39))} and this version of Hone goes on from format "
            f"{FORMAT}: resume with the one that config.json names, or start a new run with model.path={folder}"
        )
    try:
        fields = {**state, **{name: fit(state[name], hint) for name, hint in NEEDED.items()}}
        fields["dtype"] = fit(state.get("dtype", "auto"), Literal["auto", "bfloat16", "float32"])
    except Misfit as misfit:
        raise HoneError(f"{folder / names.STATE} is damaged (expected {misfit}): use an earlier checkpoint") from None
    if min(fields["updates"], fields["version"]) < 0:
        raise HoneError(f"{folder / names.STATE} is damaged (a count is negative): use an earlier checkpoint")
    return fields


def restore_learned(folder: Path, policy: Policy | Scorer, learner: Learner) -> None:
    """Restore weights and moments."""
    restore_weights(folder, policy, learner)
    moments = load_tensors(folder / names.MOMENTS)
    if learner.shards is not None:
        moments = learner.shards.own_moments(learner.optimizer, moments)
    load_optimizer(learner.optimizer, moments)


def restore_weights(folder: Path, policy: Policy | Scorer, learner: Learner) -> None:
    """Restore the trained weights, and the reference where it has moved: all that a loss depends on."""
    files.verify(folder)
    parameters = learner.trained()
    _load_weights(parameters, saved_weights(folder, parameters), folder, shards=learner.shards)
    if learner.masters is not None:
        learner.masters.publish()
    if (folder / names.REFERENCE).is_file() and isinstance(policy, Policy):
        twin = learner.frozen_copy()
        tensors = load_tensors(folder / names.REFERENCE)
        if learner.shards is None:
            twin.decoder.load_state_dict(tensors)
        else:
            learner.shards.load(dict(twin.decoder.named_parameters()), tensors)
        learner.reference = policy.reference = twin


def _of_another_run(folder: Path, why: str = "") -> HoneError:
    return HoneError(f"{folder} was saved from another model{why}: resume with the settings the run was started with")


@torch.no_grad()
def _load_weights(
    parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor], folder: Path, *, shards: "Shards | None"
) -> None:
    if parameters.keys() != tensors.keys():
        raise _of_another_run(folder)
    for name, p in parameters.items():
        if p.shape != tensors[name].shape:
            raise _of_another_run(folder, f" ({name} has shape {tuple(tensors[name].shape)}, not {tuple(p.shape)})")
    if shards is not None:
        return shards.load(parameters, tensors)
    for name, p in parameters.items():
        p.copy_(tensors[name])
