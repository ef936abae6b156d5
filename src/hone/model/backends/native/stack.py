"""All layers of a small decoder on a CPU as one function with its gradient, by stack.cpp.

The backward pass reads what that of layer.py reads. Shapes: U tokens of all rows, D hidden.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hone.model.backends.native.calls import Segments
from hone.model.decoder import Decoder, Layer
from hone.model.kernels.cpp.library import call, library
from hone.model.kernels.fused_weights import base_linear

KEPT = 5  # free workspaces: for backward passes, weights in panels, words, parts of gradients
SPARE = 8  # a workspace is 1 / SPARE larger than asked, for a next pass with a few more tokens


class Workspace:
    """Memory for numbers, which is free again when nothing refers to it.

    A pass uses the memory of the pass before: the system clears each page when it is used for the first time.
    """

    _free: list[np.ndarray] = []  # noqa: RUF012  of all passes, the last one freed at the end

    def __init__(self, numbers: int, dtype: torch.dtype) -> None:
        size = numbers * dtype.itemsize
        fits = [i for i, memory in enumerate(self._free) if size <= memory.nbytes <= 2 * size]
        best = min(fits, key=lambda i: self._free[i].nbytes, default=None)
        self._memory = np.empty(size + size // SPARE, dtype=np.uint8) if best is None else self._free.pop(best)

    @property
    def place(self) -> ctypes.c_void_p:
        """Where it begins."""
        return ctypes.c_void_p(self._memory.ctypes.data)

    def __del__(self) -> None:
        self._free.append(self._memory)
        del self._free[:-KEPT]


# pyright: reportIncompatibleMethodOverride=false


TOGETHER = 200  # tokens of a bundle, about: their numbers fit a core's cache
SMALL = 16 << 20  # bytes of weights; more are too many for gradients of each thread's own
UNEVEN = 1.5  # a thread may have at most so many times the average number of tokens
TILE = 4  # tokens of a tile: SHORT of panels.h
OFTEN = 3  # times as many tokens as words, from which it is faster to compute each word once


class CWeights(ctypes.Structure):
    """Layer of stack.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("before", "qkv", "o", "after", "gate_up", "down")]


