"""The decoder's own tensors, as the kernels read them: nothing is copied, so an optimiser step is seen at once."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from hone.model.decoder import Decoder, Layer
from hone.model.kernels.fused_weights import LowRank, adapters_on, base_linear, gate_up, qkv
from hone.model.lora import Adapter, adapted_layers


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer; lists of adapters are empty where none is on."""

    gain: Tensor  # of the norm before the attention
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_gain: Tensor
    gate_up: Tensor
    down: Tensor
    low_qkv: list[LowRank]
    low_out: list[LowRank]
    low_gate_up: list[LowRank]
    low_down: list[LowRank]

    @property
    def adapters(self) -> list[LowRank]:
        return [*self.low_qkv, *self.low_out, *self.low_gate_up, *self.low_down]

    @staticmethod
    def of(layer: Layer) -> "LayerTensors":
        attention, mlp = layer.self_attn, layer.mlp
        weight, bias = qkv(attention)
        return LayerTensors(
            gain=layer.input_layernorm.weight,
            qkv=weight,
            qkv_bias=bias,
            q_norm=attention.q_norm.weight if attention.q_norm is not None else None,
            k_norm=attention.k_norm.weight if attention.k_norm is not None else None,
            out=base_linear(attention.o_proj).weight,
            mlp_gain=layer.post_attention_layernorm.weight,
            gate_up=gate_up(mlp)[0],
            down=base_linear(mlp.down_proj).weight,
            low_qkv=list(adapters_on(attention.q_proj, attention.k_proj, attention.v_proj)),
            low_out=list(adapters_on(attention.o_proj)),
            low_gate_up=list(adapters_on(mlp.gate_proj, mlp.up_proj)),
            low_down=list(adapters_on(mlp.down_proj)),
        )


def addresses(decoder: Decoder) -> tuple[int, ...]:
    """Where every parameter lies: a captured graph is only good while this stays the same."""
    return tuple(p.data_ptr() for p in decoder.parameters())


def rank_of(decoder: Decoder) -> tuple[int, bool]:
    """The greatest rank of any adapter, and whether one stands beside a gate or up projection."""
    ranks, wide = [0], False
    for name, layer in adapted_layers(decoder):
        ranks += [len(cast(Adapter, a).lora_A) for a in layer.adapters.values()]
        wide = wide or name.endswith(("gate_proj", "up_proj"))
    return max(ranks), wide
