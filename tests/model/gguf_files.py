"""Small GGUF files, written with the format's own package from a Hugging Face model with random weights."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from theirs import random_model

from hone.data.text.tokenizer import Tokenizer, train_bpe

TEXT = [
    "the cat sat on the mat, and then the other cat sat there too; 12 cats, 345 mats",
    "a quick brown fox jumps over that lazy dog, while nobody else was looking at any of them",
] * 3
SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>")
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
}  # fmt: skip
ARCHES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def model_of(family: str, **settings: Any) -> Any:
    return random_model(family, **{**SHAPE, **settings})


def byte_level() -> tuple[Tokenizer, dict[str, Any]]:
    """A trained tokenizer and its metadata, with two rows of the embedding unused."""
    tokenizer = train_bpe(TEXT, vocab_size=318, specials=SPECIALS)
    inner = json.loads(tokenizer.inner.to_str())
    tokens = sorted(vocab := tokenizer.inner.get_vocab(), key=lambda t: vocab[t])
    types = [3 if t in ("<pad>", "<eos>", *SPECIALS[:2]) else 4 if t == "<think>" else 1 for t in tokens]
    return tokenizer, {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*tokens, "[PAD318]", "[PAD319]"],
        "token_type": [*types, 5, 5],
        "merges": [" ".join(pair) for pair in inner["model"]["merges"]],
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        "padding_token_id": tokens.index("<pad>"),
        "eot_token_id": tokens.index("<eos>"),
        "add_bos_token": False,
    }


def shape_of(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if getattr(config, "head_dim", None):
        found["attention.key_length"] = found["attention.value_length"] = config.head_dim
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def pairs(x: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As the converter of the format does for llama: halves of each head to neighbours."""
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def tensors_of(model: Any, arch: str) -> dict[str, np.ndarray[Any, Any]]:
    names, config = gguf.get_tensor_name_map(ARCHES[arch], model.config.num_hidden_layers), model.config
    found = {}
    for key, p in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        x = p.detach().numpy()
        if arch == "llama" and ("q_proj" in key or "k_proj" in key):
            x = pairs(x, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads)
        found[names.get_name(key, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(x)
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        found["rope_freqs.weight"] = llama3_divisors(rope, config.hidden_size // config.num_attention_heads)
    return found


def llama3_divisors(rope: dict[str, Any], size: int) -> np.ndarray[Any, Any]:
    """Long waves are divided by the factor, short ones kept, those between in proportion."""
    low, high, found = rope["low_freq_factor"], rope["high_freq_factor"], []
    for i in range(0, size, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (i / size)
        turns = rope["original_max_position_embeddings"] / wave
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def write(
    path: Path, *, arch: str, shape: dict[str, Any], tensors: dict[str, Any], words: dict[str, Any],
    kind: Kind = Kind.F32, template: str | None = None, named: str = "small",
) -> Path:  # fmt: skip
    """Any of the parts may be spoilt by the caller; matrices are quantised to `kind`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(named)
    for prefix, values in ((arch, shape), ("tokenizer.ggml", words)):
        for key, value in values.items():
            _put(writer, f"{prefix}.{key}", value)
    if template is not None:
        writer.add_chat_template(template)
    for name, x in tensors.items():
        fits = x.ndim > 1 and kind != Kind.F32 and x.dtype == np.float32
        if fits:
            writer.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _put(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def written(path: Path, arch: str, model: Any, **changes: Any) -> Path:
    """The whole model in a file."""
    parts = {"shape": shape_of(model.config), "tensors": tensors_of(model, arch), "words": byte_level()[1]}
    return write(path, arch=arch, **{**parts, **changes})