class CStack(ctypes.Structure):
    """As in stack.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "D", "M", "H", "K", "E")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("threads", "bundles")),
        ("layer", ctypes.POINTER(CWeights)),
        *((name, ctypes.c_void_p) for name in ("row", "ending", "rows", "first", "count", "share", "order")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        ("words", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("id", "embedding")),
    ]


@dataclass(frozen=True, slots=True)
class Bundles:
    """Groups of rows in bundles, with tokens numbered within the bundle, and each thread's share of the bundles."""

    row: np.ndarray  # int64 [R, 5]  as in Segments, relative to the bundle's first token
    ending: np.ndarray  # the same of the last layer
    rows: np.ndarray  # int64 [B + 1]  where a bundle's rows begin
    first: np.ndarray  # int64 [B + 1]  its first token
    count: np.ndarray  # int64 [B]  how many it has
    share: np.ndarray  # int64 [threads + 1]  where a thread's bundles begin
    order: np.ndarray  # int64 [first[-1]]  each token's index in the list

    @staticmethod
    def of(segments: Segments, ending: Segments, threads: int) -> "Bundles | None":
        """None if the threads' shares would be too uneven."""
        rows, own, count = segments.rows, segments.rows[:, 0], segments.rows[:, 1]
        before = np.concatenate([[0], np.cumsum(count)])  # tokens of the rows before each
        starts = _bundle_starts(before[segments.groups], segments.groups, threads)
        tokens = np.diff(before[starts])
        first = np.concatenate([[0], np.cumsum(-(-tokens // TILE) * TILE)])
        share = _shares(tokens, threads)
        summed = np.concatenate([[0], np.cumsum(tokens)])
        few = summed[-1] <= threads * TOGETHER  # so few that waiting does not matter
        if not few and np.diff(summed[share]).max() * threads > UNEVEN * summed[-1]:
            return None
        bundle = np.repeat(np.arange(len(tokens)), np.diff(starts))  # of each row
        local = before[:-1] - before[starts[bundle]]
        moved = rows.copy()
        moved[:, 0] = local
        leader = segments.groups[np.searchsorted(segments.groups, np.arange(len(rows)), side="right") - 1]
        moved[:, 2] = local[leader]
        order = np.zeros(first[-1], dtype=np.int64)
        for at, length, begin in zip((first[bundle] + local).tolist(), count.tolist(), own.tolist(), strict=True):
            order[at : at + length] = np.arange(begin, begin + length)
        last = moved.copy()
        last[:, 4] = ending.rows[:, 4]
        return Bundles(moved, last, starts, first, tokens, share, order)


def _bundle_starts(tokens: np.ndarray, groups: np.ndarray, threads: int) -> np.ndarray:
    """The first rows of bundles of about equal size, and the end; tokens: before each group."""
    number = threads * max(2, tokens[-1] // (threads * TOGETHER))
    even = tokens[-1] * np.arange(1, number) / number
    after = np.searchsorted(tokens, even)
    nearest = np.where(even - tokens[after - 1] < tokens[after] - even, after - 1, after)
    return np.unique(np.concatenate([[0], groups[nearest], groups[-1:]]))


def _shares(tokens: np.ndarray, threads: int) -> np.ndarray:
    """Where each thread's bundles begin, such that all threads have about the same number of tokens."""
    middle = np.cumsum(tokens) - tokens / 2
    ends = np.searchsorted(middle, np.arange(1, threads) * tokens.sum() / threads)
    return np.concatenate([[0], ends, [len(tokens)]]).astype(np.int64)


def layers_of(decoder: Decoder) -> list[Layer]:
    """The layers whose class is Layer, which FSDP changes."""
    return [layer for layer in decoder.model.layers if type(layer) is Layer]


def linears(layer: Layer) -> tuple[nn.Module, ...]:
    """In the order of stack.cpp's gradients."""
    a, m = layer.self_attn, layer.mlp
    return a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has a hook."""
    m = module
    return bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def parameters(layer: Layer) -> list[Tensor] | None:
    """A layer's parameters in the order of stack.cpp's gradients, or None if it has adapters, biases or hooks."""
    found = linears(layer)
    if has_hooks(layer):
        return None
    if any(type(x) is not nn.Linear or x.bias is not None for x in found):
        return None
    return [
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        *(base_linear(x).weight for x in found),
    ]


def stackable(decoder: Decoder, dtype: torch.dtype) -> list[list[Tensor]] | None:
    """The parameters of each layer if stack.cpp computes them: few, of this dtype, whole panels; else None."""
    found, config = library(), decoder.config
    assert not isinstance(found, str)
    panel = found.hone_panel_float64() if dtype == torch.float64 else found.hone_panel_float32()
    heads, E = config.num_attention_heads, config.head_dim
    sizes = config.hidden_size, config.intermediate_size, heads * E, (heads + 2 * config.num_key_value_heads) * E
    layers = layers_of(decoder)
    if any(size % panel for size in sizes) or len(layers) != len(decoder.model.layers):
        return None
    weights = list[list[Tensor]]()
    for layer in layers:
        own = parameters(layer)
        if own is None or any(p.dtype != dtype or not p.is_contiguous() for p in own):
            return None
        weights.append(own)
    return weights if sum(p.nbytes for own in weights for p in own) <= SMALL else None


def runs_by_bundle(decoder: Decoder) -> bool:
    """Whether stack.cpp computes the decoder's layers, for any number of tokens."""
    asked = decoder.backends is None or "native" in decoder.backends
    if not asked or decoder.device.type != "cpu" or isinstance(library(), str):
        return False
    config, dtype = decoder.config, decoder.lm_head.weight.dtype
    attends = not config.qk_norm and not any(config.windows or ())  # as layer.py's layers do
    return dtype == torch.float32 and attends and stackable(decoder, dtype) is not None


@dataclass(frozen=True, slots=True)
class StackPass:
    """The arguments of stack.cpp, and the tensors that must stay in memory during the call."""

    model: CStack
    bundles: Bundles
    alive: tuple[Any, ...]
    tokens: int  # of the list
    tensors: list[Tensor]  # parameters of all layers
    weights: int  # how many numbers they are
    kept: int  # numbers for the backward pass
    padded_words: int = 0  # words of the embedding, rounded up to whole tiles; 0: the layers read the stream

    @staticmethod
    def of(decoder: Decoder, layers: list[list[Tensor]], bundles: Bundles, cos: Tensor, sin: Tensor) -> "StackPass":
        """layers: what `stackable` gave."""
        config, weights = decoder.config, list[CWeights]()
        for own in layers:
            before, after, q, _, _, o, gate, _, down = (p.data_ptr() for p in own)
            weights.append(CWeights(before, q, o, after, gate, down))
        D, M, H, K, E = (
            config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads,
            config.head_dim,
        )  # fmt: skip
        array, b = (CWeights * len(weights))(*weights), bundles
        places = (x.ctypes.data for x in (b.row, b.ending, b.rows, b.first, b.count, b.share, b.order))
        model = CStack(
            len(weights), D, M, H, K, E, layers_of(decoder)[0].input_layernorm.eps, len(b.share) - 1, len(b.count),
            array, *places, cos.data_ptr(), sin.data_ptr(), 0, None, None,
        )  # fmt: skip
        width = (H + 2 * K) * E
        kept = int(b.first[-1]) * len(weights) * (2 * D + width + H * E + H + 2 * M)
        tensors, numbers = [p for own in layers for p in own], len(weights) * D * (width + H * E + 3 * M + 2)
        return StackPass(model, bundles, (array, cos, sin), len(cos), tensors, numbers, kept)

    def from_embedding(self, weight: Tensor, ids: Tensor) -> "StackPass":
        """The same for tokens given as words: the first layer's products are computed once for each word."""
        ids, model, found = ids.flatten().long().contiguous(), CStack.from_buffer_copy(self.model), library()
        assert not isinstance(found, str)
        model.words, model.id, model.embedding = len(weight), ids.data_ptr(), weight.data_ptr()
        tile = found.hone_tall()
        return replace(self, model=model, alive=(*self.alive, ids, weight), padded_words=-(-len(weight) // tile) * tile)

    @property
    def first_layer_numbers(self) -> int:
        """Queries, keys and values of all words in the first layer, in numbers; 0: it reads the stream."""
        return self.padded_words * (self.model.H + 2 * self.model.K) * self.model.E

    @property
    def parts(self) -> int:
        """The size of what stack.cpp's `backward` calls parts."""
        stream, threads = self.padded_words * self.model.D, self.model.threads
        return (threads - 1) * self.weights + threads * (self.first_layer_numbers + stream) + 2 * stream


def repeats_tokens(embedding: nn.Module, tokens: Tensor) -> bool:
    """Whether there are OFTEN times as many tokens as words, and the embedding is a plain lookup."""
    if type(embedding) is not nn.Embedding or has_hooks(embedding) or not embedding.weight.is_contiguous():
        return False
    if embedding.padding_idx is not None or embedding.max_norm is not None:
        return False
    if embedding.scale_grad_by_freq or embedding.sparse:
        return False
    return tokens.numel() >= OFTEN * len(embedding.weight)


def run_stack(x_BTD: Tensor, given: StackPass, *, embedding: Tensor | None = None) -> Tensor:
    """The layers' output; zero for tokens that are not needed. embedding: the table, after `from_embedding`."""
    x = x_BTD.reshape(-1, x_BTD.shape[-1]).contiguous() if embedding is None else embedding
    if not torch.is_grad_enabled():
        return _forward(given, x, None).view(x_BTD.shape)
    y = _Stack.apply(x, given, *given.tensors)
    return y.view(x_BTD.shape)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def _forward(given: StackPass, x: Tensor, kept: Workspace | None) -> Tensor:
    """kept: memory for the backward pass, or None."""
    y, panels = x.new_empty(given.tokens, x.shape[1]), Workspace(given.weights, x.dtype)
    first = Workspace(given.first_layer_numbers, x.dtype) if given.first_layer_numbers else None
    places = (None if memory is None else memory.place for memory in (panels, kept, first))
    call("stack", x, ctypes.byref(given.model), x, y, *places)
    return y


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: StackPass, *tensors: Tensor) -> Tensor:
        ctx.given, ctx.kept = given, Workspace(given.kept, x.dtype)
        # autograd then notices if one is changed in place
        ctx.save_for_backward(*tensors, *([x] if given.first_layer_numbers else []))
        ctx.shape = x.shape
        return _forward(given, x, ctx.kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        given, dy = ctx.given, dy.contiguous()
        dx, grad = dy.new_empty(ctx.shape), dy.new_empty(given.weights)
        panels, parts = Workspace(given.weights, dy.dtype), Workspace(given.parts, dy.dtype)
        kept, model = ctx.kept.place, ctypes.byref(given.model)
        call("stack_grad", dy, model, dy, dx, panels.place, kept, grad, parts.place)
        return dx, None, *_split(grad, ctx.saved_tensors[: len(given.tensors)], ctx.needs_input_grad[2:])


def _split(grad: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Each tensor's part of the gradient."""
    parts = grad.split([t.numel() for t in tensors])
    return [part.view(t.shape) if want else None for part, t, want in zip(parts, tensors, wanted, strict=True)]
