"""The sampler protocol, and the sampler in this process.

It decodes with the learner's own weights, so that nothing is copied or can go stale.
"""

import copy as copies
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from hone.engine.engine import Engine
from hone.engine.params import Adapters, SampleParams, check_call, check_whole
from hone.engine.requests import Request, RequestOutput
from hone.engine.runner import Runner, Switch
from hone.engine.runners.choose import make_runner
from hone.engine.static_batch import SampledDecoder, StaticBatches
from hone.engine.stop_strings import Decode
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.types import Group, Rollout, Stop

ADAPTER_IS_ON = frozenset({"selected", "enabled"})  # of model.lora.LoRALinear, which is to the right of this package
Ended = Callable[[RequestOutput], tuple[int, Rollout]]  # what is made of a request's end
COLUMNS = 64  # memory for sequences grows in steps of so many tokens, so that it seldom has to be made anew


class Sampler(Protocol):
    """Writes completions with the weights called `version`."""

    version: int

    def publish(self, version: int) -> None:
        """From now on sample from the learner's weights as they are, and call them `version`."""
        ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        params: SampleParams,
        first_request: int = 0,
        adapter: Adapters = None,
    ) -> list[Group]:
        """n rollouts of each prompt; sample j of prompt i is request `first_request + i * n + j`."""
        ...

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        params: SampleParams,
        first_request: int = 0,
        adapter: Adapters = None,
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """The same, step by step: the rollouts that ended in it, sample j of prompt i as number i * n + j."""
        ...


