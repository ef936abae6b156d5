"""Low-rank adapters: train B and A of h = W0 x + scale B A x. A layer holds adapters by name, at most one is on."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.data.text.worker import first_matches
from hone.errors import HoneError
from hone.model.decoder import Decoder

ALL_LINEAR = "all-linear"  # every linear layer but the vocabulary head
DEFAULT = "default"  # the name of an adapter if none is given


class Adapter(nn.Module):
    """scale B A beside one layer: A Gaussian of variance 1 / d_in, B zero; scale alpha / r, or alpha / sqrt(r)."""

    def __init__(
        self, base: nn.Linear, *, rank: int, alpha: float, generator: torch.Generator, rslora: bool = False
    ) -> None:
        super().__init__()
        like, std = base.weight, base.in_features**-0.5
        # drawn on the CPU in float32, so that a seed gives the same adapter on every device
        start = torch.randn(rank, base.in_features, generator=generator) * std
        self.rank, self.alpha, self.rslora = rank, alpha, rslora
        self.scale = alpha / (math.sqrt(rank) if rslora else rank)
        self.lora_A = nn.Parameter(start.to(like.device, like.dtype))
        self.lora_B = nn.Parameter(like.new_zeros(base.out_features, rank))

    def update(self) -> Tensor:
        """scale B A, [d_out, d_in]"""
        return self.scale * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """out + scale B A x, written into `out`: scaling and adding are part of the product, forward and backward."""
        low = F.linear(x.reshape(-1, x.shape[-1]), self.lora_A)
        out.view(-1, out.shape[-1]).addmm_(low, self.lora_B.t(), alpha=self.scale)
        return out


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapters; the selected one is added while `enabled`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.adapters = base, nn.ModuleDict()
        self.selected, self.enabled = "", True

    @property
    def adapter(self) -> Adapter | None:
        """The selected adapter, on or off; None if it does not change this layer."""
        return cast(Adapter, self.adapters[self.selected]) if self.selected in self.adapters else None

    @property
    def weight(self) -> Tensor:
        """The weight with the adapter that is on, for code that reads a linear layer's weight."""
        return self.merged() if self.enabled else self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def merged(self) -> Tensor:
        """W0 + scale B A"""
        return self.base.weight if self.adapter is None else self.base.weight + self.adapter.update()

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        adapter = self.adapter if self.enabled else None
        return out if adapter is None else adapter(x, out)


def add_lora(
    decoder: Decoder,
    *,
    name: str = DEFAULT,
    rank: int,
    alpha: float,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    rslora: bool = False,
    seed: int = 0,
) -> list[str]:
    """Freeze the decoder, add an adapter to the layers that `targets` name, and select it.

    A target is the end of a layer's name, a regular expression for the whole name, or "all-linear".
    Returns the names of the layers.
    """
    if rank < 1:
        raise HoneError(f"lora rank is {rank}: give at least 1")
    layers = linear_layers(decoder)
    check_new(decoder, name)
    chosen = _matching([n for n in layers if layers[n] is not head_of(decoder)], list(layers), targets)
    check_untied(decoder, chosen)
    generator = torch.Generator().manual_seed(seed)
    made = {n: Adapter(layers[n], rank=rank, alpha=alpha, rslora=rslora, generator=generator) for n in chosen}
    put_adapter(decoder, name, made)
    return chosen


def check_new(decoder: Decoder, name: str) -> None:
    """Raise HoneError if no adapter of this name can be added."""
    if name in adapter_names(decoder):
        raise HoneError(f'the model has an adapter "{name}" already: give another name, or load the base model again')
    if not re.fullmatch(r"[\w-]+", name) or hasattr(nn.ModuleDict(), name):  # it becomes part of parameters' names
        raise HoneError(f'an adapter cannot be named "{name}": use another word of letters, digits, "-" and "_"')


def check_untied(decoder: Decoder, names: list[str]) -> None:
    """Raise HoneError if a layer shares its weight with the embedding."""
    layers = linear_layers(decoder)
    tables = {id(m.weight) for m in decoder.modules() if isinstance(m, nn.Embedding)}
    if tied := [name for name in names if id(layers[name].weight) in tables]:
        raise HoneError(f"{tied[0]} is tied to the embedding: leave it out of the targets or untie the embeddings")


def put_adapter(decoder: Decoder, name: str, made: Mapping[str, Adapter]) -> None:
    """Freeze the decoder, put an adapter beside each named layer, and select it."""
    layers = dict(adapted_layers(decoder))
    for layer, adapter in made.items():
        if layer not in layers:
            layers[layer] = LoRALinear(cast(nn.Linear, decoder.get_submodule(layer)))
            _replace(decoder, layer, layers[layer])
        layers[layer].adapters[name] = adapter
    decoder.adapters_added += 1
    decoder.requires_grad_(False)
    select_adapter(decoder, name)


