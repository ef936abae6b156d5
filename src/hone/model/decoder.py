"""One decoder for sampling and training: the Llama and Qwen family, with Hugging Face's parameter names.

Because the names are Hugging Face's, a state dict is a checkpoint that `AutoModelForCausalLM` loads.
Shapes: B rows, T tokens, S keys (as many as tokens), D hidden, H query heads, K key-value heads, E head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.errors import HoneError
from hone.model.backends.registry import Backend, backends_for, differentiates_once
from hone.model.config import DecoderConfig
from hone.model.rows import Rows

Mask = Tensor | Rows | None  # which tokens a token attends to; None: causal
TABLE = 4096  # positions in the first table of cosines and sines; it grows when a longer sequence comes


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(config: DecoderConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the first positions, float32 [P, E], in Hugging Face's half-rotation layout."""
    position = torch.arange(positions, dtype=torch.float64, device="cpu")
    angle = position[:, None] * config.rope.frequencies(config.head_dim)
    angle = torch.cat([angle, angle], dim=-1)
    return (angle.cos() * config.rope.attention).float(), (angle.sin() * config.rope.attention).float()


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of each head"""
    a, b = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat([-b, a], dim=-1) * sin


class Attention(nn.Module):
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.E = layer, config.head_dim
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.shares_keys = config.num_key_value_heads != config.num_attention_heads
        D, E, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.q_proj = nn.Linear(D, config.num_attention_heads * E, bias=bias)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * E, bias=bias)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * E, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * E, D, bias=config.o_bias)
        self.q_norm = RMSNorm(E, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(E, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (
            proj(x_BTD).view(B, T, -1, self.E).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        return self.o_proj(self.attend(q, k, v, mask))

    def attend(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Mask) -> Tensor:
        """[B, T, H E]"""
        B, _, T, _ = q_BHTE.shape
        if isinstance(mask, Rows):
            return mask.attend(q_BHTE, k_BKSE, v_BKSE, shares_keys=self.shares_keys)
        out = F.scaled_dot_product_attention(
            q_BHTE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=mask is None and T > 1, enable_gqa=self.shares_keys
        )
        return out.transpose(1, 2).reshape(B, T, -1)


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        D, M = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, M, bias=config.mlp_bias)
        self.up_proj = nn.Linear(D, M, bias=config.mlp_bias)
        self.down_proj = nn.Linear(M, D, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask, layer_function: "LayerFunction | None" = None
    ) -> Tensor:
        """layer_function: a backend's computation of this layer; it runs in here, so that hooks see the call."""
        if layer_function is not None:
            return layer_function(self, x, mask)
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


LayerFunction = Callable[[Layer, Tensor, Mask], Tensor]  # layer, its input [B, T, D], mask -> its output


