"""Weights that read the same input side by side in memory, so that one product does the work of three.

The parameters stay the learner's own: each becomes a view of its part, and a step of the optimiser is seen at once.
Whatever gives a parameter other memory (`.to`, loading with assign=True) undoes it, and the next call lays them out
again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hone.model.decoder import MLP, Attention
from hone.model.lora import LoRALinear

Weights = tuple[Tensor, Tensor | None]  # [sum of outputs, inputs], [sum of outputs]


def plain(layer: nn.Module) -> nn.Linear:
    """The layer without its adapters."""
    found = layer.base if isinstance(layer, LoRALinear) else layer
    assert isinstance(found, nn.Linear)
    return found


@dataclass(frozen=True, slots=True)
class Low:
    """An adapter beside columns `at` of a product: out[:, at : at + n] += scale (x A^T) B^T."""

    A: Tensor
    B: Tensor
    scale: float
    at: int


def lows(*layers: nn.Module) -> Iterator[Low]:
    """The adapters that are on, of layers whose outputs lie side by side."""
    at = 0
    for layer in layers:
        adapter = layer.adapter if isinstance(layer, LoRALinear) and layer.enabled else None
        if adapter is not None:
            yield Low(adapter.lora_A, adapter.lora_B, adapter.scale, at)
        at += plain(layer).out_features


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as one, joined along their first dimension; where they are not yet neighbours they are moved."""
    return adjacent(tensors) if are_neighbours(tensors) else _moved(tensors)


def adjacent(tensors: Sequence[Tensor]) -> Tensor:
    """Neighbours in memory as one tensor, no number copied."""
    first, rows = tensors[0].detach(), sum(len(t) for t in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def are_neighbours(tensors: Sequence[Tensor]) -> bool:
    """Whether they lie in one allocation, one after the other."""
    end = tensors[0].data_ptr()
    for t in tensors:
        if t.data_ptr() != end or not t.is_contiguous():
            return False
        end += t.nbytes
    # numbers that happen to be neighbours in different allocations are not one tensor
    room = tensors[0].untyped_storage()
    return len({t.untyped_storage().data_ptr() for t in tensors}) == 1 and end <= room.data_ptr() + room.nbytes()


@torch.no_grad()
def _moved(tensors: Sequence[Tensor]) -> Tensor:
    with torch.inference_mode(False):  # the learner differentiates through them
        joined = torch.cat([t.detach() for t in tensors])
        at = 0
        for t in tensors:
            t.data = joined[at : at + len(t)]
            at += len(t)
    return joined


def joined(layers: Sequence[nn.Module]) -> Weights:
    """Weight and bias of linear layers that read one input."""
    each = [plain(layer) for layer in layers]
    biases = [layer.bias for layer in each if layer.bias is not None]
    if 0 < len(biases) < len(each):
        raise ValueError("some of the layers have a bias and some have none")
    return side_by_side([layer.weight for layer in each]), side_by_side(biases) if biases else None


def qkv(attention: Attention) -> Weights:
    """[(H + 2 K) E, D]: queries, keys, values."""
    return joined((attention.q_proj, attention.k_proj, attention.v_proj))


def gate_up(mlp: MLP) -> Weights:
    """[2 M, D]: gate, then up."""
    return joined((mlp.gate_proj, mlp.up_proj))
