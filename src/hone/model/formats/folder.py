"""Reads a model folder in Hugging Face's format: config.json and safetensors. An error names each mismatch."""

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
from hone.model.formats.cache import missing_folder
from hone.model.formats.foreign import Foreign, ForeignScorer, label_count_error, load_with
from hone.model.formats.hf_config import CONFIG, Unsupported, config_from_hf
from hone.model.formats.save import EMBEDDING, HEAD, SCORE
from hone.model.formats.weight_files import read_file, read_weights
from hone.model.scorer import ScalarHead, Scorer


def load_decoder(folder: str | Path, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Decoder:
    """The decoder of a folder, on the CPU; a model that it does not compute runs through transformers."""
    try:
        config = config_from_hf(_read_hf(Path(folder)))
    except Unsupported:
        return Foreign(load_with("AutoModelForCausalLM", folder, dtype=dtype, trust_remote_code=trust_remote_code))
    return assemble(config, read_weights(Path(folder), dtype))


def load_scorer(folder: str | Path) -> Scorer:
    """The scorer of a folder. A sequence classifier of Hugging Face is a reward model without calibration."""
    hf = _read_hf(Path(folder))
    foreign = (Path(folder) / SCORE).is_file()
    if not foreign and _classifies(hf):
        scorer = ForeignScorer(load_with("AutoModelForSequenceClassification", folder, dtype=torch.float32))
        scorer.normalise(*_calibration(hf.get("hone", {})))
        return scorer
    tensors = read_file(Path(folder) / SCORE, torch.float32) if foreign else read_weights(Path(folder), torch.float32)
    if "score.weight" not in tensors:
        raise HoneError(f"{folder} has no score.weight: it is a language model, train a reward model from it first")
    state = {name: tensors.pop(f"score.{name}") for name in ("weight", "bias") if f"score.{name}" in tensors}
    if foreign:
        decoder = load_decoder(folder)
    else:
        config = config_from_hf(hf)
        tensors.pop(HEAD, None)
        decoder = assemble(replace(config, tie_word_embeddings=True), tensors)
    return _scorer(decoder, state, hf.get("hone", {}))


def _classifies(hf: Mapping[str, Any]) -> bool:
    """Whether it is a sequence classifier that the decoder does not compute."""
    try:
        config_from_hf(hf)
    except Unsupported:
        names = hf.get("architectures")
        return isinstance(names, list) and any("SequenceClassification" in str(name) for name in names)
    return False


def _scorer(decoder: Decoder, state: dict[str, Tensor], made: Any) -> Scorer:
    """The decoder with its head, and the calibration that was saved with them."""
    with torch.device("meta"):
        head = ScalarHead(decoder.config.hidden_size, bias="bias" in state)
    if state["weight"].ndim == 2 and len(state["weight"]) > 1:
        raise label_count_error(len(state["weight"]))
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


def _read_hf(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise missing_folder(folder)
    return read_object(folder / CONFIG, remedy="copy the model folder again")


class _NoInit(TorchFunctionMode):
    """Skips the initialisation of modules: even on the meta device, drawing values imports torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _check_shapes(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    if missing := sorted(expected.keys() - tensors.keys()):
        raise HoneError(f"the weights lack {_few_names(missing)}: copy them again, or correct {CONFIG}")
    if unexpected := sorted(tensors.keys() - expected.keys()):
        if "score.weight" in unexpected:
            raise HoneError("the weights have unknown tensors score.weight, a reward model's: use a language model")
        raise HoneError(
            f"the weights have unknown tensors {_few_names(unexpected)}, {CONFIG} is of another model: copy both again"
        )
    for name, shape in expected.items():
        got = tuple(tensors[name].shape)
        if got == shape:
            continue
        if name in (EMBEDDING, HEAD) and got[1:] == shape[1:]:
            raise HoneError(f"vocab_size is {shape[0]} but {name} has {got[0]} rows: correct {CONFIG}")
        raise HoneError(f"{name} has shape {got}, {CONFIG} asks for {shape}: correct {CONFIG} or the weights")


def _few_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def assemble(config: DecoderConfig, tensors: dict[str, Tensor]) -> Decoder:
    """A decoder of these tensors, without a copy. It is made on the meta device, so no weights are drawn first."""
    if (layers := config.num_hidden_layers) > len(tensors):
        raise HoneError(f"num_hidden_layers is {layers} but the weights have {len(tensors)} tensors: correct {CONFIG}")
    try:
        with torch.device("meta"), _NoInit():
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
