"""Sampling from a copy of the weights in 8 bits: each row of a weight, and each token's input, has its own scale.

It changes the distribution a little, so it is never the default; `logp` and `raw` are those of the rounded model.
The copy takes a quarter of float32's memory and follows the learner: weights that have changed are rounded again
before the next prompts are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.engine.runners.torch.layers import TorchLayers, Weights
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.lora import linear_layers

LARGEST = 127  # -128 is left out, so that the range is as wide on both sides


@dataclass(frozen=True, slots=True)
class Int8:
    """weight ~ scale * whole, row by row."""

    whole: Tensor  # int8 [out, in]
    scale: Tensor  # float32 [out]

    @classmethod
    def of(cls, weight: Tensor) -> "Int8":
        whole, scale = rounded(weight)
        return cls(whole, scale[:, 0])

    def product(self, x: Tensor) -> Tensor:
        """x W^T: whole numbers are multiplied and added exactly, then scaled."""
        whole, scale = rounded(x)
        return (
            torch.ops.aten._int_mm(whole, self.whole.t())
            .to(x.dtype)
            .mul_(scale.to(x.dtype))
            .mul_(self.scale.to(x.dtype))
        )


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, in] and float32 [N, 1] with x ~ scale * whole; the largest number of a row becomes 127."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round_().to(torch.int8), scale


class Int8Layers(TorchLayers):
    """The layers with every weight in 8 bits; norms, adapters, attention and the embedding are as they were."""

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        if decoder.device.type != "cpu":
            raise HoneError(f"8-bit sampling runs on a CPU, the model is on {decoder.device}: leave int8 out")
        super().__init__(decoder, rows, capacity)
        self.copies = dict[int, Int8]()  # by where the weight itself lies
        self.copied = list[tuple[int, int]]()  # which weights those were: where each lay, and its version

    def renew(self) -> None:
        """Find the weights, and round them again if they have changed since."""
        super().renew()
        found = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._bases()]
        if found != self.copied:
            self.copies, self.copied = int8_weights(self.weights), found

    def _bases(self) -> list[Tensor]:
        """The linear layers' own weights, without adapters."""
        return [layer.weight for layer in linear_layers(self.decoder).values()]

    def product(self, weight: Tensor, x: Tensor, *, rows: bool = False) -> Tensor:
        """x W^T; rows: each row of the result lies in one piece"""
        copy = self.copies.get(weight.data_ptr())
        return super().product(weight, x, rows=rows) if copy is None else copy.product(x)

    def add_product(self, x: Tensor, weight: Tensor, a: Tensor) -> None:
        """x += a W^T"""
        x += self.product(weight, a)


def int8_weights(weights: Weights) -> dict[int, Int8]:
    """Every product's weight in 8 bits, by where the weight itself lies."""
    assert weights.head is not None
    linear = [x for b in weights.blocks for x in (b.qkv, b.o, b.gate_up, b.down)]
    return {x.weight.data_ptr(): Int8.of(x.weight) for x in (*linear, weights.head)}
