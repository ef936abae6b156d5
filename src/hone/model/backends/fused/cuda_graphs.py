"""The layers of a training pass as two CUDA graphs, forward and backward: two launches in place of a thousand.

A layer of a small model takes less time on the GPU than the host needs to launch it. A pass is recorded once for each
of a few round sizes (graph_memory.py) and then replayed. All recordings keep what their backward passes read in the
same memory. So only one of them can wait for its backward pass; another pass meanwhile runs without a graph. On a CPU
nothing is recorded: with `decoder.backends = ("graphs",)` tests run the same steps without recording.
"""

# pyright: reportIncompatibleMethodOverride=false
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hone.model.backends.fused.graph_memory import GraphInputs, GraphWeights, pad_to_size, size_of
from hone.model.backends.fused.streams import stream_number
from hone.model.backends.registry import differentiates_once
from hone.model.decoder import Decoder, Layer, Mask
from hone.model.kernels.fused_weights import gate_up, qkv
from hone.model.kernels.recording import record
from hone.model.layout import Lines, PassBackend
from hone.model.lora import LoRALinear
from hone.model.rows import Rows, Tiles

WORK = 1 << 39  # tokens times a layer's weights, beyond which the GPU is slower than the host
TIMES = 3  # a size is recorded when it comes for this time
SIZES = 24  # recordings at most: some for passes with gradients, and for each stream of those without


class Lease:
    """Held by a pass whose backward pass may still come."""

    spent = False


@dataclass(slots=True)
class Graphs:
    """The recordings of one decoder."""

    seen: Counter[Hashable] = field(default_factory=Counter[Hashable])
    passes: OrderedDict[Hashable, "RecordedPass"] = field(default_factory=OrderedDict[Hashable, "RecordedPass"])
    pools: dict[tuple[bool, int], Any] = field(default_factory=dict[tuple[bool, int], Any])  # by gradient and stream
    # memory for the weights' gradients, which all sizes share
    totals: dict[Hashable, list[Tensor]] = field(default_factory=dict[Hashable, list[Tensor]])
    lease: "weakref.ref[Lease] | None" = None
    full: bool = False  # memory was too short for a recording
    made_of: tuple[int, ...] = ()  # the ids of the modules that have the following weights and adapters
    weights: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    adapters: list[LoRALinear] = field(default_factory=list[LoRALinear])

    def busy(self) -> bool:
        """Whether the backward pass of an earlier pass may still come."""
        held = self.lease() if self.lease is not None else None
        return held is not None and not held.spent


_known: "weakref.WeakKeyDictionary[Decoder, Graphs]" = weakref.WeakKeyDictionary()


class CudaGraphs(PassBackend):
    """Replays passes for which the host is slower than the GPU."""

    name = "graphs"

    def covers(self, decoder: Decoder, lines: Lines) -> str | None:
        """The reason why it cannot replay the pass, or None: a recording would be slower, or would miss something."""
        weight, allowed, tokens, mask = decoder.model.embed_tokens.weight, decoder.backends, lines.tokens, lines.mask
        if (not weight.is_cuda if allowed is None else self.name not in allowed) or not tokens.numel():
            return "not asked for, or no token"
        if not differentiates_once():
            return "gradients are differentiated again"
        if weight.is_cuda and (weight.dtype not in (torch.bfloat16, torch.float16) or not _has_fused_layers(decoder)):
            return f"plain layers, or weights in {weight.dtype}"
        if isinstance(mask, Tensor) or not hasattr(decoder.model, "layers"):
            return "a mask of its own, or layers of another kind"
        if weight.is_cuda and isinstance(mask, Rows) and not isinstance(mask.by, Tiles):
            return "tables, which are other ones each time"
        first = cast(Layer, decoder.model.layers[0])
        if first._forward_pre_hooks or first._forward_hooks or torch.is_inference_mode_enabled():
            return "hooks of layers: sharded weights come and go"
        if allowed is None and tokens.numel() * sum([p.numel() for p in first.parameters()]) > WORK:
            return "so many tokens that the GPU is slower than the host"
        graphs = _known.setdefault(decoder, Graphs())
        if graphs.full or (_needs_grad(decoder) and graphs.busy()):
            return "memory is short, or the gradient of an earlier pass may still be asked for"
        return None

    def hidden_states(self, decoder: Decoder, lines: Lines) -> Tensor:
        tokens, positions, mask, graphs = lines.tokens, lines.positions, lines.mask, _known[decoder]
        grad = _needs_grad(decoder)
        if isinstance(mask, Rows):
            assert positions is not None, "a list of rows has them"
            tokens, positions, mask = pad_to_size(tokens, positions, mask)
        x = decoder.model.embed_tokens(tokens)
        key = ((size_of(x, mask), stream_number()), grad, x.requires_grad, *_state(decoder, graphs))
        found = _recorded(decoder, graphs, key, x, positions, mask)
        if found is None:  # padded too: a resumed run, which has no recording yet, then gets the same bits
            return decoder.from_embeddings(x, positions=positions, mask=mask)
        found.inputs.take(x.detach(), positions, mask)
        if not grad:
            return found.run().clone()
        lease = Lease()
        graphs.lease = weakref.ref(lease)
        return cast(Tensor, _Replayed.apply(found, lease, x, *found.weights))


def _needs_grad(decoder: Decoder) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in decoder.parameters())  # any() stops at the first


def _has_fused_layers(decoder: Decoder) -> bool:
    return decoder.backends is None or "fused" in decoder.backends


