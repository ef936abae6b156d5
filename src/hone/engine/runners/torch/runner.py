"""The runner in plain torch, which defines what a runner computes: it samples on any device, in any dtype."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.draw import RandomStreams, draw, top_logprobs
from hone.engine.params import SamplingTensors, Uses
from hone.engine.runner import LaunchResult, PromptChunk, Seat, Switch, Ticket
from hone.engine.runners.registry import Needs, column_bytes, too_little_memory
from hone.engine.runners.torch.int8 import Int8Layers
from hone.engine.runners.torch.invariant import BLOCK, InvariantLayers, calm_rows
from hone.engine.runners.torch.kv_cache import RowChunk
from hone.engine.runners.torch.layers import Draw, TorchLayers
from hone.errors import HoneError
from hone.model.decoder import Decoder


class AdapterSwitch:
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


NO_TOKEN = -1
Index = NDArray[np.int64]
PREFILL_TOKENS = 4_096  # the most prompt tokens in one forward pass: bounds the activations


@dataclass(frozen=True, slots=True)
class _Done:
    """A launch that has been computed already."""

    written: LaunchResult

    def read(self) -> LaunchResult:
        return self.written


class TorchRunner(AdapterSwitch):
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
            self.rows = HostRows(max_rows, vocab, decoder.device, at_once=at_once, quick_draw=self.layers.quick_draw())

    @staticmethod
    def layers_for(*, invariant: bool, int8: bool) -> type[TorchLayers]:
        """The class of its layers."""
        return InvariantLayers if invariant else Int8Layers if int8 else TorchLayers

    def prefill(self, parts: Sequence[PromptChunk]) -> Ticket:
        """Compute the parts, and draw the first token of each seat."""
        with self._computing():
            self._cleanse([row for part in parts for row in _rows_to_fill(part)])
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
            return _Done(self.rows.advance(rows, index, self.layers.logits(hidden)))

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
        before = torch.get_num_threads()
        fewer = before if self.threads is None else min(self.threads, before)
        with torch.inference_mode(), self.adapted():
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


def _rows_to_fill(part: PromptChunk) -> Iterator[int]:
    """The rows that hold nothing of the prompt yet."""
    if part.start == 0 or part.copy is not None:
        yield part.blocks[0]
    yield from (seat.row for seat in part.seats if seat.row != part.blocks[0])


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


# --- what each row is doing: its last token, its length, its random numbers and how it draws ---


class HostRows:
    """Arrays with one entry a row, on the host: a launch is read at once, so nothing waits for them."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, *, at_once: int, quick_draw: Draw | None = None
    ) -> None:
        """at_once: rows drawn together. quick_draw: draws rows that no setting alters."""
        self.device, self.at_once, self.quick_draw = device, at_once, quick_draw
        self.alive = np.zeros(rows, dtype=np.bool_)
        self.token = np.zeros(rows, dtype=np.int64)  # the last one written: the next decode reads it
        self.length = np.zeros(rows, dtype=np.int64)  # columns in memory: all tokens but the last
        self.tokens_left = np.zeros(rows, dtype=np.int64)  # tokens it may still write
        self.top = np.zeros(rows, dtype=np.int64)  # how many of the most probable tokens it reports
        self.records = np.zeros(rows, dtype=np.bool_)  # whether it reports which tokens could have been drawn
        self.stops = np.full((rows, 1), NO_TOKEN)
        self.tainted = np.zeros(rows, dtype=np.bool_)  # its memory may hold numbers that are not finite
        self.random = RandomStreams(rows)
        self.sampling = SamplingTensors.plain(rows, vocab, device)

    def seat(self, seat: Seat, prompt: tuple[int, ...]) -> None:
        """A request that has read its prompt begins in its row."""
        r, params, stops = seat.row, seat.params, sorted(seat.params.stop_ids)
        self.alive[r], self.length[r], self.tokens_left[r] = True, len(prompt), seat.limit
        self.top[r], self.records[r] = params.top_logprobs, params.support_recorded
        if len(stops) > self.stops.shape[1]:
            more = np.full((len(self.stops), len(stops) - self.stops.shape[1]), NO_TOKEN)
            self.stops = np.concatenate([self.stops, more], 1)
        self.stops[r] = NO_TOKEN
        self.stops[r, : len(stops)] = stops
        self.random.seat(r, params.seed, seat.random_id)
        self.sampling.seat(r, params, prompt)

    def move(self, a: int, b: int) -> None:
        """Row `a` goes on as row `b`."""
        for x in (
            self.alive,
            self.token,
            self.length,
            self.tokens_left,
            self.top,
            self.records,
            self.stops,
            self.tainted,
        ):
            x[b] = x[a]
        self.random.move(a, b)
        self.sampling.move(a, b)
        self.alive[a] = False

    def begin(self, index: Index, logits: Tensor) -> LaunchResult:
        """The first token of rows just seated, from logits [n, V]."""
        where = torch.from_numpy(index)
        sampling = self.sampling.rows(where)
        u = torch.from_numpy(self.random.next(index)).to(self.device)
        kept = self._kept(index, logits)
        token, logp, raw = self._draw(logits, u, sampling, kept)
        if self.sampling.seen is not None:
            self.sampling.seen[where.to(self.device), token] = True
        return self._note(index, (token, logp, raw), self._tops(index, logits), kept)

    def advance(self, rows: int, index: Index, logits: Tensor) -> LaunchResult:
        """The next token of the rows `index`, alive, from the logits [rows, V] of those before `rows`."""
        u = np.zeros(rows)
        u[index] = self.random.next(index)
        sampling = self.sampling.head(rows)
        kept = self._kept(index, logits)
        drawn = self._draw(logits, torch.from_numpy(u).to(self.device), sampling, kept)
        sampling.add_written(drawn[0])
        top = self._tops(index, logits)
        if len(index) < rows:
            here = torch.from_numpy(index).to(self.device)
            drawn = (drawn[0][here], drawn[1][here], drawn[2][here])
            top = None if top is None else (top[0][here], top[1][here])
            kept = None if kept is None else kept[here]
        return self._note(index, drawn, top, kept)

    def _kept(self, index: Index, logits: Tensor) -> Tensor | None:
        """bool [B, V] for the tokens that could be drawn, where a row of `index` reports them."""
        return torch.ones(logits.shape, dtype=torch.bool, device=self.device) if self.records[index].any() else None

    def _draw(
        self, logits: Tensor, u: Tensor, sampling: SamplingTensors, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        easy = sampling.uses == Uses.SAMPLED
        if self.quick_draw is not None and easy.all():
            token, logp = self.quick_draw(logits, u)
            return token, logp, logp
        if self.quick_draw is not None and easy.any():
            return self._draw_by_kind(logits, u, sampling, easy, kept)
        if len(logits) <= self.at_once:
            return draw(logits, u, sampling, kept=kept)
        parts = [slice(a, min(a + self.at_once, len(u))) for a in range(0, len(u), self.at_once)]
        drawn = [
            draw(logits[p], u[p], sampling.rows(range(p.start, p.stop)), kept=None if kept is None else kept[p])
            for p in parts
        ]
        token, logp, raw = (torch.cat(x) for x in zip(*drawn, strict=True))
        return token, logp, raw

    def _draw_by_kind(
        self, logits: Tensor, u: Tensor, sampling: SamplingTensors, easy: NDArray[np.bool_], kept: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of both kinds: what the others ask for does not change how a row is drawn."""
        token = torch.empty(len(u), dtype=torch.int64)
        logp, raw = torch.empty(2, len(u), dtype=logits.dtype)
        for chosen in (easy, ~easy):
            index = torch.from_numpy(np.flatnonzero(chosen))
            some = None if kept is None else kept[index]
            token[index], logp[index], raw[index] = self._draw(logits[index], u[index], sampling.rows(index), some)
            if kept is not None and some is not None:
                kept[index] = some
        return token, logp, raw

    def nothing(self) -> LaunchResult:
        """A launch in which no row wrote."""
        none = np.zeros(0)
        whole = none.astype(np.int64)
        return LaunchResult(row=whole, token=whole, logp=none, raw=none, ended=none.astype(np.bool_))

    def _tops(self, index: Index, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        most = int(self.top[index].max())
        return top_logprobs(logits, most) if most else None

    def _note(
        self,
        index: Index,
        drawn: tuple[Tensor, Tensor, Tensor],
        top: tuple[Tensor, Tensor] | None,
        kept: Tensor | None,
    ) -> LaunchResult:
        """Put the tokens into place for the next step, and tell."""
        token = drawn[0].cpu().numpy()
        logp, raw = (x.double().cpu().numpy() for x in drawn[1:])
        self.token[index] = token
        self.tokens_left[index] -= 1
        ended = (token[:, None] == self.stops[index]).any(1) | (self.tokens_left[index] <= 0)
        self.alive[index] = ~ended
        self.tainted[index] |= ~np.isfinite(logp + raw)
        return LaunchResult(
            row=index,
            token=token,
            logp=logp,
            raw=raw,
            ended=ended,
            top_token=None if top is None else top[0].cpu().numpy(),
            top_logp=None if top is None else top[1].double().cpu().numpy(),
            support=None if kept is None else _ids(kept, self.records[index]),
        )


def _ids(kept: Tensor, records: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """The ids of the tokens that are kept, by row; none for a row that did not ask."""
    table = kept.cpu().numpy() & records[:, None]
    ids = np.nonzero(table)[1].astype(np.int32)
    return np.split(ids, table.sum(1).cumsum()[:-1])