def linear_layers(decoder: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by the names they have without adapters."""
    found = dict[str, nn.Linear]()
    for name, module in decoder.named_modules():
        if isinstance(module, LoRALinear):
            found[name] = module.base
        elif isinstance(module, nn.Linear) and name.removesuffix(".base") not in found:
            found[name] = module
    return found


def head_of(decoder: Decoder) -> nn.Module:
    """The plain vocabulary head."""
    head: nn.Module = decoder.lm_head
    return head.base if isinstance(head, LoRALinear) else head


def adapted_layers(decoder: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """The layers with adapters, by name."""
    return ((name, m) for name, m in decoder.named_modules() if isinstance(m, LoRALinear))


def adapter_names(decoder: nn.Module) -> list[str]:
    """The adapters the model holds, in the order they were added."""
    return list(dict.fromkeys(name for _, m in adapted_layers(decoder) for name in m.adapters))


def check_adapter(decoder: nn.Module, name: str) -> None:
    """Raise HoneError, which lists the adapters, if the model has none of this name."""
    if name not in (names := adapter_names(decoder)):
        raise HoneError(f'no adapter "{name}": {"use one of " + ", ".join(names) if names else "add_lora first"}')


def select_adapter(decoder: nn.Module, name: str) -> None:
    """Turn this adapter on. Of all adapters only its parameters are trained."""
    check_adapter(decoder, name)
    for _, layer in adapted_layers(decoder):
        layer.selected, layer.enabled = name, True
        for other, adapter in layer.adapters.items():
            adapter.requires_grad_(other == name)


@contextmanager
def use_adapter(decoder: nn.Module, name: str | None) -> Iterator[None]:
    """Inside, this adapter is on, or none if name is None. Which adapter is trained does not change."""
    if name is not None:
        check_adapter(decoder, name)
    before = [(m, m.selected, m.enabled) for _, m in adapted_layers(decoder)]
    try:
        for module, selected, _ in before:
            module.selected, module.enabled = selected if name is None else name, name is not None
        yield
    finally:
        for module, selected, enabled in before:
            module.selected, module.enabled = selected, enabled


def adapter_off(decoder: nn.Module) -> AbstractContextManager[None]:
    """Inside, the decoder is its base model."""
    return use_adapter(decoder, None)


def _matching(linear: list[str], layers: list[str], targets: tuple[str, ...]) -> list[str]:
    """The layers that any target names; `linear` are those that "all-linear" means."""
    chosen = set[str]()
    for target in targets:
        hits = set(linear) if target == ALL_LINEAR else _named(layers, target)
        if not hits:
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in layers)
            raise HoneError(f'lora target "{target}" matches no layer: the linear layers are {", ".join(kinds)}')
        chosen |= hits
    if not chosen:
        raise HoneError('no lora targets: give layer names such as ("q_proj", "v_proj") or ("all-linear",)')
    return [name for name in layers if name in chosen]


def _named(layers: list[str], target: str) -> set[str]:
    """The layers whose names end with the target, or match it as a regular expression."""
    ending = {name for name in layers if f".{name}".endswith(f".{target}")}
    if re.fullmatch(r"[\w.-]*", target):  # no pattern that could take long
        return ending | {name for name in layers if re.fullmatch(target, name)}
    found = first_matches([target], layers, where=f'lora target "{target}"')
    return ending | {name for name, n in zip(layers, found, strict=True) if n == 0}


def _replace(decoder: Decoder, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(decoder.get_submodule(parent), leaf, module)


def lora_parameters(decoder: nn.Module) -> list[nn.Parameter]:
    """Every A and B of the selected adapter: r (d_out + d_in) numbers a layer."""
    adapters = (m.adapter for _, m in adapted_layers(decoder))
    return [p for adapter in adapters if adapter is not None for p in (adapter.lora_A, adapter.lora_B)]


def adapters_of(decoder: nn.Module) -> dict[str, Adapter]:
    """The selected adapter's module of each layer, by the layer's name."""
    return {layer: m.adapter for layer, m in adapted_layers(decoder) if m.adapter is not None}


def lora_state(decoder: nn.Module) -> dict[str, Tensor]:
    """The weights of the selected adapter. Their names end as PEFT's do."""
    return {
        f"{layer}.{part}.weight": getattr(adapter, part).detach()
        for layer, adapter in adapters_of(decoder).items()
        for part in ("lora_A", "lora_B")
    }


def plain_state(decoder: Decoder) -> dict[str, Tensor]:
    """The state dict of a decoder without adapters that computes the same: an adapter that is on is merged."""
    layers, state = dict(adapted_layers(decoder)), dict[str, Tensor]()
    for key, x in decoder.state_dict().items():
        layer, _, leaf = key.rpartition(".base.")
        if layer in layers:
            state[f"{layer}.{leaf}"] = layers[layer].weight.detach() if leaf == "weight" else x.detach()
        elif key.partition(".adapters.")[0] not in layers:
            state[key] = x.detach()
    return state


@torch.no_grad()
def merge_lora(decoder: Decoder) -> None:
    """Replace adapted layers by linear ones with the same output: an adapter that is on is added. All stay frozen."""
    for name, module in list(adapted_layers(decoder)):
        module.base.weight.copy_(module.weight)
        _replace(decoder, name, module.base)
