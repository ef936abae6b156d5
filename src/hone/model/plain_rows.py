"""What each row of a plain runner is doing: its last token, its length, its random numbers and how it draws."""

import numpy as np
import torch
from torch import Tensor

from hone.rollout.draw import draw, uniforms
from hone.rollout.protocol import SampleParams
from hone.rollout.runner import Seat, Written

NO_TOKEN = -1


class Rows:
    """Arrays with one entry a row, on the host: a launch is read at once, so nothing waits for them."""

    def __init__(self, rows: int, capacity: int, vocab: int, device: torch.device) -> None:
        self.device, self.vocab = device, vocab
        self.alive = np.zeros(rows, dtype=np.bool_)
        self.token = np.zeros(rows, dtype=np.int64)  # the last one written: the next decode reads it
        self.length = np.zeros(rows, dtype=np.int64)  # columns in memory: all tokens but the last
        self.written = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.stops = np.full((rows, 1), NO_TOKEN)
        self.u = np.zeros((rows, capacity + 1))
        self.params: list[SampleParams | None] = [None] * rows

    def seat(self, seat: Seat, prompt: tuple[int, ...]) -> None:
        """A request begins in its row."""
        r, stops = seat.row, sorted(seat.params.stop_ids)
        self.alive[r], self.length[r], self.written[r], self.limit[r] = True, len(prompt), 0, seat.limit
        self.u[r, : seat.limit] = uniforms(seat.params.seed, [seat.request], seat.limit)[:, 0].numpy()
        if len(stops) > self.stops.shape[1]:
            more = np.full((len(self.stops), len(stops) - self.stops.shape[1]), NO_TOKEN)
            self.stops = np.concatenate([self.stops, more], 1)
        self.stops[r] = NO_TOKEN
        self.stops[r, : len(stops)] = stops
        self.params[r] = seat.params

    def move(self, a: int, b: int) -> None:
        """Row `a` goes on as row `b`."""
        for x in (self.alive, self.token, self.length, self.written, self.limit, self.stops, self.u):
            x[b] = x[a]
        self.params[b], self.alive[a] = self.params[a], False

    def draw(self, index: np.ndarray, logits: Tensor | None) -> Written:
        """A token for each of the rows from its logits [n, V], put into place for the next step."""
        n = len(index)
        token, logp, raw = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros(n)
        if logits is not None:
            u = torch.from_numpy(self.u[index, self.written[index]]).to(self.device)
            by = dict[int, list[int]]()
            for i, r in enumerate(index.tolist()):
                by.setdefault(id(self.params[r]), []).append(i)
            for some in by.values():
                params = self.params[index[some[0]]]
                assert params is not None
                t, lp = draw(logits[some], u[some], params)
                full = logits[some].log_softmax(-1).gather(-1, t[:, None])[:, 0]
                token[some], logp[some], raw[some] = t.cpu().numpy(), lp.double().cpu().numpy(), full.cpu().numpy()
        self.token[index] = token
        self.written[index] += 1
        ended = (token[:, None] == self.stops[index]).any(1) | (self.written[index] >= self.limit[index])
        self.alive[index] = ~ended
        return Written(row=index, token=token, logp=logp, raw=raw, ended=ended)
