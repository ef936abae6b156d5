"""The in-process sampler: it decodes with the learner's own weights, so nothing is copied or can go stale."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from hone.errors import HoneError
from hone.rollout.draw import Knobs, check_params, draw, uniforms
from hone.rollout.protocol import Adapters, SampleParams
from hone.types import Group, Rollout, Stop

COMPACT_BELOW = 0.7  # drop finished rows when a smaller share still writes; on a CPU 0.65 and 0.75 were fastest
PREFILL_TOKENS = 4_096  # the most prompt tokens in one forward pass: bounds the activations


class Cache(Protocol):
    """Keys and values of the columns fed so far."""

    length: int

    def rows(self, index: Tensor) -> Self: ...


class Shape(Protocol):
    """The two numbers a prompt is checked against."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


class Decoder(Protocol):
    """What the sampler needs of model.decoder.Decoder, which is to the right of this package."""

    @property
    def config(self) -> Shape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def pads(self) -> bool: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def __call__(self, tokens: Tensor, *, positions: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor: ...
    def new_cache(self, rows: int, capacity: int) -> Cache: ...
    def modules(self) -> Iterator[nn.Module]: ...


@contextmanager
def evaluating(decoder: Decoder) -> Iterator[None]:
    """Every module in eval mode, then each back in its own mode."""
    modes = [(module, module.training) for module in decoder.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def visible(first: int, last: int, pad: Tensor | None, *, device: torch.device) -> Tensor | None:
    """bool [B or 1, 1, last - first, last]: column q sees k where pad <= k <= q; None where causal says it all."""
    if pad is None and (first == 0 or last - first == 1):
        return None
    k = torch.arange(last, device=device)
    q = torch.arange(first, last, device=device)[:, None]
    if pad is None:
        return (k <= q)[None, None]
    # padding looks at itself: a row that sees nothing would be NaN, and NaN leaks through a zero weight
    return ((k <= q) & (k >= pad[:, None, None]) | (k == q))[:, None]


@dataclass(slots=True)
class _Rows:
    """The rows being decoded, b of them; finished ones stay until `compact` drops them."""

    cache: Cache
    index: Tensor  # int64 [b]  which row of the wave each one is
    limit: Tensor  # int64 [b]  the most tokens it may write
    pad: Tensor | None  # int64 [b]  columns of left padding; None: no row has any
    alive: Tensor  # bool  [b]

    def compact(self) -> Tensor:
        """Keep the rows still writing and return where they were."""
        keep = self.alive.nonzero().squeeze(1)
        self.cache = self.cache.rows(keep)
        self.index, self.limit, self.alive = self.index[keep], self.limit[keep], self.alive[keep]
        self.pad = None if self.pad is None else self.pad[keep]
        return keep


@dataclass(frozen=True, slots=True)
class _Written:
    """What a wave of B rows wrote; a row's column is rubbish past its length."""

    token: Tensor  # int64 [steps, B]
    logp: Tensor  # float64 [steps, B]
    length: Tensor  # int64 [B]


Switch = Callable[[str | None], AbstractContextManager[None]]  # inside, an adapter is on; None: the base model


class LocalSampler:
    """Batched, cached sampling from `decoder`, at most `max_rows` completions at a time.

    switch: partial(use_adapter, decoder), for requests that name an adapter.

    A request draws the same random numbers whatever is sampled with it. Its completion is then the same too,
    unless a number falls within rounding of the edge between two tokens: the last bits of a logit depend on the
    shape of the batch.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int = 512, pad_id: int = 0, switch: Switch | None = None) -> None:
        if max_rows < 1:
            raise HoneError(f"max_rows is {max_rows}: set it to 1 or more")
        if not 0 <= pad_id < decoder.config.vocab_size:
            raise HoneError(f"pad_id is {pad_id}: use any token of the model's {decoder.config.vocab_size}")
        self.decoder, self.max_rows, self.pad_id, self.switch = decoder, max_rows, pad_id, switch
        self.version = 0

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        params: SampleParams,
        first_request: int = 0,
        adapter: Adapters = None,
    ) -> list[Group]:
        """n rollouts of each prompt; greedy ones record the log-prob at temperature 1."""
        self._check(prompts, n, params, first_request)
        rollouts: dict[int, Rollout] = {}
        with torch.inference_mode(), evaluating(self.decoder):
            for on, chosen in self._by_adapter(len(prompts), adapter):
                owners = {first_request + i * n + j: prompts[i] for i in chosen for j in range(n)}
                with on:
                    rollouts |= self._answer(owners, params)
        return [[rollouts[first_request + i * n + j] for j in range(n)] for i in range(len(prompts))]

    def _answer(self, prompts: Mapping[int, Sequence[int]], params: SampleParams) -> dict[int, Rollout]:
        """A rollout of each request."""
        # prompts of one length side by side need no padding
        order = sorted(prompts, key=lambda request: len(prompts[request]))
        rollouts: dict[int, Rollout] = {}
        for wave in self._waves(order, [len(prompts[request]) for request in order]):
            written = self._wave([prompts[request] for request in wave], wave, params)
            rollouts.update(zip(wave, written, strict=True))
        return rollouts

    def _by_adapter(self, count: int, adapter: Adapters) -> Iterator[tuple[AbstractContextManager[None], list[int]]]:
        """The prompts that share an adapter: no row is in a wave with one of another."""
        if adapter is None:
            yield nullcontext(), list(range(count))
            return
        if self.switch is None:
            raise HoneError("this sampler was given no adapters: LocalSampler(decoder, switch=...), or leave it out")
        names = [adapter] * count if isinstance(adapter, str) else list(adapter)
        if len(names) != count:
            raise HoneError(f"{len(names)} adapters for {count} prompts: give one name, or one for each prompt")
        for name in dict.fromkeys(names):
            with self.switch(name):
                pass  # a name that is not there is said before anything is sampled
        for name in dict.fromkeys(names):
            yield self.switch(name), [i for i, other in enumerate(names) if other == name]

    def _waves(self, order: list[int], lengths: list[int]) -> Iterator[list[int]]:
        """At most `max_rows` requests at a time; of one length each for a model that cannot be padded."""
        start = 0
        for end in range(1, len(order) + 1):
            last = end == len(order)
            other = not last and lengths[end] != lengths[start] and not self.decoder.pads
            if last or other or end - start == self.max_rows:
                yield order[start:end]
                start = end

    def _check(self, prompts: Sequence[Sequence[int]], n: int, params: SampleParams, first_request: int) -> None:
        if n < 1 or first_request < 0:
            raise HoneError(f"n is {n} and first_request {first_request}: set n to 1 or more, the other to 0 or more")
        context, vocab = self.decoder.config.max_position_embeddings, self.decoder.config.vocab_size
        check_params(params, vocab)
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise HoneError(
                    f"prompt {i} has 0 tokens, the model's context is {context}: give it at least one token"
                )
            if len(prompt) + 1 > context:
                raise HoneError(
                    f"prompt {i} has {len(prompt)} tokens, the model's context is {context} and a completion needs "
                    "one: shorten the prompt or raise model.max_position_embeddings"
                )
            if min(prompt) < 0 or max(prompt) >= vocab:
                wrong = next(token for token in prompt if not 0 <= token < vocab)
                raise HoneError(
                    f"prompt {i} has token {wrong}, outside the model's vocabulary of {vocab}: "
                    "the tokenizer does not fit the model, use the one it was trained with"
                )

    def _wave(self, prompts: Sequence[Sequence[int]], requests: Sequence[int], params: SampleParams) -> list[Rollout]:
        context = self.decoder.config.max_position_embeddings
        limits = [min(params.max_tokens, context - len(prompt)) for prompt in prompts]
        logits, rows = self._prefill(prompts, limits)
        u = uniforms(params.seed, requests, max(limits)).to(self.decoder.device)
        knobs = Knobs.of([params] * len(prompts), logits.shape[-1], logits.device, prompts)
        written = self._decode(logits, rows, u, knobs, params.stop_ids)
        if not written.logp.isfinite().all():
            raise HoneError(
                "the model's logits are not finite, its weights have diverged: go back to an earlier checkpoint "
                "and lower the learning rate"
            )
        columns = zip(written.token.T.tolist(), written.logp.T.tolist(), written.length.tolist(), strict=True)
        rollouts: list[Rollout] = []
        for prompt, limit, (token, logp, length) in zip(prompts, limits, columns, strict=True):
            rollouts.append(
                Rollout(
                    tokens=[*prompt, *token[:length]],
                    mask=[False] * len(prompt) + [True] * length,
                    gen_logp=[0.0] * len(prompt) + logp[:length],
                    stop=Stop.TOKEN if token[length - 1] in params.stop_ids else Stop.LENGTH,
                    limit=limit,
                    version=self.version,
                )
            )
        return rollouts

    def _prefill(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[Tensor, _Rows]:
        """The logits after each prompt, and the rows to go on with; equal prompts are computed once."""
        device = self.decoder.device
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        width = max(map(len, place))
        padded = [[self.pad_id] * (width - len(prompt)) + list(prompt) for prompt in place]
        tokens = torch.tensor(padded, device=device)
        pad = torch.tensor([width - len(prompt) for prompt in place], device=device) if mixed(place) else None
        cache = self.decoder.new_cache(len(place), width + max(limits) - 1)
        *early, final = tokens.split(max(1, PREFILL_TOKENS // len(place)), dim=1)
        for columns in early:
            self._forward(columns, cache, pad)
        logits = self._forward(final, cache, pad)
        owner = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)
        rows = _Rows(
            cache=cache.rows(owner),
            index=torch.arange(len(prompts), device=device),
            limit=torch.tensor(limits, device=device),
            pad=None if pad is None else pad[owner],
            alive=torch.ones(len(prompts), dtype=torch.bool, device=device),
        )
        return logits[owner], rows

    def _forward(self, tokens: Tensor, cache: Cache, pad: Tensor | None) -> Tensor:
        """int64 [b, t] new columns -> logits [b, V] after the last one."""
        first, last = cache.length, cache.length + tokens.shape[1]
        positions = None
        if pad is not None:
            # padding sits before 0; a finished row that waits for the others may run past the context
            end = self.decoder.config.max_position_embeddings - 1
            positions = (torch.arange(first, last, device=pad.device) - pad[:, None]).clamp(0, end)
        mask = visible(first, last, pad, device=tokens.device) if self.decoder.pads else None
        hidden = self.decoder(tokens, positions=positions, mask=mask, cache=cache)
        return self.decoder.logits(hidden[:, -1])

    def _decode(self, logits: Tensor, rows: _Rows, u: Tensor, knobs: Knobs, stop_ids: frozenset[int]) -> _Written:
        """Write until every row has stopped: at a stop token or at its limit."""
        out = _Written(
            token=torch.zeros(u.shape, dtype=torch.int64, device=u.device),
            logp=torch.zeros_like(u),
            length=torch.zeros(u.shape[1], dtype=torch.int64, device=u.device),
        )
        stops = torch.zeros(logits.shape[-1], dtype=torch.bool, device=u.device)
        stops[sorted(stop_ids)] = True
        for t in range(len(u)):
            token, logp, _ = draw(logits, u[t, rows.index], knobs)
            knobs.see(token)
            out.token[t].index_copy_(0, rows.index, token)
            out.logp[t].index_copy_(0, rows.index, logp.double())
            out.length.index_add_(0, rows.index, rows.alive.long())
            rows.alive &= ~(stops[token] | (rows.limit <= t + 1))
            writing = int(rows.alive.sum())  # the one wait for the device in a step
            if not writing:
                break
            if writing < COMPACT_BELOW * len(token):
                keep = rows.compact()
                token, knobs = token[keep], knobs.rows(keep)
            logits = self._forward(token[:, None], rows.cache, rows.pad)
        return out


def mixed(prompts: Iterable[Sequence[int]]) -> bool:
    """Whether lengths differ, so that padding is needed."""
    return len({len(prompt) for prompt in prompts}) > 1
