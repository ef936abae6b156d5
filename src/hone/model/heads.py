"""The one head that is not the vocabulary's: hidden states to a number, for values, rewards and step scores."""

import torch.nn.functional as F
from torch import Tensor, nn

from hone.model.decoder import Decoder
from hone.model.layout.forward import wide


class ScalarHead(nn.Linear):
    """w . h + b in at least float32, [..., D] -> [...]; zero: start with w = 0, so every output is 0."""

    def __init__(self, hidden_size: int, *, zero: bool = False, bias: bool = True) -> None:
        super().__init__(hidden_size, 1, bias=bias)
        if bias:
            nn.init.zeros_(self.bias)
        if zero:
            nn.init.zeros_(self.weight)
        else:  # unit-variance hidden states give unit-variance scores
            nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias if self.bias is None else wide(self.bias)
        return F.linear(wide(input), wide(self.weight), bias).squeeze(-1)


def freeze_unused_head(decoder: Decoder) -> None:
    """A scalar model never reads `lm_head`; untied, it is taken from the trainable parameters."""
    if not decoder.tied:
        decoder.lm_head.requires_grad_(False)