class Backbone(nn.Module):
    """Embedding, layers and final norm: tokens to hidden states."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """Tokens to hidden states; `lm_head` turns those into logits, a chunk at a time, in model/vocab/token_stats."""

    cos: Tensor
    sin: Tensor
    finish: Callable[[Tensor], Tensor] | None = (
        None  # what the model does to its logits after lm_head, such as a soft cap
    )
    takes_rows = True  # whether its mask may be Rows
    adapters_added: int = 0  # counts calls that added adapters, for caches to notice
    compute_dtype: torch.dtype | None = None  # if another than that of its weights
    backends: tuple[str, ...] | None = (
        None  # use these wherever they can compute; None: where they are faster; (): plain code
    )

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotations(min(config.max_position_embeddings, TABLE), device=self.device)
        self.apply(self._init)
        depth_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        for name, module in self.named_modules():  # the residual stream's variance shall not grow with depth (GPT-2)
            if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
                nn.init.normal_(module.weight, std=depth_std)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def rotations(self, positions: int, *, device: torch.device | None = None) -> None:
        """Make the tables of cosines and sines for this number of positions."""
        with torch.inference_mode(
            False
        ):  # the sampler may make them first, and the learner differentiates through them
            for name, table in zip(("cos", "sin"), rope_tables(self.config, positions), strict=True):
                self.register_buffer(name, table.to(device), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.lm_head.weight is self.model.embed_tokens.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]"""
        if self.finish is None:
            return self.lm_head(hidden)
        return self.finish(F.linear(hidden, self.lm_head.weight))

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask = None,
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """int64 [B, T] -> hidden states [B, T, D].

        positions: int64 [B, T]; by default they count up.
        mask: bool, broadcastable to [B, 1, T, S], True where a token attends; by default causal. Rows: `tokens` is one
        list that several rows are made of.
        checkpoint_layers: keep only each layer's input for the backward pass and recompute the rest.
        """
        x = self.model.embed_tokens(tokens)
        return self.from_embeddings(
            x, tokens=tokens, positions=positions, mask=mask, checkpoint_layers=checkpoint_layers
        )

    def from_embeddings(
        self,
        x: Tensor,
        *,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Mask = None,
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """The layers and the final norm, [B, T, D] -> [B, T, D]; tokens: those that x embeds."""
        cos, sin = self._rope(x.shape[1], positions)
        given = Pass(x=x, cos=cos, sin=sin, mask=mask, checkpoint_layers=checkpoint_layers, tokens=tokens)
        backend = choose_backend(self, given)
        return self.each_layer(given) if backend is None else backend.hidden_states(self, given)

    def each_layer(self, given: "Pass", layer_function: LayerFunction | None = None) -> Tensor:
        """One layer after the other, then the final norm; layer_function: a backend's computation of a layer."""
        x, rope = given.x, (given.cos, given.sin)
        if layer_function is None:
            rope = given.cos.to(x.dtype), given.sin.to(x.dtype)
        windows = self.config.windows or (0,) * len(self.model.layers)
        masks = {w: apply_window(given.mask, w, x.shape[1], device=x.device) for w in set(windows)}
        for layer, window in zip(self.model.layers, windows, strict=True):
            if given.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, rope, masks[window], layer_function, use_reentrant=False)
            else:
                x = layer(x, rope, masks[window], layer_function)
        return self.model.norm(x)

    def _rope(self, columns: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the columns, or of the given positions. No position is greater than its column."""
        context = self.config.max_position_embeddings
        if positions is None and columns > context:  # a slice would come back short and broadcast
            raise HoneError(
                f"a sequence of {columns} tokens, the model's context is {context}: "
                "shorten it, or use a model with a longer context"
            )
        if min(columns, context) > len(self.cos):
            self.rotations(min(max(columns, 2 * len(self.cos)), context), device=self.device)
        if positions is None:
            return self.cos[:columns], self.sin[:columns]
        return self.cos[positions][:, None], self.sin[positions][:, None]


def apply_window(mask: Mask, window: int, columns: int, *, device: torch.device) -> Mask:
    """The mask with a sliding window; 0 or a window of all columns changes nothing.

    The tokens of a row are contiguous, so columns are as far apart as positions.
    """
    if not window or columns <= window:
        return mask
    if isinstance(mask, Rows):
        return replace(mask, window=window)
    column = torch.arange(columns, device=device)
    distance = column[:, None] - column
    near = distance < window
    return near & (distance >= 0) if mask is None else mask & near


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """The inputs of a decoder's layers."""

    x: Tensor  # [B, T, D]  embeddings
    cos: Tensor  # float32 [T, E] or [B, 1, T, E]  of each token's rotary angles
    sin: Tensor
    mask: Mask = None
    checkpoint_layers: bool = False
    tokens: Tensor | None = None  # int64 [B, T]  those that x embeds, if known

    def rotation(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token, row after row, [B T, E]."""
        B, T, _ = self.x.shape
        cos, sin = (t if dtype is None else t.to(dtype) for t in (self.cos, self.sin))
        return tuple(t.expand(B, 1, *t.shape[-2:]).reshape(B * T, -1) for t in (cos, sin))  # pyright: ignore


class LayerBackend(Backend):
    """Computes the layers of a decoder."""

    def covers(self, decoder: Decoder, given: Pass) -> str | None:
        """The reason why it cannot compute this pass, or None if it can."""
        raise NotImplementedError

    def hidden_states(self, decoder: Decoder, given: Pass) -> Tensor:
        """What `Decoder.each_layer` defines, [B, T, D]."""
        raise NotImplementedError

    def reads_many_rows(self, model: nn.Module) -> bool:
        """Whether the cost of a token does not grow with the number of rows in a pass."""
        return False

    def same_bits_as_sampler(self, model: nn.Module) -> bool:
        """Whether log-probs can equal the sampler's to the last bit."""
        return False


def choose_backend(decoder: Decoder, given: Pass) -> LayerBackend | None:
    """The first backend that covers the pass; None: plain code."""
    if not differentiates_once():
        return None
    allowed = decoder.backends
    for backend in backends_for(LayerBackend):
        if (allowed is None or backend.name in allowed) and backend.covers(decoder, given) is None:
            return backend
    return None


def reads_many_rows(model: nn.Module) -> bool:
    """Whether some backend computes a token at a cost that does not grow with the number of rows in a pass."""
    return any(backend.reads_many_rows(model) for backend in backends_for(LayerBackend))


def same_bits_as_sampler(model: nn.Module) -> bool:
    """Whether some backend can give this model's log-probs equal to the sampler's, to the last bit."""
    return any(backend.same_bits_as_sampler(model) for backend in backends_for(LayerBackend))
