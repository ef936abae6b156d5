"""The shape of a decoder, named as in Hugging Face's configs, and its rotary position embedding."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding; kind "default", or a scaling to longer contexts: "linear", "llama3", "yarn"."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original: int = 0  # positions the model was trained on before the scaling
    low_freq: float = 1.0  # llama3: a frequency with fewer turns in the original context is divided by the factor
    high_freq: float = 4.0  # llama3: a frequency with more turns is kept
    beta_fast: float = 32.0  # yarn: as high_freq
    beta_slow: float = 1.0  # yarn: as low_freq
    truncate: bool = True  # yarn: round the bounds to whole dimensions
    attention: float = 1.0  # yarn: a factor of cosine and sine, which sharpens the attention

    def __post_init__(self) -> None:
        if self.kind not in ROPES:
            raise ValueError(f"rope type {self.kind!r} is none of {', '.join(ROPES)}")
        if self.kind in ("llama3", "yarn") and self.original < 1:
            raise ValueError(f"rope type {self.kind} needs original_max_position_embeddings")

    def frequencies(self, size: int) -> Tensor:
        """Radians per position for each pair of a head's dimensions, float64 [E / 2]."""
        plain = self.theta ** -(torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        keep = self._llama3(plain) if self.kind == "llama3" else self._yarn(size)
        return keep * plain + (1 - keep) * plain / self.factor

    def _llama3(self, plain: Tensor) -> Tensor:
        """How much of each frequency is kept, from 0 to 1, by its number of turns in the original context."""
        turns = self.original * plain / (2 * math.pi)
        return ((turns - self.low_freq) / (self.high_freq - self.low_freq)).clamp(0, 1)

    def _yarn(self, size: int) -> Tensor:
        """The same: 1 up to the pair with beta_fast turns, 0 from the one with beta_slow turns, linear between."""

        def dimension(turns: float) -> float:
            return size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (torch.arange(size // 2, dtype=torch.float64, device="cpu") - low) / ((high - low) or 0.001)
        return 1 - ramp.clamp(0, 1)


def yarn_attention(factor: float, mscale: float = 0.0, mscale_all: float = 0.0) -> float:
    """0.1 ln(factor) + 1. With both mscales: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all ln(factor) + 1)  (YaRN)"""

    def scaled(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    return scaled(mscale) / scaled(mscale_all) if mscale and mscale_all else scaled(1.0)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One shape for the Llama, Mistral, Qwen2 and Qwen3 families."""

    family: str = "llama"  # Hugging Face's model_type, which says how it is saved
    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 256
    rope: Rope = field(default_factory=Rope)
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each query and key head before the rotation
    windows: tuple[int, ...] = ()  # sliding window of each layer, 0: none; (): no layer has one

    def __post_init__(self) -> None:
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"heads of {self.head_dim} dimensions cannot be rotated: head_dim must be even")
        if self.windows and (len(self.windows) != self.num_hidden_layers or min(self.windows) < 0):
            raise ValueError(f"{len(self.windows)} attention windows for {self.num_hidden_layers} layers")
