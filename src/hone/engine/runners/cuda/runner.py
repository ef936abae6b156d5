"""The runner on Triton kernels: paged memory, launches captured as CUDA graphs, and no waiting for the device."""

# Triton's constexpr takes plain numbers:
# pyright: reportArgumentType=false
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from hone.engine.params import Uses
from hone.engine.runner import LaunchResult, PromptChunk, Runner, Switch, Ticket
from hone.engine.runners.cuda import large
from hone.engine.runners.cuda.attention_launch import (
    BLOCK,
    KVPool,
    PromptPlaces,
    RowPlaces,
    attend_prompts,
    attend_rows,
)
from hone.engine.runners.cuda.draw import launch as draw
from hone.engine.runners.cuda.draw_state import STOPS
from hone.engine.runners.cuda.prefill import copy_blocks
from hone.engine.runners.cuda.prompts import PagedChunk, cut, lay, length, passes
from hone.engine.runners.cuda.rows import DeviceRows
from hone.engine.runners.cuda.step import Buffers, Launcher
from hone.engine.runners.cuda.weights import LayerTensors, addresses, rank_of
from hone.engine.runners.registry import Needs, RunnerBackend, column_bytes, too_little_memory
from hone.engine.runners.torch.runner import AdapterSwitch
from hone.model.decoder import Decoder, Layer
from hone.model.kernels.recording import Recording
from hone.model.kernels.tiles import ROWS, cdiv

LADDER = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # rows of the captured graphs
# prompt tokens of the captured graphs: a launch costs what its size costs, however few of them are real
PROMPTS = (128, 256, 512, 1_024, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192, 12_288, 16_384)
LINES = 256  # the most prompts in one pass
LAG = 2  # launches that the host is ahead of what it has read


