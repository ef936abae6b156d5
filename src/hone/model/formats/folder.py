"""A model folder in Hugging Face's format: config.json and safetensors, read with every mismatch named.

Writing is plain: files go straight into the folder, and what the disk refuses is raised as OSError.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hone.data.text.json_object import read_object
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import TABLE, Decoder
from hone.model.formats.fetch import absent
from hone.model.formats.foreign import Foreign, load_foreign
from hone.model.formats.foreign_scorer import load_foreign_scorer, several_labels
from hone.model.formats.hf_config import CONFIG, FAMILIES, Unknown, config_from_hf, config_to_hf
from hone.model.formats.weight_files import read_file, read_weights, write_file, write_weights
from hone.model.lora import plain_state
from hone.model.scorer import ScalarHead, Scorer

SCORE = "score.safetensors"  # the head beside a model of transformers
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights_of(model: Decoder | Scorer) -> dict[str, Tensor]:
    """What a folder holds of the model, by name: adapters that are on are merged, a scorer's head is score.*."""
    if not isinstance(model, Scorer):
        return plain_state(model)
    return plain_state(model.decoder) | {f"score.{name}": x.detach() for name, x in model.head.state_dict().items()}


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors, adapters merged; extra: more keys, such as eos_token_id.

    weights: a copy of `weights_of`, for a model that is trained on meanwhile.
    """
    state = dict(weights_of(decoder) if weights is None else weights)
    if isinstance(decoder, Foreign):
        return decoder.save(Path(folder), state)
    if decoder.config.tie_word_embeddings:
        del state[HEAD]
    config = config_to_hf(decoder.config, dtype=state[EMBEDDING].dtype)
    _write(Path(folder), config | dict(extra or {}), state)


def load_decoder(folder: str | Path, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Decoder:
    """The decoder of a folder, on the CPU; what it does not compute runs through transformers."""
    try:
        config = config_from_hf(_read_hf(Path(folder)))
    except Unknown:
        return load_foreign(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    return assemble(config, read_weights(Path(folder), dtype))


def save_scorer(
    scorer: Scorer,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """As save_decoder, with the head as score.* and no vocabulary head: tied, so that none is made at loading."""
    state = dict(weights_of(scorer) if weights is None else weights)
    head = {name: state.pop(name) for name in list(state) if name.startswith("score.")}
    separator = {"separator": scorer.separator} if scorer.separator else {}
    made = {"hone": {"kind": scorer.kind, "mean": scorer.mean, "std": scorer.std, **separator}}
    if isinstance(scorer.decoder, Foreign):  # the whole language model, and the head in a file of its own
        scorer.decoder.save(Path(folder), state)
        (Path(folder) / CONFIG).write_text(json.dumps(_read_hf(Path(folder)) | made, indent=2) + "\n")
        return write_file(Path(folder) / SCORE, head)
    del state[HEAD]
    config = config_to_hf(replace(scorer.decoder.config, tie_word_embeddings=True), dtype=state[EMBEDDING].dtype)
    config |= {
        "architectures": [f"{FAMILIES[scorer.decoder.config.family].architecture}ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        **made,
    }
    _write(Path(folder), config | dict(extra or {}), state | head)


def load_scorer(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Scorer:
    """The scorer of a folder; one of Hugging Face's, without calibration, is a reward model."""
    hf = _read_hf(Path(folder))
    foreign = (Path(folder) / SCORE).is_file()
    if not foreign and _classifies(hf):
        scorer = load_foreign_scorer(folder, dtype=dtype)
        scorer.normalise(*_calibration(hf.get("hone", {})))
        return scorer
    tensors = read_file(Path(folder) / SCORE, dtype) if foreign else read_weights(Path(folder), dtype)
    if "score.weight" not in tensors:
        raise HoneError(f"{folder} has no score.weight: it is a language model, train a reward model from it first")
    state = {name: tensors.pop(f"score.{name}") for name in ("weight", "bias") if f"score.{name}" in tensors}
    if foreign:
        decoder = load_decoder(folder, dtype=dtype)
    else:
        config = config_from_hf(hf)
        tensors.pop(HEAD, None)
        decoder = assemble(replace(config, tie_word_embeddings=True), tensors)
    return _scorer(decoder, state, hf.get("hone", {}))


