"""Files of models, adapters and converted formats that are refused; the remedy is the file as it should be."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cases_calls import adapter, damaged
from remedy_world import Case, World, call, given, lacks, typed
from safetensors.torch import load_file, save_file

from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.peft import load_peft, save_peft
from hone.model.formats.save import save_decoder
from hone.model.lora import add_lora

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
    folder = Path(_folder(world, small(tie_word_embeddings=False)))
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


def small(hidden: int = 32, **more: Any) -> Decoder:
    with torch.random.fork_rng():
        return Decoder(DecoderConfig(**{"vocab_size": 258, **SIZES, "hidden_size": hidden, **more}))


@lru_cache(maxsize=4)
def _adapter_folder(world: World, hidden: int = 32) -> str:
    folder, model = Path(world.new()), small(hidden)
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
        load_peft(small(), folder)

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
    given(lambda w, name: load_decoder(w / name), "scorer", "model", "a reward model's: use a language model"),
    given(_tied, True, False, "set tie_word_embeddings to false"),
    damaged("config.json", lambda c: {**c, "num_hidden_layers": 99}, "but the weights have"),
    damaged("config.json", lambda c: {**c, "hidden_size": "wide"}, "correct it"),
    damaged("config.json", lambda c: {**c, "rope_parameters": 3}, "not an object: copy it again"),
    given(lambda w, x: _spoilt(w, *x), ("model.safetensors", b"x"), ("", None), "copy it again"),
    given(lambda w, x: _spoilt(w, *x), ("model.safetensors", None), ("", None), "convert the weights to safetensors"),
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
        "or give a model's or adapter's folder",
    ),
]


def foreign_folder(world: World, config: Mapping[str, Any] | None = None, change: Change = _same) -> Path:
    """A model with an activation that only transformers computes."""
    folder = world.folder_of("model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "relu", **(config or {})}))
    _changed(folder / "model.safetensors", change)
    return folder


def _foreign(world: World, config: Mapping[str, Any], change: Change = _same) -> None:
    load_decoder(foreign_folder(world, config, change))


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
    given(lambda w, n: load_peft(small(n), _adapter_folder(w)), 16, 32, "load it on the model it was trained on"),
    given(
        lambda w, content: (
            Path(_copied(w), "adapter_model.safetensors").write_bytes(content(w)) and load_peft(small(), _copied(w))
        ),
        lambda w: b"x",
        lambda w: Path(_adapter_folder(w), "adapter_model.safetensors").read_bytes(),
        "copy it again",
    ),
    given(
        lambda w, tied: add_lora(small(tie_word_embeddings=tied), rank=1, alpha=1, targets=("lm_head",)),
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
        lambda w: typed(w, "inspect", _adapter_folder(w), "--base", _folder(w, small(16))),
        lambda w: typed(w, "inspect", _adapter_folder(w), "--base", _folder(w, small())),
        "give the model it was trained on as --base",
    ),
    call(
        lambda w: _inspected(w, _folder(w, small(16))),
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


MODELS: list[Case] = [*FOLDERS, *FOREIGN, *ADAPTERS]