class CudaRunner(AdapterSwitch):
    """Blocks of 32 columns; rows share the blocks of a prompt, but for its last token, which the first decode reads.

    On a CPU it runs in Triton's interpreter, launch by launch, which is how it is tested without a GPU.
    """

    block_size, held_back = BLOCK, 1
    most_stops: int | None = STOPS
    records_support = False  # its kernels keep no list of what they cut
    prefill_tokens, prefill_launches = 4_096, 4

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int,
        capacity: int,
        num_blocks: int,
        switch: Switch | None = None,
        invariant: bool = False,
    ) -> None:
        self.decoder, self.switch, self.invariant, self.adapter = decoder, switch, invariant, None
        self.max_rows, self.capacity, self.num_blocks = max_rows, capacity, num_blocks
        config, weight, device = decoder.config, decoder.model.embed_tokens.weight, decoder.device
        self.on_gpu = device.type == "cuda"
        self.hopper = self.on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)
        self.lag = LAG if self.on_gpu else 0
        self.keeps_written = not invariant  # rows and prompts are read by kernels that add in different orders
        width = cdiv(capacity, BLOCK)
        with torch.inference_mode():
            self.rows = DeviceRows(max_rows, config.vocab_size, width, device)
            self.memory = KVPool.of(config, blocks=num_blocks, rows=max_rows, positions=capacity, like=weight)
            self.prompt_tokens = min(PROMPTS[-1], max(PROMPTS[0], max_rows * capacity))
            rank, wide = rank_of(decoder)
            self.adapts = rank > 0
            tokens = max(self.prompt_tokens, max_rows)
            self.buffers = Buffers.of(
                config, tokens, rank=rank, wide=wide or self._large(self.prompt_tokens), like=weight
            )
            rows = cdiv(max_rows, ROWS) * ROWS
            self.logits = torch.zeros(rows, config.vocab_size, device=device)
            self.prompts = torch.zeros(length(self.prompt_tokens, LINES, width), dtype=torch.int32, device=device)
        self.graphs: dict[tuple[str | None, Hashable], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None  # graphs run one after the other
        self.at: dict[str | None, tuple[int, ...]] = {}
        self.weights: dict[str | None, list[LayerTensors]] = {}

    def use(self, adapter: str | None) -> None:
        """From now on compute with this adapter; None: the weights as they are. HoneError where there is none."""
        super().use(adapter)
        self._follow()

    def _follow(self) -> None:
        """Graphs hold addresses: those of weights that have moved are captured anew."""
        if not self.adapts and self.at.get(self.adapter) == addresses(self.decoder):
            return
        with self.adapted():
            layers = [LayerTensors.of(cast(Layer, layer)) for layer in self.decoder.model.layers]
        at = (*addresses(self.decoder), *(a.A.data_ptr() for w in layers for a in w.adapters))
        if at != self.at.get(self.adapter):
            self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] != self.adapter}
            self.weights[self.adapter], self.at[self.adapter] = layers, at

    def prefill(self, parts: Sequence[PromptChunk]) -> Ticket:
        """Read the parts, except each prompt's last token. Their seats begin."""
        with torch.inference_mode():
            for pieces in passes(parts, self.prompt_tokens):
                for first in range(0, len(pieces), LINES):
                    self._read(pieces[first : first + LINES])
            self._share(parts)
            self.rows.seat(parts)
        return EmptyTicket()

    def _read(self, pieces: Sequence[PagedChunk]) -> None:
        count = sum(piece.end - piece.start for piece in pieces)
        # a captured graph is launched at its own size; the interpreter takes them as they are
        size = min(s for s in (*PROMPTS, self.prompt_tokens) if s >= count) if self.on_gpu else count
        lines = LINES if self.on_gpu else len(pieces)
        laid = lay(pieces, size=size, prompts=lines, width=self.rows.table.shape[1])
        self.prompts[: len(laid.whole)].copy_(self.rows.staged(laid.whole), non_blocking=True)
        self._launch(("read", size), lambda: self._read_now(size, lines))

    def _read_now(self, size: int, lines: int) -> None:
        weights = self.weights[self.adapter]
        launcher = self._launcher(size)
        (token, position, owner), tiles, table = cut(self.prompts, size, lines, self.rows.table.shape[1])
        at = PromptPlaces(table=table, position=position, owner=owner, tiles=tiles)
        parts = launcher.embed(self.decoder.model.embed_tokens.weight, token, weights[0].gain)
        for i, w in enumerate(weights):
            attend = partial(attend_prompts, launcher, self.memory, w, i, at)
            if self._large(size):
                large.large_layer(launcher, w, attend)
            else:
                parts = launcher.layer(w, parts, self._gain_after(i), attend)

    def _large(self, tokens: int) -> bool:
        """Whether cuBLAS reads so many prompt tokens; it may add in another order for another number of them."""
        return tokens >= large.TOKENS and not self.invariant

    def _share(self, parts: Sequence[PromptChunk]) -> None:
        """Every seat gets its own copy of the block that the prompt leaves half filled."""
        pairs: list[tuple[int, int]] = []
        for part in parts:
            at, filled = divmod(len(part.prompt) - 1, BLOCK)  # the blocks before are everybody's
            if filled:
                mine = part.blocks[at]
                pairs += [(mine, seat.blocks[at]) for seat in part.seats if seat.blocks[at] != mine]
        if pairs:
            size = self.memory.pool[0].numel()
            where = self.rows.sent(np.array(pairs, dtype=np.int32))
            copy_blocks[(len(pairs), cdiv(size, 4096))](self.memory.pool, where, size, BLOCK=4096)

    def decode(self, rows: int) -> Ticket:
        """One more token for each row in [0, rows) that is seated and has not ended."""
        size = min(LADDER[bisect_left(LADDER, rows)], self.max_rows) if rows <= LADDER[-1] else self.max_rows
        uses = int(np.bitwise_or.reduce(self.rows.uses[:rows]))
        how = (bool(uses & Uses.RESTRICT), bool(uses & Uses.PENALTY), bool(uses & Uses.BIAS))
        with torch.inference_mode():
            self._launch(("write", size, *how), lambda: self._write_now(size, *how))
            most = int(self.rows.tops[:rows].max(initial=0))
            return PendingTicket.of(self, rows, most)

    def _write_now(self, rows: int, restrict: bool, penalty: bool, bias: bool) -> None:
        """One step of the first rows."""
        weights, state, decoder = self.weights[self.adapter], self.rows.draw, self.decoder
        launcher = self._launcher(rows)
        at = RowPlaces(table=self.rows.table, position=state.position, active=state.active)
        parts = launcher.embed(decoder.model.embed_tokens.weight, state.token, weights[0].gain)
        for i, w in enumerate(weights):
            attend = partial(attend_rows, launcher, self.memory, w, i, at)
            parts = launcher.layer(w, parts, self._gain_after(i), attend)
        launcher.head(parts, decoder.model.norm.weight, decoder.lm_head.weight, self.logits)
        draw(self.logits, self.rows.draw, self.rows.wrote, rows, restrict=restrict, penalty=penalty, bias=bias)

    def _gain_after(self, layer: int) -> Tensor:
        """The gain of the norm that reads what this layer makes."""
        weights = self.weights[self.adapter]
        return weights[layer + 1].gain if layer + 1 < len(weights) else self.decoder.model.norm.weight

    def _launcher(self, rows: int) -> Launcher:
        return Launcher(
            config=self.decoder.config,
            buffers=self.buffers,
            rows=rows,
            invariant=self.invariant,
            pdl=self.hopper,
            tma=self.hopper,
        )

    def _launch(self, what: Hashable, now: Callable[[], None]) -> None:
        """Launch it as a graph, captured the first time. A launch before that compiles, which a capture may not."""
        if not self.on_gpu:
            now()
            return
        key = (self.adapter, what)
        if key not in self.graphs:
            saved = self.rows.numbers.clone()  # the launch that compiles is no step
            dense = None if self.rows.draw.seen is None else self.rows.draw.seen.clone()
            self.rows.draw.active.zero_()
            now()
            graph = Recording(now, self.pool).graph
            self.rows.numbers.copy_(saved)
            if dense is not None and self.rows.draw.seen is not None:
                self.rows.draw.seen.copy_(dense)
            self.graphs[key] = graph
        self.graphs[key].replay()

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Row `a` goes on as row `b`, free until now, for each (a, b)."""
        with torch.inference_mode():
            self.rows.move(moves)

    def stop(self, rows: Sequence[int]) -> None:
        """These rows write no more, whatever they were doing."""
        with torch.inference_mode():
            self.rows.stop(rows)


class EmptyTicket:
    """A launch that writes no token."""

    def read(self) -> LaunchResult:
        none = np.zeros(0)
        return LaunchResult(row=none.astype(np.int64), token=none.astype(np.int64), logp=none, raw=none, ended=none > 0)


@dataclass(frozen=True, slots=True)
class PendingTicket:
    """A launch whose results are on their way to the host."""

    rows: int
    numbers: Tensor  # int32 [4, R], on the host
    top: tuple[Tensor, Tensor] | None  # tokens and log-probs [rows, k], on the host
    arrived: torch.cuda.Event | None

    @staticmethod
    def of(runner: CudaRunner, rows: int, most: int) -> "PendingTicket":
        top = None
        if most:
            logits = runner.logits[:rows]
            value, token = logits.topk(min(most, logits.shape[1]), dim=-1)
            top = (_home(token), _home(value - logits.logsumexp(-1, keepdim=True)))
        numbers = _home(runner.rows.out)
        arrived = None
        if runner.on_gpu:
            arrived = torch.cuda.Event()
            arrived.record()
        return PendingTicket(rows, numbers, top, arrived)

    def read(self) -> LaunchResult:
        """Wait for it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        token, flag, logp, raw = self.numbers.numpy()[:, : self.rows]
        row = np.flatnonzero(flag)
        pick = (lambda x: x.numpy()[row]) if self.top else None
        return LaunchResult(
            row=row,
            token=token[row].astype(np.int64),
            logp=logp.view(np.float32)[row].astype(np.float64),
            raw=raw.view(np.float32)[row].astype(np.float64),
            ended=flag[row] == 2,
            top_token=pick(self.top[0]) if pick and self.top else None,
            top_logp=pick(self.top[1]).astype(np.float64) if pick and self.top else None,
        )


