"""The PEFT format of one adapter: adapter_config.json and adapter_model.safetensors, as `peft` writes and reads them.

An adapter that is not W0 + scale B A on linear layers is refused with the reason: a part of it would be another model.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hone.data.text.json_object import read_json
from hone.data.text.worker import first_matches
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.formats.weight_files import FLOATS
from hone.model.lora import (
    DEFAULT,
    Adapter,
    adapters_of,
    check_new,
    check_untied,
    linear_layers,
    lora_state,
    put_adapter,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, INNER = "base_model.model.", "inner."  # PEFT's name of the model it wraps, and ours of a foreign one
MERGE = "merge it into its model with peft (merge_and_unload) and use that"
# keys that are read here, or that do not change the model
KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "task_type", "use_rslora",
}  # fmt: skip
MOST = 1e30  # of a rank or an alpha
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # these leave the base model's weights as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter as its folder has it: A and B by layer, and their scale."""

    tensors: Mapping[str, tuple[Tensor, Tensor]]  # by layer: A [r, d_in], B [d_out, r]
    alpha: Mapping[str, float]  # by layer
    rslora: bool
    base: str  # the model it was made for, "" if it is not named
    frozen: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # base weights that PEFT saved too
    notes: tuple[str, ...] = ()

    def scale(self, layer: str) -> float:
        """alpha / r, or alpha / sqrt(r)"""
        rank = len(self.tensors[layer][0])
        return self.alpha[layer] / (math.sqrt(rank) if self.rslora else rank)


def save_peft(
    decoder: nn.Module,
    folder: str | Path,
    *,
    base: str = "",
    task: str | None = "CAUSAL_LM",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the selected adapter for `peft`; base: the model it belongs to, a folder or a Hub name.

    weights: a copy of its `lora_state`, if training may change it meanwhile.
    """
    adapters = adapters_of(decoder)
    if not adapters:
        raise HoneError("the model has no adapter to save: add_lora or load_peft first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(adapters, list(linear_layers(decoder)))
    config |= {"base_model_name_or_path": base or None, "task_type": task}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    found = lora_state(decoder) if weights is None else weights
    state = {PREFIX + key.removeprefix(INNER): x.contiguous() for key, x in found.items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes for the owner only


def _config(adapters: Mapping[str, Adapter], linear: list[str]) -> dict[str, Any]:
    """The most common rank and alpha, with patterns for the layers that differ."""
    rank, alpha = (Counter(values).most_common(1)[0][0] for values in _sizes(adapters))
    named = {layer.removeprefix(INNER): a for layer, a in adapters.items()}
    patterns = {layer: re.escape(layer) for layer in named}
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _number(alpha),
        "use_rslora": next(iter(adapters.values())).rslora,
        "target_modules": _targets(list(named), [layer.removeprefix(INNER) for layer in linear]),
        "rank_pattern": {patterns[layer]: a.rank for layer, a in named.items() if a.rank != rank},
        "alpha_pattern": {patterns[layer]: _number(a.alpha) for layer, a in named.items() if a.alpha != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _sizes(adapters: Mapping[str, Adapter]) -> tuple[list[int], list[float]]:
    return [a.rank for a in adapters.values()], [a.alpha for a in adapters.values()]


def _number(x: float) -> int | float:
    """16 rather than 16.0, as PEFT writes it."""
    return int(x) if x == int(x) else x


def _targets(adapted: list[str], linear: list[str]) -> list[str]:
    """The last parts of the layers' names if these match no other layer, else the whole names."""
    words = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in linear if name.rpartition(".")[2] in words}
    return sorted(words if meant == set(adapted) else adapted)