def _classifies(hf: Mapping[str, Any]) -> bool:
    """Whether it is a sequence classifier of a family that the decoder does not compute."""
    try:
        config_from_hf(hf)
    except Unknown:
        names = hf.get("architectures")
        return isinstance(names, list) and any("SequenceClassification" in str(name) for name in names)
    return False


def _scorer(decoder: Decoder, state: dict[str, Tensor], made: Any) -> Scorer:
    """The decoder with its head, and the calibration that was saved with them."""
    with torch.device("meta"):
        head = ScalarHead(decoder.config.hidden_size, bias="bias" in state)
    if state["weight"].ndim == 2 and len(state["weight"]) > 1:
        raise several_labels(len(state["weight"]))
    _check_shapes({n: tuple(p.shape) for n, p in head.state_dict().items()}, state)
    head.load_state_dict(state, assign=True)
    mean, std = _calibration(made)
    scorer = Scorer(decoder, head=head, kind=made.get("kind", "reward"), mean=mean, std=std)
    scorer.separator = str(made.get("separator") or "")
    return scorer


def _calibration(made: Any) -> tuple[float, float]:
    """The mean and std that were saved with a scorer."""
    try:
        mean, std = float(made.get("mean", 0.0)), float(made.get("std", 1.0))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise HoneError(f'{CONFIG}: "hone" must hold kind, mean and std ({error}): save the scorer again') from error
    if not math.isfinite(mean) or not math.isfinite(std):
        raise HoneError(f'{CONFIG}: "hone" has mean {mean} and std {std}, not numbers: save the scorer again')
    return mean, std


def _write(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(folder, state)


def _read_hf(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise absent(folder)
    return read_object(folder / CONFIG, remedy="copy the model folder again")


class _Unfilled(TorchFunctionMode):
    """Modules made under it get no values: even on the meta device, drawing them imports torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _check_shapes(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    if missing := sorted(expected.keys() - tensors.keys()):
        raise HoneError(f"the weights lack {_some(missing)}: copy them again, or correct {CONFIG}")
    if unexpected := sorted(tensors.keys() - expected.keys()):
        if "score.weight" in unexpected:
            raise HoneError("the weights have unknown tensors score.weight, a reward model's: use a language model")
        raise HoneError(
            f"the weights have unknown tensors {_some(unexpected)}, {CONFIG} is of another model: copy both again"
        )
    for name, shape in expected.items():
        got = tuple(tensors[name].shape)
        if got == shape:
            continue
        if name in (EMBEDDING, HEAD) and got[1:] == shape[1:]:
            raise HoneError(f"vocab_size is {shape[0]} but {name} has {got[0]} rows: correct {CONFIG}")
        raise HoneError(f"{name} has shape {got}, {CONFIG} asks for {shape}: correct {CONFIG} or the weights")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def assemble(config: DecoderConfig, tensors: dict[str, Tensor]) -> Decoder:
    """A decoder that holds these very tensors; made on the meta device, so no weights are drawn first."""
    if (layers := config.num_hidden_layers) > len(tensors):
        raise HoneError(f"num_hidden_layers is {layers} but the weights have {len(tensors)} tensors: correct {CONFIG}")
    try:
        with torch.device("meta"), _Unfilled():
            decoder = Decoder(config)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise HoneError(f"{CONFIG} asks for sizes that no model has ({str(error)[:80]}): correct it") from error
    expected = {name: tuple(p.shape) for name, p in decoder.state_dict().items()}
    if config.tie_word_embeddings:
        del expected[HEAD]
        head = tensors.pop(HEAD, None)
        if head is not None and EMBEDDING in tensors and not torch.equal(head, tensors[EMBEDDING]):
            raise HoneError(f"{HEAD} differs from the embedding it is tied to: set tie_word_embeddings to false")
    _check_shapes(expected, tensors)
    decoder.load_state_dict(tensors, strict=False, assign=True)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    decoder.rotations(min(config.max_position_embeddings, TABLE))
    return decoder