def _home(x: Tensor) -> Tensor:
    """On its way to the host."""
    if x.device.type != "cuda":
        return x.clone()
    here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return here.copy_(x, non_blocking=True)


def why_not_covered(decoder: Decoder) -> str:
    """Why the kernels cannot compute this decoder; "" if they can."""
    c, weight = decoder.config, decoder.model.embed_tokens.weight
    for odd, why in (
        (weight.dtype not in (torch.bfloat16, torch.float16), f"weights in {weight.dtype}"),
        (c.head_dim not in (16, 32, 64, 128, 256), f"heads of {c.head_dim} dimensions"),
        (c.o_bias or c.mlp_bias, "a bias in the output or MLP projections"),
        (decoder.finish is not None, "logits that are changed at the end"),
        (type(decoder.lm_head) is not nn.Linear, "an adapter on the vocabulary head"),
    ):
        if odd:
            return why
    return ""


class Cuda(RunnerBackend):
    """Models in half precision on a GPU."""

    name, priority = "cuda", 2

    def covers(self, decoder: Decoder, needs: Needs) -> str | None:
        if decoder.device.type != "cuda" or needs.capacity <= BLOCK:
            return f"on {decoder.device}, or rows of {needs.capacity} columns, no more than a block has"
        if needs.int8 or needs.support:
            return "weights in 8 bits, or a record of which tokens could have been drawn"
        return why_not_covered(decoder) or None

    def make(self, decoder: Decoder, needs: Needs) -> Runner:
        each, block = cdiv(needs.capacity, BLOCK), BLOCK * column_bytes(decoder)
        blocks = min(needs.max_rows * each, needs.memory // block)
        if blocks < each:
            raise too_little_memory(needs, each * block)
        return CudaRunner(
            decoder, max_rows=needs.max_rows, capacity=needs.capacity, num_blocks=blocks, switch=needs.switch,
            invariant=needs.invariant,
        )  # fmt: skip


BACKENDS = (Cuda(),)
