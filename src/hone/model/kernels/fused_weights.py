"""Weights that read the same input are made adjacent in memory, so that one product replaces three.

The parameters stay the learner's: each becomes a view of its part, so a step of the optimiser changes the joined weight
too. What gives a parameter new memory (`.to`, loading with assign=True) undoes it; the next call moves them again.
Shapes: N tokens, D inputs, F outputs of all layers together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hone.model.decoder import MLP, Attention, Layer
from hone.model.lora import LoRALinear

Weights = tuple[Tensor, Tensor | None]  # [sum of outputs, inputs], [sum of outputs]
Gradients = list[Tensor | None]


def base_linear(layer: nn.Module) -> nn.Linear:
    """The linear layer without its adapters."""
    found = layer.base if isinstance(layer, LoRALinear) else layer
    assert isinstance(found, nn.Linear)
    return found


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter beside columns `at` of a product: out[:, at : at + n] += scale (x A^T) B^T."""

    A: Tensor
    B: Tensor
    scale: float
    at: int


def adapters_on(*layers: nn.Module) -> Iterator[LowRank]:
    """The adapters that are on, of layers whose outputs are columns of one product."""
    at = 0
    for layer in layers:
        adapter = layer.adapter if isinstance(layer, LoRALinear) and layer.enabled else None
        if adapter is not None:
            yield LowRank(adapter.lora_A, adapter.lora_B, adapter.scale, at)
        at += base_linear(layer).out_features


def make_adjacent(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors joined along their first dimension; they are moved first if they are not adjacent."""
    return as_view(tensors) if are_neighbours(tensors) else _move_together(tensors)


def as_view(tensors: Sequence[Tensor]) -> Tensor:
    """Adjacent tensors as one, without a copy."""
    first, rows = tensors[0].detach(), sum(len(t) for t in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def are_neighbours(tensors: Sequence[Tensor]) -> bool:
    """Whether they are in one allocation, one after the other."""
    end = tensors[0].data_ptr()
    for t in tensors:
        if t.data_ptr() != end or not t.is_contiguous():
            return False
        end += t.nbytes
    # tensors of different allocations can be adjacent by chance, and cannot be one tensor
    storage = tensors[0].untyped_storage()
    return len({t.untyped_storage().data_ptr() for t in tensors}) == 1 and end <= storage.data_ptr() + storage.nbytes()


@torch.no_grad()
def _move_together(tensors: Sequence[Tensor]) -> Tensor:
    with torch.inference_mode(False):  # the learner differentiates through them
        joined = torch.cat([t.detach() for t in tensors])
        at = 0
        for t in tensors:
            t.data = joined[at : at + len(t)]
            at += len(t)
    return joined


def weights_of(layers: Sequence[nn.Module]) -> Weights:
    """The joined weight and bias of linear layers that read the same input."""
    each = [base_linear(layer) for layer in layers]
    biases = [layer.bias for layer in each if layer.bias is not None]
    if 0 < len(biases) < len(each):
        raise ValueError("some of the layers have a bias and some have none")
    return make_adjacent([layer.weight for layer in each]), make_adjacent(biases) if biases else None


def qkv(attention: Attention) -> Weights:
    """[(H + 2 K) E, D]: queries, keys, values."""
    return weights_of((attention.q_proj, attention.k_proj, attention.v_proj))


def gate_up(mlp: MLP) -> Weights:
    """[2 M, D]: gate, then up."""
    return weights_of((mlp.gate_proj, mlp.up_proj))


def layer_weights(layer: Layer) -> tuple[Weights, Weights, Weights, Weights]:
    """The weights of a layer's four products: queries, keys and values; output; gate and up; down."""
    attention, mlp = layer.self_attn, layer.mlp
    return qkv(attention), weights_of((attention.o_proj,)), gate_up(mlp), weights_of((mlp.down_proj,))


def as_one(tensors: tuple[Tensor, ...]) -> Tensor:
    """The tensors as one; a copy if they are not adjacent."""
    if len(tensors) == 1:
        return tensors[0]
    return as_view(tensors) if are_neighbours(tensors) else torch.cat([x.detach() for x in tensors])


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W^T + b for linear layers that read the same x, and their adapters."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    adapters: tuple[LowRank, ...]

    @staticmethod
    def of(*layers: nn.Module) -> "Product":
        each = [base_linear(layer) for layer in layers]
        biases = tuple(base.bias for base in each if base.bias is not None)
        return Product(tuple(base.weight for base in each), biases, tuple(adapters_on(*layers)))

    def tensors(self) -> tuple[Tensor, ...]:
        """The parameters, for autograd, in the order of `gradients`."""
        return (*self.weights, *self.biases, *(x for low in self.adapters for x in (low.A, low.B)))

    def forward(self, x_ND: Tensor, *, plus: Tensor | None = None, spend: bool = False) -> tuple[Tensor, list[Tensor]]:
        """(y + plus, A x of each adapter). spend: the sum may overwrite plus (under autocast it does not)."""
        W = as_one(self.weights)
        if plus is not None:
            spend = spend and not torch.is_autocast_enabled(plus.device.type)
            y = plus.addmm_(x_ND, W.t()) if spend else torch.addmm(plus, x_ND, W.t())
            y = y.add_(as_one(self.biases)) if self.biases else y
        else:
            y = torch.addmm(as_one(self.biases), x_ND, W.t()) if self.biases else x_ND @ W.t()
        inner = [x_ND @ low.A.t() for low in self.adapters]
        for low, h in zip(self.adapters, inner, strict=True):
            y[:, low.at : low.at + len(low.B)].addmm_(h, low.B.t(), alpha=low.scale)
        return y, inner

    def backward(self, dy_NF: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(dx, scale dy B of each adapter)"""
        dx, back = dy_NF @ as_one(self.weights), list[Tensor]()
        for low in self.adapters:
            back.append((dy_NF[:, low.at : low.at + len(low.B)] @ low.B).mul_(low.scale))
            dx.addmm_(back[-1], low.A)
        return dx, back

    def gradients(
        self, x_ND: Tensor, dy_NF: Tensor, inner: Sequence[Tensor], back: Sequence[Tensor], wants: Sequence[bool]
    ) -> Gradients:
        """The gradients of `tensors()` that are wanted."""
        n, found = len(self.weights), Gradients([None] * len(wants))
        sizes = [len(w) for w in self.weights]
        if any(wants[:n]):
            found[:n] = (dy_NF.t() @ x_ND).split(sizes)
        if any(wants[n : n + len(self.biases)]):
            found[n : n + len(self.biases)] = dy_NF.sum(0).split(sizes)
        at = n + len(self.biases)
        for low, h, dh in zip(self.adapters, inner, back, strict=True):
            given = dy_NF[:, low.at : low.at + len(low.B)]
            found[at : at + 2] = [dh.t() @ x_ND, (given.t() @ h).mul_(low.scale)]
            at += 2
        return [g if wanted else None for g, wanted in zip(found, wants, strict=True)]