def _state(decoder: Decoder, graphs: Graphs) -> tuple[Hashable, ...]:
    """The addresses of all weights, which are trained, which adapters are on: a recording depends on these."""
    made_of = (decoder.adapters_added, *map(id, decoder.model.layers[0].modules()))
    if graphs.made_of != made_of:  # the walk through all modules is the slowest part of this function
        graphs.made_of, graphs.weights = made_of, list(decoder.parameters())
        graphs.adapters = [m for m in decoder.modules() if isinstance(m, LoRALinear)]
    places = tuple([(p.data_ptr(), p.requires_grad) for p in graphs.weights])
    return decoder.cos.data_ptr(), places, tuple([m.selected if m.enabled else None for m in graphs.adapters])


def _recorded(
    decoder: Decoder, graphs: Graphs, key: tuple[Hashable, ...], x: Tensor, positions: Tensor | None, mask: Mask
) -> "RecordedPass | None":
    if key in graphs.passes:
        graphs.passes.move_to_end(key)
        return graphs.passes[key]
    graphs.seen[key[:3]] += 1
    if graphs.seen[key[:3]] < (TIMES if decoder.backends is None else 1) or graphs.busy():
        return None
    if x.is_cuda and _make_adjacent(decoder):
        key = (*key[:3], *_state(decoder, graphs))
    while len(graphs.passes) >= SIZES:
        longest_unused, _ = graphs.passes.popitem(last=False)
        graphs.seen.pop(cast(tuple[Hashable, ...], longest_unused)[:3], None)
    try:
        graphs.passes[key] = RecordedPass(decoder, graphs, x, positions, mask, grad=bool(key[1]))
    except torch.OutOfMemoryError:
        graphs.full = True
        torch.cuda.empty_cache()
        return None
    return graphs.passes[key]


def _make_adjacent(decoder: Decoder) -> bool:
    """Move weights that read the same input next to each other. Returns whether any moved."""
    before = [p.data_ptr() for p in decoder.parameters()]
    for layer in decoder.model.layers:
        qkv(cast(Layer, layer).self_attn)
        gate_up(cast(Layer, layer).mlp)
    return before != [p.data_ptr() for p in decoder.parameters()]


class RecordedPass:
    """One size, forward and backward, recorded."""

    def __init__(
        self, decoder: Decoder, graphs: Graphs, x: Tensor, positions: Tensor | None, mask: Mask, *, grad: bool
    ) -> None:
        self.decoder, self.leaves = weakref.proxy(decoder), GraphWeights(decoder)
        self.inputs = GraphInputs(x, positions, mask, grad=grad and x.requires_grad)
        self.tape: Tensor | None = None
        self.weights, self.totals = list[nn.Parameter](), list[Tensor]()
        self.wanted = list[Tensor]()  # the tensors whose gradients are computed
        self.inputs.take(x.detach(), positions, mask)
        with torch.set_grad_enabled(grad):
            (hidden,) = self._forward()
        self.given, self.backward = torch.empty_like(hidden), None
        pool = graphs.pools.setdefault((grad, stream_number()), torch.cuda.graph_pool_handle() if x.is_cuda else None)
        if grad:
            self._find_weights(graphs)
        self.tape = None
        with torch.set_grad_enabled(grad):
            self.forward = record(self._forward, [hidden], pool)
        if grad:
            self.backward = record(self._backward, None, pool)
        if x.is_cuda:
            self.tape = None

    def run(self) -> Tensor:
        """The hidden states for the numbers in `inputs`. The next pass overwrites them."""
        out = self.forward.replay()
        assert out is not None
        return out[0]

    def _forward(self) -> Sequence[Tensor]:
        inputs = self.inputs
        with self.leaves.substitute():
            tape = self.decoder.from_embeddings(inputs.x, positions=inputs.positions, mask=inputs.mask)
        self.tape = tape
        return [tape.detach()]

    def _find_weights(self, graphs: Graphs) -> None:
        """Find the weights that get a gradient, and its memory, which all sizes share. This launch also compiles."""
        assert self.tape is not None
        leaves = [leaf for _, leaf in self.leaves.trained]
        x = [self.inputs.x] if self.inputs.x.requires_grad else []
        found = torch.autograd.grad(self.tape, [*leaves, *x], torch.zeros_like(self.tape), allow_unused=True)
        used = [both for both, g in zip(self.leaves.trained, found, strict=False) if g is not None]
        self.weights, self.wanted = [p for p, _ in used], [*x, *(leaf for _, leaf in used)]
        place = tuple(p.data_ptr() for p in self.weights)
        if place not in graphs.totals:
            graphs.totals = {place: [torch.empty_like(p).detach() for p in self.weights]}
        self.totals = graphs.totals[place]

    def _backward(self) -> None:
        """Write the weights' gradients to `totals`, and that of x, if it has one, over the output's in `given`."""
        assert self.tape is not None
        found = torch.autograd.grad(self.tape, self.wanted, self.given)
        given = [self.given] if self.inputs.x.requires_grad else []
        torch._foreach_copy_([*given, *self.totals], list(found))  # pyright: ignore


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: RecordedPass, lease: Lease, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.found, ctx.lease = found, lease
        with torch.enable_grad():
            return found.run().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        found: RecordedPass = ctx.found
        if ctx.lease.spent:
            raise RuntimeError(
                'a replayed pass has only one backward pass: leave "graphs" out of decoder.backends for several'
            )
        found.given.copy_(given)
        assert found.backward is not None
        with torch.enable_grad():
            found.backward.replay()
        ctx.lease.spent = True
        # copies, since the next replay overwrites them; a product with 1.0 copies all in one kernel
        copies = torch._foreach_mul(found.totals, 1.0) if found.totals else []  # pyright: ignore
        return None, None, found.given.clone() if ctx.needs_input_grad[2] else None, *copies
