"""Thousands of mixed requests, some cancelled: nothing is left behind, and each completion is the request's own."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add

import numpy as np
import pytest
import torch
from odd_runners import Watched

from hone.engine.draw import draw, uniforms
from hone.engine.engine import Engine
from hone.engine.params import SampleParams, SamplingTensors
from hone.engine.requests import Request, RequestOutput
from hone.engine.runners.choose import make_runner
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.lora import add_lora, lora_parameters, use_adapter
from hone.types import Stop

torch.set_num_threads(1)

VOCAB, CAPACITY = 29, 160
SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.4, "temperature": 1.2},
    {"bias": {3: 2.0, 7: -1.5}, "banned": frozenset({1, 2})},
    {"stop": ("ab", "ccd", "xx")},
]


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + t % 26) for t in tokens)


def model_of() -> Decoder:
    """One layer, in float64, with two adapters; the base model is on."""
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CAPACITY, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decoder(config).double()
        for name in ("one", "two"):
            add_lora(model, name=name, rank=2, alpha=8.0, targets=("all-linear",))
            with torch.no_grad():
                for p in lora_parameters(model):
                    p.copy_(torch.randn_like(p) * 0.5)
    return model


def requests(count: int) -> Iterator[list[Request]]:
    """In bursts of one adapter: groups, common beginnings, prompts of 1 token and of all that fits."""
    g = np.random.default_rng(7)
    common = [tuple(g.integers(VOCAB, size=100).tolist()) for _ in range(4)]
    number = 0
    while number < count:
        adapter = ("one", "two", "base")[g.choice(3, p=[0.45, 0.45, 0.1])]
        burst: list[Request] = []
        while len(burst) < 150 and number + len(burst) < count:
            start = common[g.integers(4)][: g.choice([0, 0, 10, 33, 64, 100])]
            prompt = (*start, *g.integers(VOCAB, size=int(g.choice([1, 3, 17, 55]))).tolist())
            settings = SETTINGS[g.integers(len(SETTINGS))]
            stops, most = frozenset(g.integers(VOCAB, size=2).tolist()), int(g.choice([1, 3, 8, 20, 200]))
            params = SampleParams(max_tokens=most, stop_ids=stops, seed=int(g.integers(3)), **settings)
            for _ in range(int(g.choice([1, 1, 2, 8]))):
                one = Request(id=number + len(burst), prompt=prompt, params=params, adapter=adapter)
                burst.append(replace(one, stream=bool(g.random() < 0.1), keep=one.id % 3 == 0))
        number += len(burst)
        yield burst


@dataclass
class Outcome:
    """What came of it."""

    asked: dict[int, Request] = field(default_factory=dict)
    got: dict[int, list[RequestOutput]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)


def soak(engine: Engine, count: int, *, steps: int) -> Outcome:
    """A burst every few steps, now and then a request is cancelled, wherever it is."""
    g, found, bursts = np.random.default_rng(1), Outcome(), requests(count)
    more = True
    while more or engine.busy:
        if more and len(engine.schedule.queues) < 600:
            burst = next(bursts, [])
            more = bool(burst)
            engine.submit(burst)
            found.asked |= {r.id: r for r in burst}
        for _ in range(steps):
            for news in engine.step():
                found.got.setdefault(news.id, []).append(news)
                if news.stop and found.asked[news.id].keep and news.id % 7 == 0:
                    go_on(engine, found, news.id)
        if engine.schedule.owner and g.random() < 0.3:
            inside = list(engine.schedule.owner)
            chosen = [inside[i] for i in g.integers(len(inside), size=3)]
            found.cancelled |= set(engine.cancel(chosen))
    return found


def go_on(engine: Engine, found: Outcome, number: int) -> None:
    """A next turn: what was asked and written, and a token more."""
    before = found.asked[number]
    prompt = (*before.prompt, *joined(found.got[number]).tokens, 3)
    if len(prompt) < CAPACITY:
        turn = replace(before, id=number + 1_000_000, prompt=prompt)
        engine.submit([turn])
        found.asked[turn.id] = turn


def joined(pieces: list[RequestOutput]) -> RequestOutput:
    parts = {name: reduce(add, [getattr(piece, name) for piece in pieces]) for name in ("tokens", "logp", "raw")}
    return replace(pieces[-1], **parts)


@torch.no_grad()
def drawn_alone(model: Decoder, asked: list[Request], written: list[RequestOutput]) -> tuple[np.ndarray, np.ndarray]:
    """Token and log-prob at every place of the completions, drawn from plain forward passes over them."""
    rows = [(*r.prompt, *n.tokens) for r, n in zip(asked, written, strict=True)]
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    logits = model.logits(model(padded))
    places, params, read, u = [], [], [], []
    for i, (r, n) in enumerate(zip(asked, written, strict=True)):
        first, count = len(r.prompt), len(n.tokens)
        places += [(i, first - 1 + t) for t in range(count)]
        params += [r.params] * count
        penalised = r.params.repetition_penalty != 1
        read += [rows[i][: first + t] if penalised else () for t in range(count)]
        u.append(uniforms(r.params.seed, [r.id], count)[:, 0])
    at = torch.tensor(places)
    knobs = SamplingTensors.of(params, VOCAB, "cpu", read)
    token, logp, _ = draw(logits[at[:, 0], at[:, 1]], torch.cat(u), knobs)
    return token.numpy(), logp.numpy()


@pytest.mark.parametrize("count", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_requests(count: int):
    model = model_of()

    def switch(name: str | None):
        return use_adapter(model, None if name == "base" else name)

    runner = Watched(make_runner(model, max_rows=96, capacity=CAPACITY, switch=switch), lag=2)
    runner.prefill_tokens = 2000
    engine = Engine(runner, vocab_size=VOCAB, decode=letters)
    found = soak(engine, count, steps=8)

    # nothing is left behind
    assert len(found.asked) >= count
    assert len(found.cancelled) > count // 100
    assert (engine.counts.running, engine.counts.waiting, engine.counts.free_blocks) == (0, 0, 96)
    assert sorted(engine.schedule.rows) == list(range(96))
    assert engine.schedule.pool.refs == [0] * 96
    assert not runner.seats
    assert not engine.active
    assert not engine.record.is_open.any()
    assert runner.computed == engine.counts.computed

    # every request that was not cancelled has ended, once
    ended = {number: joined(pieces) for number, pieces in found.got.items() if pieces[-1].stop}
    assert ended.keys() == found.asked.keys() - found.cancelled
    assert all(piece.stop is None for pieces in found.got.values() for piece in pieces[:-1])
    assert {news.stop for news in ended.values()} == set(Stop)
    for number, news in ended.items():
        check_end(found.asked[number], news)

    # and wrote what it would have written alone
    order = sorted(ended, key=lambda n: (str(found.asked[n].adapter), len(found.asked[n].prompt)))
    for start in range(0, len(order), 400):
        some = order[start : start + 400]
        for adapter in {found.asked[n].adapter for n in some}:
            mine = [n for n in some if found.asked[n].adapter == adapter]
            with switch(adapter):
                token, logp = drawn_alone(model, [found.asked[n] for n in mine], [ended[n] for n in mine])
            np.testing.assert_array_equal(token, [t for n in mine for t in ended[n].tokens])
            np.testing.assert_allclose(logp, [p for n in mine for p in ended[n].logp], rtol=0, atol=1e-9)


def check_end(request: Request, news: RequestOutput) -> None:
    """Each has a reason to end, and no earlier one."""
    stops, text = request.params.stop, letters(list(news.tokens))
    limit = min(request.params.max_tokens, CAPACITY - len(request.prompt))
    assert not set(news.tokens[:-1]) & request.params.stop_ids
    assert len(news.tokens) == len(news.logp) == len(news.raw) <= limit
    if news.stop is Stop.TOKEN:
        assert news.tokens[-1] in request.params.stop_ids
    else:
        assert news.tokens[-1] not in request.params.stop_ids
        assert news.stop is Stop.STRING or len(news.tokens) == limit
        assert (news.stop is Stop.STRING) == any(stop in text for stop in stops)
    assert not any(stop in text[:-1] for stop in stops)
    if news.stop is Stop.STRING:
        assert text.startswith(news.text)
        assert len(text) - len(news.text) <= 3


def test_some_of_them_truly_alone():
    """The same question put to an engine with one row, which has never seen another request."""
    model = model_of()
    switch = partial(use_adapter, model)
    many = Engine(make_runner(model, max_rows=64, capacity=CAPACITY, switch=switch), vocab_size=VOCAB, decode=letters)
    asked = [replace(r, adapter="two") for burst in requests(2_000) for r in burst][:2000:10]
    many.submit(asked)
    together = {}
    while many.busy:
        for news in many.step():
            together.setdefault(news.id, []).append(news)
    for r in asked[::2]:
        one = Engine(make_runner(model, max_rows=1, capacity=CAPACITY, switch=switch), vocab_size=VOCAB, decode=letters)
        one.submit([r])
        alone: list[RequestOutput] = []
        while one.busy:
            alone += one.step()
        got, expected = joined(together[r.id]), joined(alone)
        assert (got.tokens, got.stop, got.text) == (expected.tokens, expected.stop, expected.text)
        assert got.logp == pytest.approx(expected.logp, abs=1e-10)
