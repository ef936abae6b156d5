"""The head that maps a hidden state to a value, reward or step score, and the model of learned rewards."""

import torch.nn.functional as F
from torch import Tensor, nn

from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.layout import hidden_states, lines_of
from hone.model.vocab.distribution import at_least_float32
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
        bias = self.bias if self.bias is None else at_least_float32(self.bias)
        return F.linear(at_least_float32(input), at_least_float32(self.weight), bias).squeeze(-1)


def freeze_unused_head(decoder: Decoder) -> None:
    """Freeze `lm_head` where it is not the embedding: a scalar model never uses it."""
    if not decoder.tied:
        decoder.lm_head.requires_grad_(False)


class Scorer(nn.Module):
    """A reward, value or step model: (head(h) - mean) / std at every real position.

    `mean` and `std` of the raw scores on a calibration set are saved with the model, and so is `separator`.
    """

    KINDS = ("reward", "value", "step")
    old = None  # a scorer has no distribution over tokens
    separator = ""  # the text that ended each step of its training data; empty: not known

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
        # a bias cancels in a pair's margin: its gradient is rounding error, by which Adam would move it
        bias = kind != "reward"
        self.head = head if head is not None else ScalarHead(decoder.config.hidden_size, bias=bias)
        self.checkpoint_layers = checkpoint_layers
        self.normalise(mean, std)
        freeze_unused_head(decoder)

    def normalise(self, mean: float, std: float) -> None:
        """From now on scores are (raw - mean) / std."""
        if not std > 0:
            raise HoneError(f"scores have standard deviation {std}: calibrate on answers of different quality")
        self.mean, self.std = mean, std

    @property
    def vocab_size(self) -> int:
        """The size of its vocabulary."""
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
