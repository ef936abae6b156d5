"""The state of the rows on the device, laid out so that many rows are seated with a few copies."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.rollout.draw_state import STOPS, DrawOut, DrawState, chunk_of, signed
from hone.rollout.knobs import HUGE, Uses
from hone.rollout.protocol import SampleParams
from hone.rollout.runner import Part, Seat

WHOLE = ("token", "position", "count", "limit", "active", "top_k", "low")
REAL = ("temperature", "top_p", "min_p", "penalty")
OUT = ("token", "flag", "logp", "raw")


class RowState:
    """What DrawState names, as views of few tensors; a table of blocks; and on the host, what the rows use."""

    def __init__(self, rows: int, vocab: int, width: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.numbers = torch.zeros(len(WHOLE) + len(REAL), rows, dtype=torch.int32, device=device)
        self.streams = torch.zeros(2, rows, dtype=torch.int64, device=device)  # seed, request
        self.stops = torch.full((rows, STOPS), -1, dtype=torch.int32, device=device)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.out = torch.zeros(len(OUT), rows, dtype=torch.int32, device=device)
        self.uses = np.zeros(rows, dtype=np.int64)
        self.tops = np.zeros(rows, dtype=np.int64)  # most probable tokens to report
        real = self.numbers[len(WHOLE) :].view(torch.float32)
        self.draw = DrawState(
            **{name: self.numbers[i] for i, name in enumerate(WHOLE)},
            **{name: real[i] for i, name in enumerate(REAL)},
            seed=self.streams[0],
            request=self.streams[1],
            stop_ids=self.stops,
            part=torch.zeros(4, rows, -(-vocab // chunk_of(vocab)), device=device),
        )
        wrote = self.out[2:].view(torch.float32)
        self.wrote = DrawOut(token=self.out[0], flag=self.out[1], logp=wrote[0], raw=wrote[1])

    def seat(self, parts: Sequence[Part]) -> None:
        """Seats of these parts begin: each reads its prompt's last token next."""
        pairs = [(part, seat) for part in parts for seat in part.seats]
        if not pairs:
            return
        seats = [seat for _, seat in pairs]
        rows, params = np.array([seat.row for seat in seats]), [seat.params for seat in seats]
        numbers = np.zeros((len(self.numbers), len(pairs)), dtype=np.int32)
        whole = [(p.prompt[-1], len(p.prompt) - 1, 0, s.limit, 1, _top_k(s.params), 0) for p, s in pairs]
        numbers[: len(WHOLE)] = np.array(whole, dtype=np.int64).T
        real = [(_bounded(p.temperature), p.top_p, p.min_p, _bounded(p.repetition_penalty)) for p in params]
        numbers[len(WHOLE) :].view(np.float32)[:] = np.array(real).T
        streams = np.array([(signed(s.params.seed), signed(s.request)) for s in seats], dtype=np.int64).T
        width = self.table.shape[1]
        table = np.array([s.blocks + (0,) * (width - len(s.blocks)) for s in seats], dtype=np.int32)
        self.uses[rows] = [Uses.of(p) for p in params]
        self.tops[rows] = [p.top_logprobs for p in params]
        where = self.sent(rows)
        self.numbers.index_copy_(1, where, self.sent(numbers))
        self.streams.index_copy_(1, where, self.sent(np.ascontiguousarray(streams)))
        self.stops.index_copy_(0, where, self.sent(np.array([_stops(p) for p in params], dtype=np.int32)))
        self.table.index_copy_(0, where, self.sent(table))
        if (
            self.draw.bias is not None
            or self.draw.seen is not None
            or (self.uses[rows] & (Uses.BIAS | Uses.PENALTY)).any()
        ):
            for part, seat in pairs:
                self._dense(part.prompt, seat)

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
        source, target = self.sent(a), self.sent(b)
        self.uses[b], self.tops[b] = self.uses[a], self.tops[a]
        for x, dim in ((self.numbers, 1), (self.streams, 1), (self.stops, 0), (self.table, 0)):
            x.index_copy_(dim, target, x.index_select(dim, source))
        for dense in (self.draw.bias, self.draw.seen):
            if dense is not None:
                dense.index_copy_(0, target, dense.index_select(0, source))
        self.stop(a.tolist())

    def stop(self, rows: Sequence[int]) -> None:
        """These rows write no more."""
        if len(rows):
            self.draw.active.index_fill_(0, self.sent(np.array(rows)), 0)

    def sent(self, x: NDArray[np.generic]) -> Tensor:
        """To the device, without waiting for it."""
        here = torch.from_numpy(x)
        return here.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else here


def _bounded(x: float) -> float:
    """Within what float32 can multiply; 0, which is greedy, stays."""
    return x and min(max(x, 1 / HUGE), HUGE)


def _top_k(params: SampleParams) -> int:
    return min(params.top_k, 2**31 - 1)


def _stops(params: SampleParams) -> list[int]:
    return sorted(params.stop_ids) + [-1] * (STOPS - len(params.stop_ids))
