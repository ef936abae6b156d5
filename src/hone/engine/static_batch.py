"""Static batches, for a model that has no runner: rows of one prompt length begin together and end one by one."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from hone.engine.draw import draw, uniforms
from hone.engine.params import DIVERGED, SampleParams, SamplingTensors, check_support
from hone.engine.requests import RequestOutput
from hone.engine.stop_strings import Decode, StopFinder
from hone.errors import HoneError
from hone.types import Stop

COMPACT_BELOW = 0.7  # drop finished rows when a smaller share still writes; on a CPU 0.65 and 0.75 were fastest


class Cache(Protocol):
    """Keys and values of the columns fed so far."""

    def rows(self, index: Tensor) -> Self: ...


class DecoderSizes(Protocol):
    """The two numbers that a prompt is checked against."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


class SampledDecoder(Protocol):
    """What sampling needs of a decoder whose layers are another library's."""

    @property
    def config(self) -> DecoderSizes: ...
    @property
    def device(self) -> torch.device: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def __call__(self, tokens: Tensor, *, cache: Any) -> Tensor: ...
    def new_cache(self, rows: int, capacity: int) -> Cache: ...


@dataclass(slots=True)
class _Rows:
    """The b rows being decoded. Rows that have ended stay until `compact` drops them."""

    cache: Cache
    sampling: SamplingTensors
    index: Tensor  # int64 [b]  the number of each row in the batch
    alive: Tensor  # bool  [b]

    def compact(self) -> Tensor:
        """Keep the rows that still write. Returns where they were."""
        keep = self.alive.nonzero().squeeze(1)
        self.cache, self.sampling = self.cache.rows(keep), self.sampling.rows(keep)
        self.index, self.alive = self.index[keep], self.alive[keep]
        return keep


@dataclass(frozen=True, slots=True)
class _Written:
    """What a batch of B rows wrote. A row's column means nothing past its length."""

    token: Tensor  # int64 [steps, B]
    logp: Tensor  # float64 [steps, B]
    raw: Tensor  # float64 [steps, B]
    length: Tensor  # int64 [B]


class StaticBatches:
    """At most `max_rows` rows at a time, of prompts of one length."""

    def __init__(self, decoder: SampledDecoder, *, max_rows: int, decode: Decode | None) -> None:
        self.decoder, self.max_rows, self.decode = decoder, max_rows, decode

    def write(self, prompts: Mapping[int, Sequence[int]], params: SampleParams) -> Iterator[RequestOutput]:
        """A completion of each request."""
        order = sorted(prompts, key=lambda request: len(prompts[request]))
        start = 0
        for end in range(1, len(order) + 1):
            last = end == len(order) or len(prompts[order[end]]) != len(prompts[order[start]])
            if last or end - start == self.max_rows:
                yield from self._batch({request: prompts[request] for request in order[start:end]}, params)
                start = end

    def _batch(self, prompts: Mapping[int, Sequence[int]], params: SampleParams) -> Iterator[RequestOutput]:
        check_support(params, records=False)
        requests, rows = list(prompts), [list(prompt) for prompt in prompts.values()]
        limit = min(params.max_tokens, self.decoder.config.max_position_embeddings - len(rows[0]))
        finders = [StopFinder(params.stop, self.decode) for _ in rows] if params.stop and self.decode else []
        logits, state = self._prefill(rows, limit, params)
        u = uniforms(params.seed, requests, limit).to(self.decoder.device)
        written, hits = self._decode(logits, state, u, params.stop_ids, finders)
        if not written.logp.isfinite().all():
            raise HoneError(DIVERGED)
        columns = (x.T.tolist() for x in (written.token, written.logp, written.raw))
        for i, (token, logp, raw, n) in enumerate(zip(*columns, written.length.tolist(), strict=True)):
            stopped = Stop.TOKEN if token[n - 1] in params.stop_ids else Stop.LENGTH
            text = "" if not finders else finders[i].text() if i in hits else finders[i].close()
            yield RequestOutput(
                id=requests[i],
                tokens=array("q", token[:n]),
                logp=array("d", logp[:n]),
                raw=array("d", raw[:n]),
                stop=Stop.STRING if i in hits else stopped,
                text=text,
            )

    def _prefill(self, prompts: list[list[int]], limit: int, params: SampleParams) -> tuple[Tensor, _Rows]:
        """The logits after each prompt, and the rows to decode. Equal prompts are computed once."""
        device = self.decoder.device
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        cache = self.decoder.new_cache(len(place), len(prompts[0]) + limit - 1)
        logits = self._forward(torch.tensor(list(place), device=device), cache)
        owner = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)
        rows = _Rows(
            cache=cache.rows(owner),
            sampling=SamplingTensors.of([params] * len(prompts), logits.shape[-1], device, prompts),
            index=torch.arange(len(prompts), device=device),
            alive=torch.ones(len(prompts), dtype=torch.bool, device=device),
        )
        return logits[owner], rows

    def _forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        """int64 [b, t] new tokens -> logits [b, V] after the last one."""
        return self.decoder.logits(self.decoder(tokens, cache=cache)[:, -1])

    def _decode(
        self, logits: Tensor, rows: _Rows, u: Tensor, stop_ids: frozenset[int], finders: list[StopFinder]
    ) -> tuple[_Written, set[int]]:
        """Write until every row has stopped, at most len(u) tokens. Returns also the rows that a stop string ended."""
        out = _Written(
            token=torch.zeros(u.shape, dtype=torch.int64, device=u.device),
            logp=torch.zeros_like(u),
            raw=torch.zeros_like(u),
            length=torch.zeros(u.shape[1], dtype=torch.int64, device=u.device),
        )
        stops = torch.zeros(logits.shape[-1], dtype=torch.bool, device=u.device)
        stops[sorted(stop_ids)] = True
        hits: set[int] = set()
        for t in range(len(u)):
            token, logp, raw = draw(logits, u[t, rows.index], rows.sampling)
            rows.sampling.add_written(token)
            out.token[t].index_copy_(0, rows.index, token)
            out.logp[t].index_copy_(0, rows.index, logp.double())
            out.raw[t].index_copy_(0, rows.index, raw.double())
            out.length.index_add_(0, rows.index, rows.alive.long())
            rows.alive &= ~stops[token]
            if finders:
                rows.alive &= ~_found(finders, rows, token, hits).to(u.device)
            writing = int(rows.alive.sum())  # the one wait for the device in a step
            if not writing or t + 1 == len(u):
                break
            if writing < COMPACT_BELOW * len(token):
                token = token[rows.compact()]
            logits = self._forward(token[:, None], rows.cache)
        return out, hits


def _found(finders: list[StopFinder], rows: _Rows, token: Tensor, hits: set[int]) -> Tensor:
    """bool [b]: the rows still writing whose token completes a stop string. They are added to `hits`."""
    found = np.zeros(len(token), dtype=np.bool_)
    for i, (row, alive, written) in enumerate(
        zip(rows.index.tolist(), rows.alive.tolist(), token.tolist(), strict=True)
    ):
        if alive and finders[row].push(written):
            found[i] = True
            hits.add(row)
    return torch.from_numpy(found)