@contextmanager
def evaluating(decoder: Decoder) -> Iterator[None]:
    """Every module in eval mode, then each back in its own mode."""
    training = [module for module in decoder.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class LocalSampler:
    """Continuous batching of `decoder`, at most `max_rows` completions at a time.

    switch: partial(use_adapter, decoder), for requests that name an adapter.
    invariant: a completion depends on its request alone, to the last bit, whatever is sampled with it; slower.
    Without it a request still draws the same random numbers, and its completion is the same unless one falls within
    rounding of the edge between two tokens.
    copy: sample from a copy of the weights, which follows the learner's at `publish` alone.
    decode: tokens to text, for stop strings.
    kv_memory: the most bytes for keys and values; None: a share of what is free. With less, fewer rows run at a time.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int = 512,
        switch: Switch | None = None,
        invariant: bool = False,
        copy: bool = False,
        decode: Decode | None = None,
        kv_memory: int | None = None,
    ) -> None:
        for name, count in (("max_rows", max_rows), ("kv_memory", 1 if kv_memory is None else kv_memory)):
            check_whole(name, count)
            if count < 1:
                raise HoneError(f"{name} is {count}: set it to 1 or more")
        self.source, self.max_rows, self.invariant = decoder, max_rows, invariant
        self.decode, self.kv_memory = decode, kv_memory
        self.decoder, self.switch = _copy_decoder(decoder, switch) if copy else (decoder, switch)
        self.version = 0
        self._runner: Runner | None = None
        self._rows = 0  # as asked for: memory may have granted fewer
        # the weights there were then, and whether supports were recorded
        self._made_for: tuple[torch.device, torch.dtype, int, bool] | None = None

    def publish(self, version: int) -> None:
        """From now on sample from the learner's weights as they are, and call them `version`."""
        if self.decoder is not self.source:
            _copy_weights(self.source, self.decoder)
        self.version = version

    def weights(self) -> dict[str, Tensor]:
        """What is sampled from."""
        return self.decoder.state_dict()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Put these into the copy of the weights that is sampled from, until the next `publish`."""
        here = self.weights()
        if here.keys() != weights.keys():
            raise HoneError("these weights are not the sampler's: resume with the settings of the run")
        for name, x in here.items():
            x.copy_(weights[name])
        self.version = version

    def release(self) -> None:
        """Give the memory back; the next call takes what it needs."""
        self._runner, self._rows = None, 0

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
        steps = self.stream(prompts, n=n, params=params, first_request=first_request, adapter=adapter)
        rollouts = dict(numbered for ended in steps for numbered in ended)
        return [[rollouts[i * n + j] for j in range(n)] for i in range(len(prompts))]

    @torch.inference_mode()  # as a decorator it is off while the caller has its turn
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        params: SampleParams,
        first_request: int = 0,
        adapter: Adapters = None,
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """The same, step by step: the rollouts that ended in it, sample j of prompt i as number i * n + j."""
        context, vocab, reads_text = (
            self.decoder.config.max_position_embeddings,
            self.decoder.config.vocab_size,
            self.decode is not None,
        )
        check_call(prompts, n, params, first_request, context=context, vocab_size=vocab, reads_text=reads_text)
        kept = [SharedPrompt(tuple(prompt), self._limit(prompt, params), self.version) for prompt in prompts]
        with evaluating(self.decoder):
            for name, on, chosen in self._by_adapter(len(kept), adapter):
                owners = {first_request + i * n + j: kept[i] for i in chosen for j in range(n)}
                asked = {i: owner.prompt for i, owner in owners.items()}

                def ended(news: RequestOutput, owners: Mapping[int, SharedPrompt] = owners) -> tuple[int, Rollout]:
                    return news.id - first_request, owners[news.id].rollout(news)

                with on:
                    yield from self._write(asked, ended, params, name)  # each is taken while others are being written

    def _write(
        self, prompts: Mapping[int, tuple[int, ...]], ended: Ended, params: SampleParams, adapter: str | None
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """Completions, with the weights as they are, step by step; adapter: the name of the one that is on."""
        if not prompts:
            return
        if not self.decoder.takes_rows:  # its layers are another library's
            batches = StaticBatches(cast(SampledDecoder, self.decoder), max_rows=self.max_rows, decode=self.decode)
            yield from ([ended(news)] for news in batches.write(prompts, params))
            return
        longest = max(prompts.values(), key=len)
        columns = len(longest) + self._limit(longest, params)
        runner, vocab = (
            self._runner_for(len(prompts), columns, support=params.support_recorded),
            self.decoder.config.vocab_size,
        )
        engine = Engine(runner, vocab_size=vocab, decode=self.decode)
        asked = [Request(id=i, prompt=prompt, params=params, adapter=adapter) for i, prompt in prompts.items()]
        engine.submit(asked, checked=True)
        while engine.busy:
            found: list[tuple[int, Rollout]] = []
            engine.run_step(lambda news, found=found: found.append(ended(news)))
            yield found

    def _runner_for(self, rows: int, columns: int, *, support: bool = False) -> Runner:
        """A runner for so many sequences of this length; the one there is, if it will do."""
        rows = min(rows, self.max_rows)
        runner, weights = self._runner, list(self.decoder.parameters())
        # `.to` changes what keys and values are, and an adapter added since needs memory of its own
        now = weights[0].device, weights[0].dtype, sum(weight.numel() for weight in weights), support
        if runner is None or rows > self._rows or columns > runner.capacity or now != self._made_for:
            context = self.decoder.config.max_position_embeddings
            columns = max(min(-(-columns // COLUMNS) * COLUMNS, context), runner.capacity if runner else 0)
            rows = max(rows, self._rows)
            del runner
            self.release()  # before the memory of the next is taken
            runner = self._runner = make_runner(
                self.decoder,
                max_rows=rows,
                capacity=columns,
                switch=self.switch,
                invariant=self.invariant,
                memory=self.kv_memory,
                support=support,
            )
            self._rows, self._made_for = rows, now
        return runner

    def _limit(self, prompt: Sequence[int], params: SampleParams) -> int:
        return min(params.max_tokens, self.decoder.config.max_position_embeddings - len(prompt))

    def _by_adapter(
        self, count: int, adapter: Adapters
    ) -> Iterator[tuple[str | None, AbstractContextManager[None], list[int]]]:
        """The prompts that share an adapter: no row runs beside one of another."""
        if adapter is None:
            yield None, nullcontext(), list(range(count))
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
            yield name, self.switch(name), [i for i, other in enumerate(names) if other == name]


class SharedPrompt:
    """What the rollouts of one prompt have in common."""

    def __init__(self, prompt: tuple[int, ...], limit: int, version: int) -> None:
        self.prompt, self.limit, self.version = prompt, limit, version
        self.tokens, self.zeros = array("q", prompt), array("d", bytes(8 * len(prompt)))

    def rollout(self, news: RequestOutput) -> Rollout:
        """The prompt and what was written after it."""
        assert news.stop is not None
        return Rollout(
            tokens=self.tokens + news.tokens,
            mask=_mask(len(self.prompt), len(news.tokens)),
            gen_logp=self.zeros + news.logp,
            raw_logp=self.zeros + news.raw,
            support_size=array("i", bytes(4 * len(self.prompt))) + news.support_size if news.support_size else (),
            support=news.support if news.support_size else (),
            stop=news.stop,
            limit=self.limit,
            version=self.version,
            text=news.text if news.stop is Stop.STRING else "",
        )


@lru_cache(maxsize=64)
def _mask(before: int, written: int) -> tuple[bool, ...]:
    """Rollouts of the same lengths share one: a thousand of them would cost the garbage collector a visit each."""
    return (False,) * before + (True,) * written


def _copy_decoder(decoder: Decoder, switch: Switch | None) -> tuple[Decoder, Switch | None]:
    """A decoder of its own, and what switches its adapters."""
    twin, other = copies.deepcopy((decoder, switch))
    if switch is not None and other is switch:  # a plain function: it would switch the learner's
        raise HoneError("copy needs a switch that can be copied: give switch=partial(use_adapter, decoder)")
    return twin, other


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    """In place: a runner holds on to the tensors."""
    there, here = source.state_dict(keep_vars=True), target.state_dict(keep_vars=True)
    if there.keys() != here.keys():
        odd = sorted(there.keys() ^ here.keys())[0]
        raise HoneError(f"{odd} was added to or taken from the model since it was copied: make the sampler anew")
    for name, x in there.items():
        here[name].copy_(x)
    for module, twin in zip(source.modules(), target.modules(), strict=True):
        for name in ADAPTER_IS_ON & vars(module).keys():  # no tensor, and yet what the learner computes with
            setattr(twin, name, getattr(module, name))
