"""The runner in plain torch, which defines what a runner computes: it samples on any device, in any dtype."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.engine.runner import PromptChunk, Seat, Switch, Ticket, Written
from hone.engine.runners.registry import Needs, column_bytes, too_little_memory
from hone.engine.runners.torch.int8 import Int8Layers
from hone.engine.runners.torch.invariant import BLOCK, InvariantLayers, calm_rows
from hone.engine.runners.torch.kv_cache import RowChunk
from hone.engine.runners.torch.layers import TorchLayers
from hone.engine.runners.torch.rows import RowState
from hone.errors import HoneError
from hone.model.decoder import Decoder


class Switching:
    """switch: partial(use_adapter, decoder), for `use`."""

    switch: Switch | None
    adapter: str | None = None  # None: the weights as they are

    def use(self, adapter: str | None) -> None:
        """From now on compute with this adapter; None: the weights as they are. HoneError where there is none."""
        if adapter is not None:
            if self.switch is None:
                raise HoneError("this runner was given no adapters: give it switch=..., or leave the adapter out")
            with self.switch(adapter):
                pass  # a name that is not there is said now
        self.adapter = adapter

    def adapted(self) -> AbstractContextManager[None]:
        """Inside, the adapter is on."""
        return nullcontext() if self.adapter is None or self.switch is None else self.switch(self.adapter)


PREFILL_TOKENS = 4_096  # the most prompt tokens in one forward pass: bounds the activations


@dataclass(frozen=True, slots=True)
class _Done:
    """A launch that has been computed already."""

    written: Written

    def read(self) -> Written:
        return self.written


class TorchRunner(Switching):
    """Row r is block r of `capacity` columns; the weights are the learner's own tensors.

    switch: partial(use_adapter, decoder), for `use`. invariant: a row's numbers do not depend on the others, to the
    bit, nor on how its prompt was read. int8: sample from a copy of the weights in 8 bits.
    """

    prefill_tokens, prefill_launches = PREFILL_TOKENS, 1
    lag = held_back = 0
    keeps_written = True  # a step computes what reading the token computes, in the invariant mode to the bit
    most_stops: int | None = None
    records_support = True

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int,
        capacity: int,
        switch: Switch | None = None,
        invariant: bool = False,
        int8: bool = False,
    ) -> None:
        context = decoder.config.max_position_embeddings
        if max_rows < 1:
            raise HoneError(f"max_rows is {max_rows}: set it to 1 or more")
        if not 1 <= capacity <= context:
            raise HoneError(f"capacity is {capacity}: set it between 1 and the model's context, {context}")
        if invariant and int8:
            raise HoneError("8-bit weights are not batch-invariant: choose one of invariant and int8")
        self.decoder, self.switch, self.adapter = decoder, switch, None
        self.max_rows = self.num_blocks = max_rows
        self.block_size = self.capacity = capacity
        with torch.inference_mode():
            # in the invariant mode every runner of a process has the same number, whatever its rows
            self.threads = None if invariant or decoder.device.type != "cpu" else paying_threads(decoder, max_rows)
            self.layers = self.layers_for(invariant=invariant, int8=int8)(decoder, max_rows, capacity)
            vocab = decoder.config.vocab_size
            at_once = calm_rows(vocab) if invariant else max_rows
            self.rows = RowState(max_rows, vocab, decoder.device, at_once=at_once, quick_draw=self.layers.quick_draw())

    @staticmethod
    def layers_for(*, invariant: bool, int8: bool) -> type[TorchLayers]:
        """The class of its layers."""
        return InvariantLayers if invariant else Int8Layers if int8 else TorchLayers

    def prefill(self, parts: Sequence[PromptChunk]) -> Ticket:
        """Compute the parts, and draw the first token of each seat."""
        with self._computing():
            self._cleanse([b for p in parts if p.start == 0 or p.copy is not None for b in _rows_of(p)])
            for source, target, columns in (part.copy for part in parts if part.copy is not None):
                self.layers.slab.copy(source, [target], columns)
            seats, logits = list[Seat](), list[Tensor]()
            for chunk in _passes(parts):
                self.layers.slab.written([(piece.row, piece.start) for _, piece in chunk])
                last = self.layers.read([piece for _, piece in chunk])
                ready = [(i, p) for i, (p, piece) in enumerate(chunk) if p.seats and piece.end == p.end]
                if ready:
                    logits.append(self._seat(last, ready))
                seats += [seat for _, p in ready for seat in p.seats]
            index = np.array([seat.row for seat in seats], dtype=np.int64)
            return _Done(self.rows.begin(index, torch.cat(logits)) if logits else self.rows.nothing())

    def _seat(self, last: Tensor, ready: list[tuple[int, PromptChunk]]) -> Tensor:
        """Seat the readers of each part, whose hidden state is last[i]; their logits [seats, V]."""
        for _, part in ready:
            self.layers.slab.copy(part.blocks[0], [seat.blocks[0] for seat in part.seats], part.end)
            for seat in part.seats:
                self.rows.seat(seat, part.prompt[: part.end])
        logits = self.layers.logits(last[torch.tensor([i for i, _ in ready], device=last.device)])
        whose = [n for n, (_, part) in enumerate(ready) for _ in part.seats]
        return logits[torch.tensor(whose, device=last.device)]

    def decode(self, rows: int) -> Ticket:
        """One more token for each row in [0, rows) that is seated and has not ended."""
        alive = self.rows.alive[:rows]
        index = np.flatnonzero(alive)
        if not len(index):
            return _Done(self.rows.nothing())
        with self._computing():
            # holes write into the scratch column, and see the first one: finite, and read by nobody
            positions = np.where(alive, self.rows.length[:rows], 0)
            state = np.stack([self.rows.token[:rows], positions, np.where(alive, positions, self.capacity)])
            tokens, places, written = torch.from_numpy(state).to(self.decoder.device)
            columns = int(positions.max()) + 1
            even = bool((positions[index] == columns - 1).all())
            hidden = self.layers.step(tokens, places, written, columns=columns, even=even)
            self.rows.length[index] += 1
            return _Done(self.rows.go_on(rows, index, self.layers.logits(hidden)))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Row `a` goes on as row `b`, free until now, for each (a, b)."""
        with torch.inference_mode():
            for a, b in moves:
                self._cleanse([b])
                self.layers.slab.copy(a, [b], int(self.rows.length[a]))
                self.rows.move(a, b)

    def stop(self, rows: Sequence[int]) -> None:
        """These rows write no more."""
        self.rows.alive[list(rows)] = False

    def _cleanse(self, rows: Sequence[int]) -> None:
        """Zero the memory of rows to be filled if it may hold numbers that are not finite."""
        bad = [r for r in set(rows) if self.rows.tainted[r]]
        if bad:
            self.layers.slab.clear(bad)
            self.rows.tainted[bad] = False

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """No gradients, the adapter on, and as many threads as pay."""
        adapted = nullcontext() if self.adapter is None or self.switch is None else self.switch(self.adapter)
        before = torch.get_num_threads()
        fewer = before if self.threads is None else min(self.threads, before)
        with torch.inference_mode(), adapted:
            try:
                if fewer < before:
                    torch.set_num_threads(fewer)
                yield
            finally:
                if fewer < before:
                    torch.set_num_threads(before)


