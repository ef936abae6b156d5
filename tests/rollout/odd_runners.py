"""Runners for tests, which compute with a real model: one checks its orders and is read late, one has pages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hone.engine.blocks import CHUNK
from hone.engine.draw import draw, top_logprobs, uniforms
from hone.engine.params import SamplingTensors
from hone.engine.runner import LaunchResult, PromptChunk, Runner, Seat, Ticket
from hone.model.decoder import Decoder


class _Held:
    """A ticket that may be read only when `lag` launches have followed, or the engine has nothing more to launch."""

    def __init__(self, inner: Ticket, order: list[int], number: int) -> None:
        self.inner, self.order, self.number = inner, order, number

    def read(self) -> LaunchResult:
        assert self.order == [] or self.order[-1] == self.number - 1, "tickets are read in the order of launches"
        self.order.append(self.number)
        return self.inner.read()


class Watched:
    """A runner whose orders are checked against what its rows and blocks are doing; what it computes is another's.

    lag: how many launches the engine must keep in flight.
    """

    def __init__(self, inner: Any, lag: int = 0, launches: int = 0) -> None:
        self.inner, self.lag, self.held_back = inner, lag, inner.held_back
        self.most_stops, self.keeps_written = inner.most_stops, inner.keeps_written
        self.records_support = inner.records_support
        self.prefill_tokens, self.prefill_launches = inner.prefill_tokens, launches or inner.prefill_launches
        self.max_rows, self.num_blocks = inner.max_rows, inner.num_blocks
        self.block_size, self.capacity = inner.block_size, inner.capacity
        self.seats: dict[int, tuple[Seat, int]] = {}  # rows that write, with the length of their prompt
        self.read_order: list[int] = []
        self.launches = 0
        self.computed = 0  # prompt tokens
        self.parts: list[PromptChunk] = []
        self.moved = 0
        self.widths: list[int] = []

    def use(self, adapter: str | None) -> None:
        self.inner.use(adapter)

    def prefill(self, parts: Sequence[PromptChunk]) -> Ticket:
        assert parts
        for part in parts:
            assert 0 <= part.start < part.end <= len(part.prompt)
            assert bool(part.seats) <= (part.end == len(part.prompt))
            assert len(part.blocks) == -(-len(part.prompt) // self.block_size)
            self.computed += part.end - part.start
            self.parts.append(part)
            for seat in part.seats:
                self._seat(seat, part)
        return self._ticket(self.inner.prefill(parts))

    def _seat(self, seat: Seat, part: PromptChunk) -> None:
        prompt = len(part.prompt)
        assert seat.row not in self.seats, "the row is taken"
        assert prompt + seat.limit <= self.capacity
        assert len(seat.blocks) == -(-(prompt + seat.limit) // self.block_size)
        if self.block_size == self.capacity:
            assert seat.blocks == (seat.row,)
        own = set(seat.blocks[(prompt - self.held_back) // self.block_size :])
        for other, length in self.seats.values():
            assert not own & set(other.blocks), "a block it writes into is another's"
            assert not set(other.blocks[(length - self.held_back) // self.block_size :]) & set(seat.blocks)
        self.seats[seat.row] = seat, prompt

    def decode(self, rows: int) -> Ticket:
        assert 1 <= rows <= self.max_rows
        self.widths.append(rows)
        return self._ticket(self.inner.decode(rows))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        for a, b in moves:
            assert b not in self.seats
            self.moved += 1
            if a in self.seats:  # it may have ended in a launch that is not read yet
                seat, prompt = self.seats.pop(a)
                blocks = (b,) if self.block_size == self.capacity else seat.blocks
                self.seats[b] = replace(seat, row=b, blocks=blocks), prompt
        self.inner.move(moves)

    def stop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.seats.pop(row, None)
        if len(rows) == self.max_rows:  # whatever is in flight is given up
            self.read_order.clear()
        self.inner.stop(rows)

    def _ticket(self, ticket: Ticket) -> Ticket:
        self.launches += 1
        written = ticket.read()
        for row in written.row[written.ended].tolist():
            del self.seats[row]
        return _Held(ticket, self.read_order, self.launches)


class _Done:
    def __init__(self, written: LaunchResult) -> None:
        self.written = written

    def read(self) -> LaunchResult:
        return self.written


class Paged:
    """Blocks of 32 tokens and the decoder's own forward pass over them, a row at a time: slow, and nothing to go
    wrong in it. A block that holds other tokens than those of the row shows in what the row draws."""

    lag, prefill_tokens, prefill_launches, most_stops, keeps_written = 0, 4096, 1, None, True
    records_support = False

    def __init__(self, decoder: Decoder, *, max_rows: int, num_blocks: int, capacity: int, held_back: int = 0) -> None:
        self.decoder, self.max_rows, self.num_blocks, self.capacity = decoder, max_rows, num_blocks, capacity
        self.block_size, self.held_back = CHUNK, held_back
        self.store = torch.full((num_blocks, CHUNK), -1)  # what is not written cannot be read
        self.rows: dict[int, dict[str, Any]] = {}

    def use(self, adapter: str | None) -> None:
        assert adapter is None

    def _run(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> torch.Tensor:
        """Logits after the last token; the tokens go into the blocks, and those before them are read there."""
        for column, token in enumerate(tokens, start=start):
            self.store[blocks[column // CHUNK], column % CHUNK] = token
        row = self.store[list(blocks)].flatten()[: start + len(tokens)]
        return self.decoder.logits(self.decoder(row[None])[:, -1])

    @torch.no_grad()
    def prefill(self, parts: Sequence[PromptChunk]) -> Ticket:
        entries = []
        for part in parts:
            assert part.copy is None, "where a chunk is a block it is shared, not copied"
            read = len(part.prompt) - self.held_back
            tokens, logits = part.prompt[part.start : min(part.end, read)], None
            if tokens:
                logits = self._run(tokens, part.start, part.blocks)
            for seat in part.seats:
                for a, b in zip(part.blocks[: -(-read // CHUNK)], seat.blocks, strict=False):
                    if a != b:
                        self.store[b] = self.store[a]
                knobs = SamplingTensors.of([seat.params], self.decoder.config.vocab_size, "cpu", [part.prompt])
                u = uniforms(seat.params.seed, [seat.random_id], seat.limit)[:, 0]
                self.rows[seat.row] = {"seat": seat, "length": read, "sampling": knobs, "u": u, "written": 0}
                self.rows[seat.row]["token"] = part.prompt[-1]
                if not self.held_back:
                    assert logits is not None
                    entries.append(self._draw(seat.row, logits))
        return _Done(_written(entries))

    def _draw(self, row: int, logits: torch.Tensor) -> tuple[Any, ...]:
        state = self.rows[row]
        seat = state["seat"]
        token, logp, raw = draw(logits, state["u"][state["written"]][None], state["sampling"])
        state["sampling"].add_written(token)
        state["token"], state["written"] = int(token), state["written"] + 1
        ended = state["token"] in seat.params.stop_ids or state["written"] == seat.limit
        if ended:
            del self.rows[row]
        best = top_logprobs(logits, 20)
        return row, int(token), float(logp), float(raw), ended, best[0][0].numpy(), best[1][0].double().numpy()

    @torch.no_grad()
    def decode(self, rows: int) -> Ticket:
        entries = []
        for row in sorted(r for r in self.rows if r < rows):
            state = self.rows[row]
            logits = self._run([state["token"]], state["length"], state["seat"].blocks)
            state["length"] += 1
            entries.append(self._draw(row, logits))
        return _Done(_written(entries))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        for a, b in moves:
            if a in self.rows:
                self.rows[b] = self.rows.pop(a)

    def stop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)


def _written(entries: list[tuple[Any, ...]]) -> LaunchResult:
    row, token, logp, raw, ended, top_token, top_logp = zip(*entries, strict=True) if entries else ((),) * 7
    return LaunchResult(
        row=np.array(row, dtype=np.int64),
        token=np.array(token, dtype=np.int64),
        logp=np.array(logp, dtype=np.float64),
        raw=np.array(raw, dtype=np.float64),
        ended=np.array(ended, dtype=np.bool_),
        top_token=np.array(top_token) if entries else None,
        top_logp=np.array(top_logp) if entries else None,
    )


def is_a_runner(runner: Watched | Paged) -> Runner:
    """For the type checker."""
    return runner