@torch.no_grad()
def load_peft(decoder: Decoder, folder: str | Path, *, name: str = DEFAULT, train: bool = True) -> AdapterFile:
    """Add a folder's adapter to the decoder and select it; train=False: frozen, and lora_dropout is ignored."""
    found, layers = read_peft(folder, train=train), linear_layers(decoder)
    check_new(decoder, name)
    ours = {layer.removeprefix(INNER): layer for layer in layers}
    for layer, (a, b) in found.tensors.items():
        if layer not in ours:
            raise HoneError(
                f"{folder} adapts {layer}, which the model does not have: load it on the model it was trained on"
            )
        base = layers[ours[layer]]
        if a.shape[1] != base.in_features or b.shape[0] != base.out_features:
            expected = f"{base.out_features} x {base.in_features}"
            raise HoneError(
                f"{folder} adapts {layer} of {b.shape[0]} x {a.shape[1]}, the model's is {expected}: "
                "load it on the model it was trained on"
            )
    for layer, x in found.frozen.items():
        if layer not in ours or not torch.equal(layers[ours[layer]].weight, x.to(layers[ours[layer]].weight)):
            raise HoneError(f"{folder} brings a {layer} that differs from the model's: {MERGE}")
    check_untied(decoder, [ours[layer] for layer in found.tensors])
    put_adapter(decoder, name, {ours[layer]: _adapter(found, layer, layers[ours[layer]]) for layer in found.tensors})
    if not train:
        decoder.requires_grad_(False)
    return found


def _adapter(found: AdapterFile, layer: str, base: nn.Linear) -> Adapter:
    a, b = found.tensors[layer]
    made = Adapter(base, rank=len(a), alpha=found.alpha[layer], rslora=found.rslora, generator=torch.Generator())
    made.lora_A.copy_(a)
    made.lora_B.copy_(b)
    return made


def read_peft(folder: str | Path, *, train: bool = False) -> AdapterFile:
    """The adapter of a folder. It must be a plain LoRA of linear layers, with the ranks that its config states."""
    folder = Path(folder)
    config = _read_config(folder)
    _check_plain(config, folder)
    dropout, notes = config.get("lora_dropout") or 0.0, ()
    if dropout and train:
        raise HoneError(
            f"{folder} was trained with lora_dropout {dropout}, under which the learner is not the model that samples: "
            f"to go on without, set it to 0.0 in {CONFIG}"
        )
    if dropout:
        notes = (f"lora_dropout {dropout} is for training only and was passed over",)
    pairs, frozen = _pairs(_read_tensors(folder), folder)
    layers = list(pairs)
    ranks = dict(zip(layers, _by_layer(config, "rank_pattern", layers, config["r"], folder=folder), strict=True))
    alphas = _by_layer(config, "alpha_pattern", layers, config["lora_alpha"], folder=folder)
    for layer, (a, b) in pairs.items():
        if not len(a) == b.shape[1] == ranks[layer]:
            sizes = f"rank {len(a)} and {b.shape[1]} in {WEIGHTS}, {ranks[layer]} in {CONFIG}"
            raise HoneError(f"{folder}: {layer} has {sizes}: copy both files again")
    return AdapterFile(
        tensors=pairs,
        alpha={layer: float(alpha) for layer, alpha in zip(layers, alphas, strict=True)},
        rslora=bool(config.get("use_rslora")),
        base=config.get("base_model_name_or_path") or "",
        frozen=frozen,
        notes=notes,
    )


def is_adapter(folder: str | Path) -> bool:
    """Whether the folder holds an adapter rather than a model."""
    return (Path(folder) / CONFIG).is_file()


def _read_config(folder: Path) -> dict[str, Any]:
    if not is_adapter(folder):
        raise HoneError(f"{folder} has no {CONFIG}: give the folder of a PEFT adapter")
    config = read_json(folder / CONFIG, remedy="copy it again")
    if not isinstance(config, dict) or "peft_type" not in config:
        raise HoneError(f"{folder / CONFIG} names no peft_type: copy it again")
    return config


