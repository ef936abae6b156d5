"""The state of the rows on the device, laid out so that many rows are seated with a few copies."""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.params import HUGE, SampleParams, Uses
from hone.engine.runner import PromptChunk, Seat
from hone.engine.runners.cuda.draw_state import STOPS, DrawOut, DrawState, chunk_of, signed
from hone.engine.runners.cuda.prompts import write_lines

STREAMS = ("seed", "request")
WHOLE = ("token", "position", "count", "limit", "active", "top_k", "low")
REAL = ("temperature", "top_p", "min_p", "penalty")
OUT = ("token", "flag", "logp", "raw")
ROW = struct.Struct(f"={len(STREAMS)}q{len(WHOLE)}i{len(REAL)}f{STOPS}i")  # the words of a row before its blocks
NUMBERS, BLOCKS = 2 * len(STREAMS), ROW.size // 4  # where the numbers and the blocks begin
STOP_IDS = BLOCKS - STOPS
ACTIVE = NUMBERS + WHOLE.index("active")


class DeviceRows:
    """What DrawState names and a table of blocks, as views of one tensor, so that rows are seated with one copy; and on
    the host, what the rows use."""

    def __init__(self, rows: int, vocab: int, width: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.words = torch.zeros(rows * (BLOCKS + width), dtype=torch.int32, device=device)
        streams, numbers, stops, table = self.words.split(
            [rows * n for n in (NUMBERS, STOP_IDS - NUMBERS, STOPS, width)]
        )
        self.streams = streams.view(torch.int64).view(len(STREAMS), rows)
        self.numbers, self.stops, self.table = numbers.view(-1, rows), stops.view(rows, -1), table.view(rows, -1)
        self.stops.fill_(-1)
        self.at = _positions(rows, width)
        self.out = torch.zeros(len(OUT), rows, dtype=torch.int32, device=device)
        self.uses = np.zeros(rows, dtype=np.int64)
        self.tops = np.zeros(rows, dtype=np.int64)  # most probable tokens to report
        real = self.numbers[len(WHOLE) :].view(torch.float32)
        self.draw = DrawState(
            **{name: self.numbers[i] for i, name in enumerate(WHOLE)},
            **{name: real[i] for i, name in enumerate(REAL)},
            **{name: self.streams[i] for i, name in enumerate(STREAMS)},
            stop_ids=self.stops,
            part=torch.zeros(4, rows, -(-vocab // chunk_of(vocab)), device=device),
        )
        wrote = self.out[2:].view(torch.float32)
        self.wrote = DrawOut(token=self.out[0], flag=self.out[1], logp=wrote[0], raw=wrote[1])

    def seat(self, parts: Sequence[PromptChunk]) -> None:
        """Seats of these parts begin: each reads its prompt's last token next."""
        pairs = [(part.prompt, seat) for part in parts for seat in part.seats]
        if not pairs:
            return
        rows, params = np.array([seat.row for _, seat in pairs]), [seat.params for _, seat in pairs]
        made = {number: (_settings(each), Uses.of(each)) for number, each in {id(p): p for p in params}.items()}
        packed = b"".join(
            ROW.pack(
                signed(s.params.seed),
                signed(s.random_id),
                prompt[-1],
                len(prompt) - 1,
                0,
                s.limit,
                *made[id(s.params)][0],
            )
            for prompt, s in pairs
        )
        words = np.zeros((len(pairs), self.at.shape[1]), dtype=np.int32)
        words[:, :BLOCKS] = np.frombuffer(packed, np.int32).reshape(-1, BLOCKS)
        write_lines(words[:, BLOCKS:], [seat.blocks for _, seat in pairs])
        self.uses[rows] = [made[id(each)][1] for each in params]
        self.tops[rows] = [each.top_logprobs for each in params]
        where, what = self._sent_together(self.at[rows], words)
        self.words.index_copy_(0, where, what)
        dense = self.draw.bias is not None or self.draw.seen is not None
        if dense or (self.uses[rows] & (Uses.BIAS | Uses.PENALTY)).any():
            for prompt, seat in pairs:
                self._dense(prompt, seat)

    def _dense(self, prompt: Sequence[int], seat: Seat) -> None:
        """Tables over the vocabulary, made when the first row needs one."""
        draw, uses, shape = self.draw, int(self.uses[seat.row]), (len(self.table), self.vocab)
        if uses & Uses.BIAS and draw.bias is None:
            draw.bias = torch.zeros(shape, device=self.device)
        if uses & Uses.PENALTY and draw.seen is None:
            draw.seen = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        if draw.bias is not None:
            bias = torch.zeros(self.vocab)
            for token, value in seat.params.bias.items():
                bias[token] = min(max(value, -HUGE), HUGE)
            bias[sorted(seat.params.banned)] = -torch.inf
            draw.bias[seat.row] = bias.to(self.device)
        if draw.seen is not None:
            seen = torch.zeros(self.vocab, dtype=torch.uint8)
            seen[list(prompt)] = 1
            draw.seen[seat.row] = seen.to(self.device)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Row a goes on as row b."""
        a, b = (np.array(side) for side in zip(*moves, strict=True))
        self.uses[b], self.tops[b] = self.uses[a], self.tops[a]
        source, target, end = self.sent(
            np.concatenate([self.at[a].ravel(), self.at[b].ravel(), self.at[a, ACTIVE]])
        ).split([self.at[a].size, self.at[b].size, len(a)])
        self.words.index_copy_(0, target, self.words.index_select(0, source))
        self.words.index_fill_(0, end, 0)
        for dense in (self.draw.bias, self.draw.seen):
            if dense is not None:
                there, here = self.sent(np.stack([b, a])).unbind()
                dense.index_copy_(0, there, dense.index_select(0, here))

    def stop(self, rows: Sequence[int]) -> None:
        """These rows write no more."""
        if len(rows):
            self.draw.active.index_fill_(0, self.sent(np.array(rows)), 0)

    def _sent_together(self, where: NDArray[np.int64], what: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Places and the words for them, flat, in one copy."""
        both = self.sent(np.concatenate([where.ravel().view(np.int32), what.ravel()]))
        return both[: 2 * where.size].view(torch.int64), both[2 * where.size :]

    def sent(self, x: NDArray[np.generic]) -> Tensor:
        """To the device, without waiting for it."""
        return self.staged(x).to(self.device, non_blocking=True)

    def staged(self, x: NDArray[np.generic]) -> Tensor:
        """Where the device can copy it from without the host."""
        here = torch.from_numpy(x)
        return here.pin_memory() if self.device.type == "cuda" else here


def _bounded(x: float) -> float:
    """Within what float32 can multiply; 0, which is greedy, stays."""
    return x and min(max(x, 1 / HUGE), HUGE)


def _settings(params: SampleParams) -> tuple[float, ...]:
    """Of WHOLE from `active` on, REAL, and the stop tokens."""
    real = _bounded(params.temperature), params.top_p, params.min_p, _bounded(params.repetition_penalty)
    stops = sorted(params.stop_ids) + [-1] * (STOPS - len(params.stop_ids))
    return (1, min(params.top_k, 2**31 - 1), 0, *real, *stops)


def _positions(rows: int, width: int) -> NDArray[np.int64]:
    """[rows, words]  where the words of each row are in the tensor of all."""
    row = np.arange(rows)[:, None]
    streams = (np.arange(len(STREAMS))[:, None] * 2 * rows + np.arange(2)).ravel() + 2 * row
    numbers = rows * np.arange(NUMBERS, STOP_IDS) + row
    stops = rows * STOP_IDS + STOPS * row + np.arange(STOPS)
    return np.concatenate([streams, numbers, stops, rows * BLOCKS + width * row + np.arange(width)], axis=1)
