"""A decoder's weights as the plain runner reads them: tensors by layer, found again when they have moved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from hone.model.backends.adjacent import gate_up, plain, qkv
from hone.model.decoder import Decoder, Layer
from hone.model.lora import LoRALinear, linear_layers


@dataclass(frozen=True, slots=True)
class Linear:
    """One or more linear layers that read the same input, as one."""

    weight: Tensor
    bias: Tensor | None
    adapted: tuple[tuple[int, LoRALinear], ...]  # layers with adapters, and where their outputs begin

    @classmethod
    def of(cls, layers: Sequence[nn.Module], weights: tuple[Tensor, Tensor | None]) -> "Linear":
        """`weights` are those of the layers side by side."""
        adapted, at = list[tuple[int, LoRALinear]](), 0
        for layer in layers:
            if isinstance(layer, LoRALinear):
                adapted.append((at, layer))
            at += len(plain(layer).weight)
        return cls(weights[0].detach(), None if weights[1] is None else weights[1].detach(), tuple(adapted))


@dataclass(frozen=True, slots=True)
class Block:
    """One layer."""

    before: Tensor  # weight of the norm before the attention
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    after: Tensor  # of the norm before the MLP
    gate_up: Linear
    down: Linear


def block_of(layer: Layer) -> Block:
    """The layer's weights, side by side where they read one input."""
    attention, mlp = layer.self_attn, layer.mlp
    o, down = plain(attention.o_proj), plain(mlp.down_proj)
    return Block(
        before=layer.input_layernorm.weight.detach(),
        qkv=Linear.of((attention.q_proj, attention.k_proj, attention.v_proj), qkv(attention)),
        q_norm=None if attention.q_norm is None else attention.q_norm.weight.detach(),
        k_norm=None if attention.k_norm is None else attention.k_norm.weight.detach(),
        o=Linear.of((attention.o_proj,), (o.weight, o.bias)),
        after=layer.post_attention_layernorm.weight.detach(),
        gate_up=Linear.of((mlp.gate_proj, mlp.up_proj), gate_up(mlp)),
        down=Linear.of((mlp.down_proj,), (down.weight, down.bias)),
    )


class Weights:
    """The blocks of a decoder. An optimiser's step in place is seen at once; a parameter that got other memory is
    found by `check`."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.blocks: list[Block] = []
        self.head: Linear | None = None
        self.bases: list[Tensor] = []  # the linear layers' own weights, without adapters
        self.parameters: list[Tensor] = []
        self.places: list[int] = []

    def find(self) -> None:
        """Read them from the modules, which may be others than before."""
        with torch.inference_mode(False):
            self.blocks = [block_of(layer) for layer in cast(Iterable[Layer], self.decoder.model.layers)]
            head = plain(self.decoder.lm_head)
            self.head = Linear.of((self.decoder.lm_head,), (head.weight, head.bias))
            self.bases = [layer.weight for layer in linear_layers(self.decoder).values()]
            self.parameters = [*self.decoder.model.parameters(), head.weight]
            self.places = [p.data_ptr() for p in self.parameters]

    def check(self) -> None:
        """Find them again if any has moved."""
        if [p.data_ptr() for p in self.parameters] != self.places:
            self.find()