def _check_plain(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse an adapter that is more than scale B A."""
    kind, start = config["peft_type"], config.get("init_lora_weights", True)
    if kind != "LORA":
        raise HoneError(f"{folder} is a {str(kind)[:60]} adapter, only LoRA can be loaded: {MERGE}")
    if saved := config.get("modules_to_save"):
        raise HoneError(f"{folder} brings whole layers of its own ({_list(saved)}, modules_to_save): {MERGE}")
    if config.get("bias", "none") != "none":
        raise HoneError(f'{folder} changes biases too (bias "{str(config["bias"])[:60]}"): {MERGE}')
    if start not in STARTS:
        raise HoneError(f"{folder} started from changed base weights (init_lora_weights {_shown(start)}): {MERGE}")
    if more := sorted(key for key, value in config.items() if value and key not in {*KNOWN, "modules_to_save"}):
        raise HoneError(f"{folder} is more than a plain LoRA ({', '.join(more)[:200]}): {MERGE}")
    for key in ("base_model_name_or_path", "bias"):
        if not isinstance(config.get(key), str | None):
            raise HoneError(f"{folder / CONFIG}: {key} is {_shown(config[key])}: it must be text")
    _check_numbers(config, folder / CONFIG)


def _check_numbers(config: Mapping[str, Any], path: Path) -> None:
    """Ranks are whole, all are positive, and none is NaN or infinite."""
    numbers = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise HoneError(f"{path}: {key} must be an object of patterns and numbers")
        numbers |= {f"{key} {pattern}": value for pattern, value in patterns.items()}
    for key, value in numbers.items():
        rank = key.startswith("r")
        if isinstance(value, bool) or not isinstance(value, int if rank else int | float) or not 0 < value <= MOST:
            whole = ", and whole" if rank else ""
            raise HoneError(f"{path}: {key[:60]} is {_shown(value)}: it must be a positive number{whole}")
    dropout = config.get("lora_dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise HoneError(f"{path}: lora_dropout is {_shown(dropout)}: it must be a number from 0 to 1")


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _list(names: Any) -> str:
    return ", ".join(map(str, names))[:100] if isinstance(names, list) else str(names)[:100]


def _by_layer(config: Mapping[str, Any], key: str, layers: Sequence[str], default: Any, *, folder: Path) -> list[Any]:
    """For each layer, the value of the first pattern that matches the end of its name, as in PEFT."""
    patterns: dict[str, Any] = config.get(key) or {}
    if not patterns:
        return [default] * len(layers)
    wanted = [rf"(.*\.)?({pattern})" for pattern in patterns]
    values = [*patterns.values(), default]  # -1: no pattern matches
    return [values[i] for i in first_matches(wanted, layers, where=f"{key} in {folder / CONFIG}")]


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise HoneError(f"{folder} has no {WEIGHTS}: save the adapter again with safetensors, pickles are not loaded")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise HoneError(f"{path} is damaged ({error}): copy it again") from error


def _pairs(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """A and B by layer, and the base weights of vocabulary layers, which PEFT saves too."""
    parts: dict[str, dict[str, Tensor]] = {"lora_A": {}, "lora_B": {}, "base_layer": {}}
    for key, x in tensors.items():
        layer, _, part = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not key.endswith(".weight") or part not in parts or x.ndim != 2:
            raise HoneError(f"{folder} holds {key}, no low-rank update of a linear layer: {MERGE}")
        if x.dtype not in FLOATS:
            raise HoneError(f"{folder} holds {key} as {x.dtype}, not as plain floats: save the adapter again")
        parts[part][layer] = x
    a, b = parts["lora_A"], parts["lora_B"]
    if odd := sorted(a.keys() ^ b.keys()):
        raise HoneError(f"{folder} has only half of the update of {odd[0]}: copy it again")
    if not a:
        raise HoneError(f"{folder} adapts no layer: it is empty, save it again")
    return {layer: (a[layer], b[layer]) for layer in a}, parts["base_layer"]
