"""Files of models, adapters and converted formats that are refused; the remedy is the file as it should be."""

import json
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from cases_calls import adapter, damaged
from remedy_world import Case, World, call, given, lacks, typed
from safetensors.torch import load_file, save_file

from hone.data.tokenizer import train_bpe
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.folder import load_decoder, load_scorer, save_decoder
from hone.model.gguf import INNER, OUTER, load_gguf
from hone.model.llama2c import load_llama2c
from hone.model.lora import add_lora
from hone.model.peft import load_peft, save_peft

Change = Callable[[dict[str, Any]], dict[str, Any]]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _same(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _changed(path: Path, change: Change) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def weights(change: Change, says: str) -> Case:
    """The tensors of a model, changed and as they were."""

    def loaded(world: World, changes: Change) -> None:
        folder = world.folder_of("model")
        _changed(folder / "model.safetensors", changes)
        load_decoder(folder)

    return given(loaded, change, _same, says)


def _tied(world: World, tied: bool) -> None:
    folder = Path(_folder(world, _made(tie_word_embeddings=False)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    load_decoder(folder)


def _spoilt(world: World, name: str, content: bytes | None, load: Callable[[Path], Any] = load_decoder) -> None:
    """A file of a model's folder that is damaged, or gone."""
    folder = world.folder_of("model")
    if name and content is None:
        (folder / name).unlink()
    elif name and content is not None:
        (folder / name).write_bytes(content)
    load(folder)


def _indexed(world: World, index: Any) -> None:
    """Weights in several files, and an index of them."""
    folder = world.folder_of("model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = load_file(folder / "model-00001-of-00001.safetensors")
    good = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(good if index is None else index))
    load_decoder(folder)


def _scored(world: World, hone: Any) -> None:
    folder = world.folder_of("scorer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({} if hone is None else {"hone": hone})))
    load_scorer(folder)


def _made(hidden: int = 32, **more: Any) -> Decoder:
    with torch.random.fork_rng():
        return Decoder(DecoderConfig(**{"vocab_size": 258, **SIZES, "hidden_size": hidden, **more}))


@lru_cache(maxsize=4)
def _adapter_folder(world: World, hidden: int = 32) -> str:
    folder, model = Path(world.new()), _made(hidden)
    add_lora(model, rank=2, alpha=4, targets=("q_proj",))
    save_peft(model, folder)
    return str(folder)


def tensors(change: Change, says: str) -> Case:
    """The tensors of an adapter, changed and as they were."""

    def loaded(world: World, changes: Change) -> None:
        folder, path = Path(world.new()), "adapter_model.safetensors"
        folder.mkdir()
        for name in (path, "adapter_config.json"):
            (folder / name).write_bytes(Path(_adapter_folder(world), name).read_bytes())
        _changed(folder / path, changes)
        load_peft(_made(), folder)

    return given(loaded, change, _same, says)


def _inspected(world: World, base: str) -> None:
    typed(world, "inspect", world / "model", "--base", base)


def _folder(world: World, model: Decoder) -> str:
    folder = world.new()
    save_decoder(model, folder)
    return folder


def _halved(world: World, name: str) -> str:
    """A model whose weights are whole numbers of 8 bits."""
    folder = world.folder_of(name)
    _changed(folder / "model.safetensors", lambda found: {key: x.to(torch.int8) for key, x in found.items()})
    return str(folder)


FOLDERS = [
    weights(lambda x: x | {"extra.weight": torch.ones(1)}, "copy both again"),
    weights(lambda x: x | {"model.norm.weight": torch.ones(3)}, "or the weights"),
    weights(lambda x: x | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "use the full weights"),
    given(_tied, True, False, "set tie_word_embeddings to false"),
    damaged("config.json", lambda c: {**c, "num_hidden_layers": 99}, "but the weights have"),
    damaged("config.json", lambda c: {**c, "hidden_size": "wide"}, "correct it"),
    damaged("config.json", lambda c: {**c, "rope_parameters": 3}, "not an object: copy it again"),
    given(lambda w, x: _spoilt(w, *x), ("model.safetensors", b"x"), ("", None), "copy it again"),
    given(lambda w, x: _spoilt(w, *x), ("model.safetensors", None), ("", None), "or copy them again"),
    given(_indexed, [], None, "is no index of weights"),
    given(_indexed, {"weight_map": {"a": "../x"}}, None, "names files outside the folder"),
    given(_scored, {"mean": "x"}, None, "must hold kind, mean and std"),
    given(_scored, {"mean": float("nan")}, None, "not numbers: save the scorer again"),
    given(
        lambda w, x: _spoilt(w, *x, lambda f: typed(w, "inspect", str(f))),
        ("model.safetensors", b"x"),
        ("", None),
        "copy it again",
    ),
    given(
        lambda w, x: _spoilt(w, *x, lambda f: typed(w, "inspect", str(f))),
        ("model.safetensors", None),
        ("", None),
        "give a model folder or an adapter's",
    ),
]


def _foreign(world: World, config: Mapping[str, Any], change: Change = _same) -> None:
    """A model with an activation that only transformers computes."""
    folder = world.folder_of("model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "relu", **config}))
    _changed(folder / "model.safetensors", change)
    load_decoder(folder)


FOREIGN = [
    lacks("transformers", lambda w: _foreign(w, {}), 'pip install "hone[hf]" to run it anyway'),
    given(_foreign, {"num_hidden_layers": 99}, {}, "do not fit its config (num_hidden_layers 99"),
    given(_foreign, {"intermediate_size": 9999}, {}, "it asks for"),
    given(_foreign, {"hidden_act": "unheard"}, {}, "or use another model"),
    given(
        lambda w, change: _foreign(w, {}, change),
        lambda x: {key: value for key, value in x.items() if "q_proj" not in key},
        _same,
        "missing: ",
    ),
]
ADAPTERS = [
    adapter(lambda c: {**c, "modules_to_save": ["lm_head"]}, "merge it into its model with peft"),
    adapter(lambda c: {**c, "init_lora_weights": "pissa"}, "started from changed base weights"),
    adapter(lambda c: {**c, "use_dora": True}, "is more than a plain LoRA"),
    adapter(lambda c: {**c, "base_model_name_or_path": 3}, "it must be text"),
    adapter(lambda c: {**c, "rank_pattern": 3}, "must be an object of patterns and numbers"),
    adapter(lambda c: {**c, "lora_dropout": 3}, "it must be a number from 0 to 1"),
    adapter(lambda c: {**c, "r": 3}, "copy both files again"),
    tensors(lambda x: dict([*x.items()][:1]), "has only half of the update"),
    tensors(lambda x: {key: value.to(torch.int8) for key, value in x.items()}, "save the adapter again"),
    tensors(lambda x: {}, "adapts no layer"),
    tensors(lambda x: x | {"bias": torch.ones(2)}, "no low-rank update of a linear layer"),
    tensors(
        lambda x: {key.replace("q_proj", "x_proj"): value for key, value in x.items()}, "the model it was trained on"
    ),
    tensors(
        lambda x: x | {"base_model.model.lm_head.base_layer.weight": torch.ones(258, 32)},
        "that differs from the model's",
    ),
    given(lambda w, n: load_peft(_made(n), _adapter_folder(w)), 16, 32, "load it on the model it was trained on"),
    given(
        lambda w, content: (
            Path(_copied(w), "adapter_model.safetensors").write_bytes(content(w)) and load_peft(_made(), _copied(w))
        ),
        lambda w: b"x",
        lambda w: Path(_adapter_folder(w), "adapter_model.safetensors").read_bytes(),
        "copy it again",
    ),
    given(
        lambda w, tied: add_lora(_made(tie_word_embeddings=tied), rank=1, alpha=1, targets=("lm_head",)),
        True,
        False,
        "or untie",
    ),
    call(
        lambda w: _inspected(w, _adapter_folder(w)),
        lambda w: _inspected(w, w / "teacher"),
        "give the model it belongs to",
    ),
    call(
        lambda w: typed(w, "inspect", _adapter_folder(w), "--base", _folder(w, _made(16))),
        lambda w: typed(w, "inspect", _adapter_folder(w), "--base", _folder(w, _made())),
        "give the model it was trained on as --base",
    ),
    call(
        lambda w: _inspected(w, _folder(w, _made(16))),
        lambda w: _inspected(w, w / "teacher"),
        "give the model it was trained from as --base",
    ),
    call(
        lambda w: _inspected(w, _renamed(w)),
        lambda w: _inspected(w, w / "teacher"),
        "have no weight of one name",
    ),
    call(lambda w: _inspected(w, _halved(w, "model")), lambda w: _inspected(w, w / "model"), "before it was quantised"),
]


def _renamed(world: World) -> str:
    folder = world.folder_of("model")
    _changed(folder / "model.safetensors", lambda found: {f"x.{key}": x for key, x in found.items()})
    return str(folder)


def _copied(world: World) -> str:
    """One copy of the adapter for the cases that write into it."""
    folder = Path(world / "copied-adapter")
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(Path(_adapter_folder(world), "adapter_config.json").read_bytes())
    return str(folder)


# --- GGUF and llama2.c ---


def gguf_file(world: World, change: Mapping[str, Any], tensors: Mapping[str, Any] | None = None, cut: int = 0) -> Path:
    """A small model in GGUF; a change of None leaves the key out."""
    path, model, arch = Path(world.new(".gguf")), _made(), change.get("general.architecture", "llama")
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


def _llama2c(world: World, head: Mapping[int, int] | None = None, *, cut: int = 0, pieces: Any = None) -> None:
    """A model of llama2.c with its vocabulary, read."""
    sizes = [8, 16, 1, 2, 2, 5, 4]
    found = [(head or {}).get(i, size) for i, size in enumerate(sizes)]
    count = 5 * 8 + 8 + 4 * 64 + 8 + 3 * 128 + 8 + 2 * 4 * 2
    data = struct.pack("<7i", *found) + b"\0" * 4 * count
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", "a", "b"] if pieces is None else pieces
    vocabulary = b"\0" * 4 + b"".join(struct.pack("<fi", 0.0, len(text)) + text.encode() for text in texts)
    load_llama2c(world.file(data[: len(data) - cut], ".bin"), world.file(vocabulary, ".bin"))


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

MODELS: list[Case] = [*FOLDERS, *FOREIGN, *ADAPTERS, *GGUF, *LLAMA2C]
