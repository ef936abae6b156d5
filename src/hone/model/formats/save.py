"""Writes a model as a folder that Hone and Hugging Face's Auto classes load: config, weights and tokenizer.

Files are written straight into the folder. An error of the disk is raised as OSError.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hone.data.text.json_object import read_object
from hone.data.text.tokenizer import Tokenizer
from hone.model.config import DecoderConfig, Rope
from hone.model.decoder import Decoder
from hone.model.formats.foreign import Foreign
from hone.model.formats.hf_config import CONFIG, FAMILIES, Family
from hone.model.formats.weight_files import INDEX, WEIGHTS
from hone.model.lora import plain_state
from hone.model.scorer import Scorer

GENERATION = "generation_config.json"
SCORE = "score.safetensors"  # the head, in a file beside a model of transformers
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARD = 5 * 10**9  # bytes at most in a weights file, unless one tensor has more


def weights_of(model: Decoder | Scorer) -> dict[str, Tensor]:
    """The tensors to write, by name: adapters that are on are merged, a scorer's head is score.*."""
    if not isinstance(model, Scorer):
        return plain_state(model)
    return plain_state(model.decoder) | {f"score.{name}": x.detach() for name, x in model.head.state_dict().items()}


def save_model(
    model: Decoder | Scorer, tokenizer: Tokenizer, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write weights, config and tokenizer, and for a language model all tokens that end its turn.

    weights: a copy of the model's, if training may change them meanwhile.
    """
    ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.bos_id}
    if isinstance(model, Scorer):
        save_scorer(model, folder, extra=ids, weights=weights)
    else:
        save_decoder(model, folder, extra=ids, weights=weights)
        stops = [tokenizer.eos_id, *sorted(tokenizer.stop_ids - {tokenizer.eos_id})]
        about = {**ids, "eos_token_id": stops if len(stops) > 1 else stops[0]}
        (Path(folder) / GENERATION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(folder)


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors, adapters merged; extra: more keys, such as eos_token_id.

    weights: a copy of `weights_of`, if training may change the model meanwhile.
    """
    state = dict(weights_of(decoder) if weights is None else weights)
    if isinstance(decoder, Foreign):
        return decoder.save(Path(folder), state)
    if decoder.config.tie_word_embeddings:
        del state[HEAD]
    config = config_to_hf(decoder.config, dtype=state[EMBEDDING].dtype)
    _write(Path(folder), config | dict(extra or {}), state)


def save_scorer(
    scorer: Scorer,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """As save_decoder, with the head as score.*. The vocabulary head counts as tied, and is not written."""
    state = dict(weights_of(scorer) if weights is None else weights)
    head = {name: state.pop(name) for name in list(state) if name.startswith("score.")}
    separator = {"separator": scorer.separator} if scorer.separator else {}
    made = {"hone": {"kind": scorer.kind, "mean": scorer.mean, "std": scorer.std, **separator}}
    if isinstance(scorer.decoder, Foreign):  # the whole language model, and the head in a file of its own
        scorer.decoder.save(Path(folder), state)
        (Path(folder) / CONFIG).write_text(json.dumps(read_object(Path(folder) / CONFIG) | made, indent=2) + "\n")
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


def _write(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(folder, state)


# --- the weights ---


def write_weights(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write one file, or several with an index if one would be too large."""
    shards = _shards(state, SHARD)
    if len(shards) == 1:
        return write_file(folder / WEIGHTS, shards[0])
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard)
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": sum(x.nbytes for x in state.values())}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(state: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """The tensors in order, cut where a file would grow beyond `size` bytes."""
    shards, held = [dict[str, Tensor]()], 0
    for name, x in state.items():
        if shards[-1] and held + x.nbytes > size:
            shards.append({})
            held = 0
        shards[-1][name] = x
        held += x.nbytes
    return shards


def write_file(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write one file, with the permissions of the config beside it."""
    try:
        save_file({n: x.contiguous() for n, x in state.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the disk's error is inside its text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error), str(path)) from error
    shutil.copymode(path.parent / CONFIG, path)  # safetensors makes files that only the owner can read


# --- the config ---


def config_to_hf(config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The family's config.json. Ids of special tokens are null, because absent keys would get defaults."""
    name = str(dtype).removeprefix("torch.")
    family = FAMILIES[config.family]
    return {
        "architectures": [f"{family.architecture}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_parameters": _rope_to_hf(config.rope),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "hidden_act": "silu",
        **({"attention_bias": config.o_bias} if family.bias_option else {}),
        **({"mlp_bias": config.mlp_bias} if family.mlp_option else {}),
        **_windows_to_hf(config, family),
        "dtype": name,
        "torch_dtype": name,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope_to_hf(rope: Rope) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "default":
        return found
    found |= {"factor": rope.factor}
    if rope.kind == "linear":
        return found
    found["original_max_position_embeddings"] = rope.original
    if rope.kind == "llama3":
        return found | {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    return found | {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
        "attention_factor": rope.attention,
    }


def _windows_to_hf(config: DecoderConfig, family: Family) -> dict[str, Any]:
    window = max(config.windows, default=0) or None
    if not family.windows:
        return {}
    if window is None:  # Mistral's class would take a window where the key is absent
        return {} if family.window_option else {"sliding_window": None}
    kinds = ["sliding_attention" if w else "full_attention" for w in config.windows]
    if not family.window_option:
        # a Mistral model with layer_types is a Ministral to Hugging Face's Auto classes
        return {"sliding_window": window} | ({"layer_types": kinds} if "full_attention" in kinds else {})
    first = next(i for i, w in enumerate(config.windows) if w)
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds, "max_window_layers": first}
