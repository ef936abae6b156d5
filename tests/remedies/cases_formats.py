"""GGUF files and models of llama2.c that are refused; the remedy is the file as it should be."""

import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from cases_models import small
from remedy_world import Case, World, call, given, lacks

from hone.data.text.tokenizer import train_bpe
from hone.model.formats.gguf import INNER, OUTER, load_gguf
from hone.model.formats.llama2c import load_llama2c


def gguf_file(world: World, change: Mapping[str, Any], tensors: Mapping[str, Any] | None = None, cut: int = 0) -> Path:
    """A small model in GGUF; a change of None leaves the key out."""
    path, model, arch = Path(world.new(".gguf")), small(), change.get("general.architecture", "llama")
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (
        {**_shape(), **_words()} | {key: x for key, x in change.items() if "general" not in key}
    ).items():
        _put(writer, key.replace("ARCH", arch), value)
    names = {f"{ours}.weight": f"{theirs}.weight" for theirs, ours in OUTER.items()}
    names |= {f"model.layers.0.{ours}.weight": f"blk.0.{theirs}.weight" for theirs, ours in INNER.items()}
    found = {names[key]: x.numpy() for key, x in model.state_dict().items()} | dict(tensors or {})
    for key, x in found.items():
        if x is not None:
            writer.add_tensor(key, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes()[: -cut or None])
    return path


def _gguf(world: World, change: Mapping[str, Any], **more: Any) -> None:
    load_gguf(gguf_file(world, change, **more))


def _put(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if value is not None:
        kinds.get(type(value), writer.add_array)(key, value)


def _shape() -> dict[str, Any]:
    found = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 48}
    found |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    return {f"ARCH.{key}": value for key, value in found.items()}


@lru_cache(maxsize=1)
def _words() -> dict[str, Any]:
    vocab = train_bpe([], vocab_size=258).inner.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [3 if token in ("<pad>", "<eos>") else 1 for token in tokens]
    found = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "eos_token_id": tokens.index("<eos>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def with_pieces() -> dict[str, Any]:
    """A vocabulary of scored pieces in the place of that of bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(252)), "\u2581", "a", "b"]
    found = {"model": "llama", "tokens": tokens, "scores": [0.0] * 255 + [-1.0, -2.0, -3.0], "pre": None}
    found |= {"token_type": [2, 3, 3, *[6] * 252, 1, 1, 1], "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def shape(key: str, value: Any, says: str) -> Case:
    """A size or a setting of the model; the remedy is another file, which has it right."""
    return given(_gguf, {f"ARCH.{key}": value}, {}, says)


def words(key: str, value: Any, says: str) -> Case:
    return given(_gguf, {f"tokenizer.ggml.{key}": value}, {}, says)


def tensor(key: str, value: Any, says: str) -> Case:
    return given(lambda w, change: _gguf(w, {}, tensors=change), {key: value}, {}, says)


GGUF = [
    shape("expert_count", 8, "is a mixture of experts"),
    shape("attention.value_length", 8, "values of another size than keys"),
    shape("attention.head_count_kv", [2, 4], "layers of unequal attention.head_count_kv"),
    shape("block_count", 2, "its metadata say 2: download it again"),
    shape("attention.head_count", 3, "query rows"),
    shape("embedding_length", "wide", "not a number): download it again"),
    shape("rope.dimension_count", 8, "use another model"),
    shape("rope.scaling.type", "longrope", "use another model"),
    given(
        _gguf,
        {
            "ARCH.rope.scaling.type": "yarn",
            "ARCH.rope.scaling.factor": 2.0,
            "ARCH.rope.scaling.yarn_log_multiplier": 0.1,
        },
        {},
        "yarn_log_multiplier",
    ),
    given(_gguf, {"general.architecture": "gemma2"}, {}, "use one of these"),
    given(_gguf, {"general.architecture": "qwen2", "ARCH.attention.sliding_window": 8}, {}, "Hugging Face folder"),
    given(lambda w, n: _gguf(w, {}, cut=n), 5000, 0, "is damaged or no GGUF file"),
    tensor("token_embd.weight", None, "has no tensor token_embd.weight"),
    tensor("output_norm.weight", np.full(32, np.nan, np.float32), "not finite): download it again"),
    tensor("output_norm.weight", np.ones(32, np.int32), "use another quantisation"),
    tensor("blk.0.attn_k.weight", np.ones((31, 32), np.float32), "not a multiple of"),
    tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32), "which the decoder does not compute: use another model"),
    tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32), "scales its rotary frequencies"),
    words("model", "bert", "known are gpt2 and llama"),
    words("pre", "viking", "use the model's folder"),
    words("pre", None, "use a newer GGUF file"),
    words("tokens", None, "use a GGUF file with its tokenizer"),
    words("tokens", [1, 2], "are not what they should be"),
    words("token_type", None, "which tokens are special"),
    words("token_type", [1, 1], "2 types): download it again"),
    words("eos_token_id", None, "names no eos token"),
    words("eos_token_id", 4000, "there are 258 tokens): download it again"),
    words("merges", ["zz yy"], "its merges"),
    words("tokens", ["a"] * 258, "a token stands twice in it"),
    given(
        _gguf, {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False}, {}, "puts no space before"
    ),
    given(_gguf, {"tokenizer.ggml.model": "llama"}, {}, "download it again"),
    given(_gguf, {"tokenizer.ggml.token_type": [5, 5, *[1] * 256]}, {}, "is unused, but named as special"),
    lacks("gguf", lambda w: _gguf(w, {}), 'pip install "hone[gguf]"'),
]


def llama2c_files(
    world: World, head: Mapping[int, int] | None = None, *, cut: int = 0, pieces: Any = None
) -> tuple[str, str]:
    """A model of llama2.c and its vocabulary."""
    sizes = [8, 16, 1, 2, 2, 5, 4]
    found = [(head or {}).get(i, size) for i, size in enumerate(sizes)]
    count = 5 * 8 + 8 + 4 * 64 + 8 + 3 * 128 + 8 + 2 * 4 * 2
    data = struct.pack("<7i", *found) + b"\0" * 4 * count
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", "a", "b"] if pieces is None else pieces
    vocabulary = b"\0" * 4 + b"".join(struct.pack("<fi", 0.0, len(text)) + text.encode() for text in texts)
    return world.file(data[: len(data) - cut], ".bin"), world.file(vocabulary, ".bin")


def _llama2c(world: World, head: Mapping[int, int] | None = None, **more: Any) -> None:
    load_llama2c(*llama2c_files(world, head, **more))


LLAMA2C = [
    given(lambda w, n: _llama2c(w, cut=n), 2900, 0, "give the path of one"),
    given(_llama2c, {0: -1}, {}, "its header has sizes below 1"),
    given(_llama2c, {3: 3}, {}, "its header says"),
    given(lambda w, n: _llama2c(w, cut=n), 40, 0, "ends before its last tensor: copy it again"),
    given(lambda w, texts: _llama2c(w, pieces=texts), ["a"], None, "is no llama2.c one of 5 pieces"),
    given(lambda w, texts: _llama2c(w, pieces=texts), ["a"] * 5, None, "different pieces of 5"),
    given(lambda w, texts: _llama2c(w, pieces=texts), [*"abcde"], None, "has no piece <unk>"),
    call(lambda w: load_llama2c(w / "none.bin", w / "none.bin"), _llama2c, "check the path"),
]

FORMATS: list[Case] = [*GGUF, *LLAMA2C]
