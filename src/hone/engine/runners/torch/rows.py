"""What each row of a plain runner is doing: its last token, its length, its random numbers and how it draws."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.draw import RandomStreams, draw, top_logprobs
from hone.engine.params import Knobs, Uses
from hone.engine.runner import Seat, Written
from hone.engine.runners.torch.layers import Draw

NO_TOKEN = -1

Index = NDArray[np.int64]


class RowState:
    """Arrays with one entry a row, on the host: a launch is read at once, so nothing waits for them."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, *, at_once: int, quick_draw: Draw | None = None
    ) -> None:
        """at_once: rows drawn together. quick_draw: draws rows that no setting alters."""
        self.device, self.at_once, self.quick_draw = device, at_once, quick_draw
        self.alive = np.zeros(rows, dtype=np.bool_)
        self.token = np.zeros(rows, dtype=np.int64)  # the last one written: the next decode reads it
        self.length = np.zeros(rows, dtype=np.int64)  # columns in memory: all tokens but the last
        self.left = np.zeros(rows, dtype=np.int64)  # tokens it may still write
        self.top = np.zeros(rows, dtype=np.int64)  # how many of the most probable tokens it reports
        self.records = np.zeros(rows, dtype=np.bool_)  # whether it reports which tokens could have been drawn
        self.stops = np.full((rows, 1), NO_TOKEN)
        self.tainted = np.zeros(rows, dtype=np.bool_)  # its memory may hold numbers that are not finite
        self.noise = RandomStreams(rows)
        self.knobs = Knobs.plain(rows, vocab, device)

    def seat(self, seat: Seat, prompt: tuple[int, ...]) -> None:
        """A request that has read its prompt begins in its row."""
        r, params, stops = seat.row, seat.params, sorted(seat.params.stop_ids)
        self.alive[r], self.length[r], self.left[r] = True, len(prompt), seat.limit
        self.top[r], self.records[r] = params.top_logprobs, params.support_recorded
        if len(stops) > self.stops.shape[1]:
            more = np.full((len(self.stops), len(stops) - self.stops.shape[1]), NO_TOKEN)
            self.stops = np.concatenate([self.stops, more], 1)
        self.stops[r] = NO_TOKEN
        self.stops[r, : len(stops)] = stops
        self.noise.seat(r, params.seed, seat.request)
        self.knobs.seat(r, params, prompt)

    def move(self, a: int, b: int) -> None:
        """Row `a` goes on as row `b`."""
        for x in (self.alive, self.token, self.length, self.left, self.top, self.records, self.stops, self.tainted):
            x[b] = x[a]
        self.noise.move(a, b)
        self.knobs.move(a, b)
        self.alive[a] = False

    def begin(self, index: Index, logits: Tensor) -> Written:
        """The first token of rows just seated, from logits [n, V]."""
        where = torch.from_numpy(index)
        knobs = self.knobs.rows(where)
        u = torch.from_numpy(self.noise.next(index)).to(self.device)
        kept = self._kept(index, logits)
        token, logp, raw = self._draw(logits, u, knobs, kept)
        if self.knobs.seen is not None:
            self.knobs.seen[where.to(self.device), token] = True
        return self._note(index, (token, logp, raw), self._tops(index, logits), kept)

    def go_on(self, rows: int, index: Index, logits: Tensor) -> Written:
        """The next token of the rows `index`, alive, from the logits [rows, V] of those before `rows`."""
        u = np.zeros(rows)
        u[index] = self.noise.next(index)
        knobs = self.knobs.head(rows)
        kept = self._kept(index, logits)
        drawn = self._draw(logits, torch.from_numpy(u).to(self.device), knobs, kept)
        knobs.see(drawn[0])
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
        self, logits: Tensor, u: Tensor, knobs: Knobs, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        easy = knobs.uses == Uses.SAMPLED
        if self.quick_draw is not None and easy.all():
            token, logp = self.quick_draw(logits, u)
            return token, logp, logp
        if self.quick_draw is not None and easy.any():
            return self._apart(logits, u, knobs, easy, kept)
        if len(logits) <= self.at_once:
            return draw(logits, u, knobs, kept=kept)
        parts = [slice(a, min(a + self.at_once, len(u))) for a in range(0, len(u), self.at_once)]
        drawn = [
            draw(logits[p], u[p], knobs.rows(range(p.start, p.stop)), kept=None if kept is None else kept[p])
            for p in parts
        ]
        token, logp, raw = (torch.cat(x) for x in zip(*drawn, strict=True))
        return token, logp, raw

    def _apart(
        self, logits: Tensor, u: Tensor, knobs: Knobs, easy: NDArray[np.bool_], kept: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of both kinds: what the others ask for does not change how a row is drawn."""
        token = torch.empty(len(u), dtype=torch.int64)
        logp, raw = torch.empty(2, len(u), dtype=logits.dtype)
        for chosen in (easy, ~easy):
            index = torch.from_numpy(np.flatnonzero(chosen))
            some = None if kept is None else kept[index]
            token[index], logp[index], raw[index] = self._draw(logits[index], u[index], knobs.rows(index), some)
            if kept is not None and some is not None:
                kept[index] = some
        return token, logp, raw

    def nothing(self) -> Written:
        """A launch in which no row wrote."""
        none = np.zeros(0)
        whole = none.astype(np.int64)
        return Written(row=whole, token=whole, logp=none, raw=none, ended=none.astype(np.bool_))

    def _tops(self, index: Index, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        most = int(self.top[index].max())
        return top_logprobs(logits, most) if most else None

    def _note(
        self,
        index: Index,
        drawn: tuple[Tensor, Tensor, Tensor],
        top: tuple[Tensor, Tensor] | None,
        kept: Tensor | None,
    ) -> Written:
        """Put the tokens into place for the next step, and tell."""
        token = drawn[0].cpu().numpy()
        logp, raw = (x.double().cpu().numpy() for x in drawn[1:])
        self.token[index] = token
        self.left[index] -= 1
        ended = (token[:, None] == self.stops[index]).any(1) | (self.left[index] <= 0)
        self.alive[index] = ~ended
        self.tainted[index] |= ~np.isfinite(logp + raw)
        return Written(
            row=index,
            token=token,
            logp=logp,
            raw=raw,
            ended=ended,
            top_token=None if top is None else top[0].cpu().numpy(),
            top_logp=None if top is None else top[1].double().cpu().numpy(),
            support=None if kept is None else _ids(kept, self.records[index]),
        )


def _ids(kept: Tensor, asked: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """The ids of the tokens that are kept, by row; none for a row that did not ask."""
    table = kept.cpu().numpy() & asked[:, None]
    ids = np.nonzero(table)[1].astype(np.int32)
    return np.split(ids, table.sum(1).cumsum()[:-1])
