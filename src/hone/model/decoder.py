"""One decoder for sampling and training: the Llama and Qwen family, with Hugging Face's parameter names.

Because the names are Hugging Face's, a state dict is a checkpoint that `AutoModelForCausalLM` loads.
Shapes: B rows, T new tokens, S keys (cached and new), D hidden, H query heads, K key-value heads, E head size.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.errors import HoneError


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, in Hugging Face's words."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    max_position_embeddings: int = 256
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key-value heads"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class KVCache:
    """Keys and values of every layer, allocated once; `length` columns are filled."""

    def __init__(self, config: DecoderConfig, rows: int, capacity: int, *, like: Tensor) -> None:
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, capacity, config.head_dim)
        self.store = like.new_zeros(shape)
        self.length = 0

    def append(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new columns after the filled ones and return all of them; `advance` moves the end."""
        end = self.length + k_BKTE.shape[2]
        k, v = self.store[layer, 0], self.store[layer, 1]
        k[:, :, self.length : end] = k_BKTE
        v[:, :, self.length : end] = v_BKTE
        return k[:, :, :end], v[:, :, :end]

    def advance(self, columns: int) -> None:
        self.length += columns

    def rows(self, index: Tensor) -> Self:
        """A cache of the chosen rows, in that order: to share a prompt in a group, or to drop finished rows."""
        other = object.__new__(type(self))
        other.store = self.store.index_select(2, index)
        other.length = self.length
        return other


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and sine for every position, [P, E], the half-rotation layout of Hugging Face."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angle = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] / config.rope_theta**half
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of each head"""
    a, b = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat([-b, a], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.E = layer, config.head_dim
        self.shares_keys = config.num_key_value_heads != config.num_attention_heads
        D, E = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(D, config.num_attention_heads * E, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * E, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * E, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * E, D, bias=False)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None) -> Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (
            proj(x_BTD).view(B, T, -1, self.E).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, enable_gqa=self.shares_keys
        )
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        D, M = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, M, bias=False)
        self.up_proj = nn.Linear(D, M, bias=False)
        self.down_proj = nn.Linear(M, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm: tokens to hidden states."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """Tokens to hidden states; `lm_head` turns those into logits, a chunk at a time, in model/forward."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init)
        depth_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        for name, module in self.named_modules():  # keep the residual stream's variance independent of depth (GPT-2)
            if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
                nn.init.normal_(module.weight, std=depth_std)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache on the model's device, in its dtype."""
        return KVCache(self.config, rows, capacity, like=self.model.embed_tokens.weight)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """int64 [B, T] -> hidden states [B, T, D].

        positions: int64 [B, T]; by default they count up from the end of the cache.
        mask: bool, broadcastable to [B, 1, T, S], True where a token may look; by default causal. With a filled
        cache and T > 1 a mask must be given.
        checkpoint_layers: keep only each layer's input for the backward pass and recompute the rest.
        """
        past = cache.length if cache is not None else 0
        if checkpoint_layers and cache is not None:
            raise ValueError("checkpointed layers cannot fill a cache: the recomputation would fill it again")
        if mask is None and past and tokens.shape[1] > 1:
            raise ValueError("several tokens after a filled cache need an explicit mask")
        if positions is None:
            end = past + tokens.shape[1]
            if end > len(self.cos):  # a slice would come back short and broadcast
                raise HoneError(
                    f"a sequence of {end} tokens, the model's context is {len(self.cos)}: "
                    "shorten it or raise model.max_position_embeddings"
                )
            rope = (self.cos[past:end], self.sin[past:end])
        else:
            rope = (self.cos[positions][:, None], self.sin[positions][:, None])
        x = self.model.embed_tokens(tokens)
        rope = (rope[0].to(x.dtype), rope[1].to(x.dtype))
        for layer in self.model.layers:
            if checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, rope, mask, None, use_reentrant=False)
            else:
                x = layer(x, rope, mask, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.model.norm(x)