def rows_that_fit(decoder: Decoder, needs: Needs) -> int:
    """How many rows the memory holds, at most those that are needed; HoneError: not one."""
    columns = needs.capacity + 1  # as the layers allocate them
    one_row = column_bytes(decoder) * (-(-columns // BLOCK) * BLOCK if needs.invariant else columns)
    rows = min(needs.max_rows, needs.memory // one_row)
    if rows < 1:
        raise too_little_memory(needs, one_row)
    return rows


def _rows_of(part: PromptChunk) -> Iterator[int]:
    yield part.blocks[0]
    yield from (seat.row for seat in part.seats)


def paying_threads(decoder: Decoder, rows: int) -> int:
    """More threads than this wait for each other longer than they work: by the products of a layer and its bytes."""
    numbers = sum(p.numel() for p in decoder.model.layers[0].parameters())
    return max(1, numbers * rows >> 22, numbers * decoder.model.embed_tokens.weight.element_size() >> 20)


def _passes(parts: Sequence[PromptChunk]) -> Iterator[list[tuple[PromptChunk, RowChunk]]]:
    """The parts in forward passes of bounded size; a part that is longer is read in several."""
    chunk, left = list[tuple[PromptChunk, RowChunk]](), PREFILL_TOKENS
    for part in parts:
        if not part.start < part.end <= len(part.prompt):
            raise ValueError(f"a part from {part.start} to {part.end} of a prompt of {len(part.prompt)} tokens")
        start = part.start
        while start < part.end:
            end = min(part.end, start + left)
            chunk.append((part, RowChunk(row=part.blocks[0], start=start, tokens=part.prompt[start:end])))
            left -= end - start
            start = end
            if not left:
                yield chunk
                chunk, left = [], PREFILL_TOKENS
    if chunk:
        yield chunk
