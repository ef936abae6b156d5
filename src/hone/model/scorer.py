"""Hidden states to one number: the head of values, rewards and step scores, and the model that learned rewards are."""

import torch.nn.functional as F
from torch import Tensor, nn

from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.layout import hidden_states, lines_of
from hone.model.vocab.distribution import wide
from hone.types import Batch, Forward


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


class Scorer(nn.Module):
    """A reward, value or step model: (head(h) - mean) / std at every real position.

    `mean` and `std` are those of the raw scores on a calibration set, and are saved with the model, as is `separator`.
    """

    KINDS = ("reward", "value", "step")
    old = None  # no distribution, so nothing to compare it with
    separator = ""  # what ended the steps it was trained on; empty: not known

    def __init__(
        self,
        decoder: Decoder,
        *,
        head: ScalarHead | None = None,
        kind: str = "reward",
        mean: float = 0.0,
        std: float = 1.0,
        layout: str = "shared",
        checkpoint_layers: bool | None = None,
    ) -> None:
        super().__init__()
        if kind not in self.KINDS:
            raise HoneError(f'unknown kind of scorer "{kind}": use one of {", ".join(self.KINDS)}')
        self.decoder, self.kind, self.layout = decoder, kind, layout
        # a pair's margin has no gradient for a bias, so that Adam would move it by rounding errors alone
        bias = kind != "reward"
        self.head = head if head is not None else ScalarHead(decoder.config.hidden_size, bias=bias)
        self.checkpoint_layers = checkpoint_layers
        self.normalise(mean, std)
        freeze_unused_head(decoder)

    def normalise(self, mean: float, std: float) -> None:
        """From now on scores have `mean` taken off and are divided by `std`."""
        if not std > 0:
            raise HoneError(f"scores have standard deviation {std}: calibrate on answers of different quality")
        self.mean, self.std = mean, std

    @property
    def vocab_size(self) -> int:
        """How many tokens it reads."""
        return self.decoder.config.vocab_size

    def actor_parameters(self) -> list[nn.Parameter]:
        """None: a scorer does not act."""
        return []

    def critic_parameters(self) -> list[nn.Parameter]:
        """Everything it trains."""
        return [p for p in self.parameters() if p.requires_grad]

    def forward(self, batch: Batch, want: frozenset[str]) -> Forward:
        if want - {"value"}:
            raise ValueError(f"a Scorer gives only value, not {sorted(want - {'value'})}")
        if not want:
            return Forward()
        lines = lines_of(batch, self.decoder, layout=self.layout)
        hidden = hidden_states(self.decoder, lines, checkpoint_layers=self.checkpoint_layers)
        return Forward(value=lines.spread((self.head(hidden) - self.mean) / self.std))
