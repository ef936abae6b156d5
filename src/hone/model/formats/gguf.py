"""GGUF files: metadata to a decoder's config, quantised tensors to float32 under Hugging Face's names.

A model that the decoder does not compute is refused. Tensors are checked for shape and for infinite values.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.data.text.tokenizer import Tokenizer, check_fits
from hone.errors import HoneError
from hone.model.config import DecoderConfig, Rope, yarn_attention
from hone.model.decoder import Decoder
from hone.model.formats.folder import assemble
from hone.model.formats.gguf_tokenizer import build_tokenizer
from hone.model.formats.hf_config import CONFIG, config_from_hf
from hone.model.formats.save import save_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCIES = "rope_freqs.weight"  # a divisor of each rotary frequency: this is how a file stores the llama3 scaling


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """A file's metadata and its tensors, whose values are read on demand."""

    path: Path
    meta: Mapping[str, Any]
    tensors: Mapping[str, Any]  # gguf.ReaderTensor by name

    @property
    def architecture(self) -> str:
        return str(self.meta.get("general.architecture"))

    def get(self, key: str) -> Any:
        """The value of a key of the architecture, None if it is absent; a list of equal values gives that value."""
        value = self.meta.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise HoneError(
                    f"{self.path} has layers of unequal {key}, which the decoder has not: use another model"
                )
            return value[0]
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """As `get`, for a key that must be a number."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HoneError(f"{self.path} is damaged ({key} is {value!r}, not a number): download it again")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-5, not 9.99999975e-6

    def values(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as float32, in the order of torch."""
        import gguf

        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            kind = tensor.tensor_type.name
            raise HoneError(f"{self.path}: {name} is {kind}, which cannot be read: use another quantisation") from error
        values = np.require(values, np.float32, ["C", "W"])  # unquantised tensors are a view of the file
        if not np.isfinite(values).all():
            raise HoneError(f"{self.path} is damaged ({name} has values that are not finite): download it again")
        return values


def read_gguf(path: str | Path) -> Gguf:
    """The file's metadata and the places of its tensors."""
    path = Path(path)
    file = _open(path)
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise HoneError(
            f"{path} is of architecture {file.architecture}, the decoder computes {known}: use one of these"
        )
    if file.number("expert_count"):
        raise HoneError(f"{path} is a mixture of experts, which the decoder does not compute: use another model")
    return file


def check_package() -> None:
    """Raise HoneError if the package gguf is not installed. Callers ask before they download 98 MB."""
    if find_spec("gguf") is None:
        raise HoneError('GGUF files need the package gguf: pip install "hone[gguf]"')


def _open(path: Path) -> Gguf:
    check_package()
    from gguf import GGUFReader, GGUFValueType

    class CheckedReader(GGUFReader):
        """The package's reader reads beyond the end of the file as empty, and may loop there forever."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too early")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY and self._get(orig_offs + 4, np.uint64)[0] > len(self.data):
                raise ValueError("it ends too early")  # each item takes at least a byte
            return super()._get_field_parts(orig_offs, raw_type)

    if not path.is_file():
        raise HoneError(f"no GGUF file {path}: check the path")
    try:
        reader = CheckedReader(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
        return Gguf(path=path, meta=meta, tensors={t.name: t for t in reader.tensors})
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise HoneError(f"{path} is damaged or no GGUF file ({reason}): download it again") from error


# --- the shape ---


def config_of(file: Gguf) -> DecoderConfig:
    """The decoder's config, by way of the config.json of the same model."""
    try:
        return config_from_hf(_hf_config(file))
    except HoneError as error:
        raise _with_path(file.path, error) from error


def _with_path(path: Path, error: HoneError) -> HoneError:
    """The error with the file's path, and with `its metadata` where it says config.json."""
    text = str(error).replace(CONFIG, "its metadata")
    return HoneError(text if str(path) in text else f"{path}: {text}")


def _hf_config(file: Gguf) -> dict[str, Any]:
    window = file.number("attention.sliding_window")
    if window and file.architecture != "llama":
        raise HoneError(f"{file.path} has a window but not for which layers: use the model's Hugging Face folder")
    found = {ours: value for theirs, ours in SIZES.items() if (value := file.number(theirs)) is not None}
    size = _head_size(file, found)
    return (
        {"num_key_value_heads": None}
        | found
        | {
            "model_type": "mistral" if window else file.architecture,
            "sliding_window": window or None,
            "head_dim": size,
            "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
            "rope_parameters": _rope(file, size),
            "partial_rotary_factor": file.number("rope.dimension_count", size) / size,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": file.architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        }
    )


def _head_size(file: Gguf, found: Mapping[str, Any]) -> int:
    """The head size. The metadata must agree with the tensors, before a decoder of that size is made."""
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in file.tensors:
            raise HoneError(f"{file.path} has no tensor {name}: download it again")
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(layers) != found.get("num_hidden_layers", len(layers)):
        said = found["num_hidden_layers"]
        raise HoneError(f"{file.path} has {len(layers)} layers, its metadata say {said}: download it again")
    rows, heads = int(file.tensors["blk.0.attn_q.weight"].shape[-1]), found.get("num_attention_heads", 1)
    size = found.get("head_dim", rows // max(heads, 1))
    if size < 1 or size * heads != rows:
        raise HoneError(
            f"{file.path} has {rows} query rows, its metadata say {heads} heads of {size}: download it again"
        )
    if file.number("attention.value_length", size) != size:
        raise HoneError(f"{file.path} has values of another size than keys, which the decoder has not: use another")
    return size


def _rope(file: Gguf, head_dim: int) -> dict[str, Any]:
    found = {"rope_type": "default", "rope_theta": file.number("rope.freq_base", 10_000.0)}
    # llama.cpp takes a factor without a type for linear, and still reads the key of older files
    kind = file.get("rope.scaling.type") or "linear"
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear")) or 1.0
    if FREQUENCIES in file.tensors:
        return found | _llama3(file, found["rope_theta"], head_dim)
    if kind == "none" or (kind == "linear" and factor == 1):
        return found
    found |= {"rope_type": str(kind), "factor": factor}
    if kind == "yarn":
        if file.number("rope.scaling.yarn_log_multiplier"):
            raise HoneError(
                f"{file.path} scales attention by a yarn_log_multiplier, which the decoder does not: use another model"
            )
        keys = {"original_context_length": "original_max_position_embeddings"}
        keys |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        found |= {hf: x for key, hf in keys.items() if (x := file.number(f"rope.scaling.{key}")) is not None}
        found["attention_factor"] = file.number("rope.scaling.attn_factor", 1.0) * yarn_attention(factor)
    return found


def _llama3(file: Gguf, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 scaling that gives the file's frequencies. Original contexts are tried until one fits."""
    divisors = torch.from_numpy(file.values(FREQUENCIES)).double()
    factor = round(float(divisors.max()), 4) if len(divisors) else 0.0
    for original in (8192, *(2**n for n in range(4, 21))):
        rope = Rope(kind="llama3", theta=theta, factor=factor, original=original)
        plain = Rope(theta=theta).frequencies(head_dim)
        if divisors.shape == plain.shape and torch.allclose(plain / rope.frequencies(head_dim), divisors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": rope.low_freq,
                "high_freq_factor": rope.high_freq,
                "original_max_position_embeddings": original,
            }
    raise HoneError(f"{file.path} scales its rotary frequencies in a way the decoder does not: use another model")


# --- the weights ---


def weights_of(file: Gguf, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its name in a Hugging Face folder, one at a time."""
    for name in file.tensors:
        if name == FREQUENCIES:
            continue
        values = file.values(name)
        if file.architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            values = halves(values, heads, name=f"{file.path}: {name}")
        yield _hf_name(file, name), torch.from_numpy(values)


def halves(values: np.ndarray[Any, Any], heads: int, *, name: str = "") -> np.ndarray[Any, Any]:
    """Reorder each head's rows: pairs that rotate together, (0, 1), (2, 3), ..., become (0, E/2), (1, E/2 + 1), ..."""
    if len(values) % (2 * heads):
        raise HoneError(f"{name} has {len(values)} rows, not a multiple of {heads} heads: download the file again")
    paired = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(values.shape))


def _hf_name(file: Gguf, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in INNER:
        return f"model.layers.{block[1]}.{INNER[block[2]]}.{kind}"
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    raise HoneError(f"{file.path} has a tensor {name}, which the decoder does not compute: use another model")


# --- the whole ---


def load_gguf(path: str | Path) -> tuple[Decoder, Tokenizer]:
    """The decoder in float32 and the tokenizer of a GGUF file."""
    file = read_gguf(path)
    config = config_of(file)
    try:
        tokenizer = build_tokenizer(file.meta, file.path)
        check_fits(tokenizer, config.vocab_size)
        return assemble(config, dict(weights_of(file, config))), tokenizer
    except HoneError as error:
        raise _with_path(file.path, error) from error


def convert_gguf(path: str | Path, folder: str | Path) -> None:
    """Write the file's model as a folder that Hone and Hugging Face's Auto classes load."""
    decoder, tokenizer = load_gguf(path)
    save_model(decoder, tokenizer, folder)
