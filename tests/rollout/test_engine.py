"""The engine on real models: what it writes does not depend on how it was scheduled, and nothing is left behind."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from odd_runners import Paged, Watched

from hone.engine.engine import Engine
from hone.engine.params import SampleParams
from hone.engine.requests import NO_LINE, Request, RequestOutput, TopLogprobs
from hone.engine.runner import LaunchResult, PromptChunk, Ticket
from hone.engine.runners.choose import make_runner
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_decoder
from hone.model.lora import add_lora, lora_parameters, use_adapter
from hone.types import Stop

torch.set_num_threads(1)

VOCAB, CONTEXT = 29, 128


def decoder(**changes: Any) -> Decoder:
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(DecoderConfig(vocab_size=VOCAB, **(shape | changes))).double()


def letters(tokens: Sequence[int]) -> str:
    """Token 0 is a, 1 is b; the last few write nothing, or two letters."""
    return "".join(chr(97 + t) if t < 26 else ("", "ab", "ba")[t - 26] for t in tokens)


def watched(model: Decoder, rows: int = 8, *, lag: int = 0, capacity: int = CONTEXT) -> Watched:
    return Watched(make_runner(model, max_rows=rows, capacity=capacity), lag)


def engine_of(runner: Any, *, prefill_tokens: int = 0) -> Engine:
    """prefill_tokens: of one launch; 0: the runner's own number."""
    runner.prefill_tokens = prefill_tokens or runner.prefill_tokens
    return Engine(runner, vocab_size=VOCAB, decode=letters)


def params(max_tokens: int = 10, *, stop_ids: Sequence[int] = (0, 5), **settings: Any) -> SampleParams:
    return SampleParams(max_tokens=max_tokens, stop_ids=frozenset(stop_ids), **settings)


def joined(a: TopLogprobs, b: TopLogprobs) -> TopLogprobs:
    return TopLogprobs(np.concatenate([a.token, b.token]), np.concatenate([a.raw, b.raw]))


def run(engine: Engine) -> dict[int, RequestOutput]:
    """Everything to its end; the news of a request put together."""
    found: dict[int, RequestOutput] = {}
    while engine.busy:
        for news in engine.step():
            before = found.get(news.id)
            if before is not None:
                assert before.stop is None, "news after the end"
                news = RequestOutput(
                    id=news.id, stop=news.stop, text=news.text, tokens=before.tokens + news.tokens,
                    logp=before.logp + news.logp, raw=before.raw + news.raw, top=joined(before.top, news.top),
                )  # fmt: skip
            found[news.id] = news
    check_empty(engine)
    return found


def check_empty(engine: Engine) -> None:
    counts, schedule = engine.counts, engine.schedule
    assert (counts.running, counts.waiting, counts.free_blocks) == (0, 0, engine.runner.num_blocks)
    assert sorted(schedule.rows) == list(range(schedule.max_rows))
    assert not schedule.tokens_left.any()
    assert not engine.active
    assert not engine.watches
    assert not engine.record.top
    assert (engine.line_of == NO_LINE).all()
    if isinstance(engine.runner, Watched):
        assert not engine.runner.seats, "a row is still writing for nobody"


def ask(engine: Engine, requests: Sequence[Request]) -> dict[int, RequestOutput]:
    engine.submit(requests)
    return run(engine)


def mixed(count: int = 40, **settings: Any) -> list[Request]:
    """Groups and single ones, some with long beginnings in common, some long."""
    g = np.random.default_rng(3)
    common = g.integers(VOCAB, size=70).tolist()
    found: list[Request] = []
    while len(found) < count:
        start = common[: g.choice([0, 5, 40, 70])]
        prompt = (*start, *g.integers(VOCAB, size=g.integers(1, 20)).tolist())
        told = params(int(g.choice([1, 4, 30])), temperature=float(g.choice([0, 0.8, 1.3])), **settings)
        found += [Request(id=len(found) + j, prompt=prompt, params=told) for j in range(int(g.choice([1, 1, 4])))]
    return found


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


@pytest.fixture(scope="module")
def alone(model: Decoder) -> dict[int, RequestOutput]:
    """Each of the mixed requests on an engine that has never seen another."""
    return {r.id: ask(engine_of(watched(model, 1)), [r])[r.id] for r in mixed()}


def same(got: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> None:
    assert got.keys() == expected.keys()
    for number, news in got.items():
        other = expected[number]
        assert (news.tokens, news.stop, news.text) == (other.tokens, other.stop, other.text)
        assert news.logp == pytest.approx(other.logp, abs=1e-10)
        assert news.raw == pytest.approx(other.raw, abs=1e-10)


@each("lag", [0, 1, 2, 5])
@each(("rows", "budget"), [(1, 4096), (3, 50), (16, 4096), (64, 7)])
def test_a_completion_is_that_of_the_request_alone(model, alone, rows: int, budget: int, lag: int):
    same(ask(engine_of(watched(model, rows, lag=lag), prefill_tokens=budget), mixed()), alone)


@each(("blocks", "rows"), [(5, 4), (9, 3), (40, 16), (400, 64)])
@each("lag", [0, 3])
@each("held_back", [0, 1])
def test_in_pages_too(model, alone, blocks: int, rows: int, lag: int, held_back: int):
    paged = Paged(model, max_rows=rows, num_blocks=blocks, capacity=CONTEXT, held_back=held_back)
    engine = engine_of(Watched(paged, lag, launches=1 + 2 * held_back), prefill_tokens=60)
    fit = [r for r in mixed() if engine.schedule.blocks_for(r) <= blocks]
    assert len(fit) > 30
    same(ask(engine, fit), {r.id: alone[r.id] for r in fit})
    assert engine.counts.saved > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_invariant_mode_a_completion_is_the_request_s_own_to_the_last_bit(dtype: torch.dtype):
    model = decoder().to(dtype)

    def got(rows: int, *, lag: int = 0, budget: int = 4096, asked: Sequence[Request] = ()) -> dict[int, RequestOutput]:
        plain = make_runner(model, max_rows=rows, capacity=CONTEXT, invariant=True)
        return ask(engine_of(Watched(plain, lag), prefill_tokens=budget), asked or mixed(60))

    expected = {r.id: got(1, asked=[r])[r.id] for r in mixed(60)}
    assert got(16) == expected
    assert got(64, lag=2, budget=7) == expected
    assert got(5, lag=1, budget=50, asked=mixed(60)[::-1]) == expected


def test_the_same_run_twice_is_the_same_to_the_last_bit(model):
    runs = [ask(engine_of(watched(model, 6, lag=1)), mixed()) for _ in range(2)]
    assert runs[0] == runs[1]


def test_requests_that_come_later_change_nothing(model, alone):
    engine, todo, got = engine_of(watched(model, 5, lag=2)), mixed(), {}
    while todo or engine.busy:
        engine.submit(todo[:3])
        todo = todo[3:]
        got |= {news.id: news for news in engine.step()}
    same(got, alone)
    check_empty(engine)


def test_noise_and_seed_name_the_random_numbers_and_the_id_does_not(model):
    told = params(temperature=1.3)
    engine = engine_of(watched(model))
    got = ask(engine, [Request(id=i, prompt=(1, 2), params=told, random_id=7 * (i % 2)) for i in range(4)])
    assert got[0].tokens == got[2].tokens != got[1].tokens == got[3].tokens
    assert ask(engine, [Request(id=7, prompt=(1, 2), params=told)])[7].tokens == got[1].tokens


def test_a_group_is_computed_once_and_a_common_beginning_once(model):
    runner, prompt = watched(model, 16), tuple(range(20)) * 2
    engine = engine_of(runner)
    ask(engine, [Request(id=i, prompt=prompt, params=params()) for i in range(16)])
    assert runner.computed == 40
    ask(engine, [Request(id=i, prompt=(*prompt[:32], i), params=params()) for i in range(4)])
    assert runner.computed == 40 + 4  # 32 of them are in memory
    assert (engine.counts.computed, engine.counts.saved) == (44, 15 * 40 + 4 * 32)


@each("length", [31, 32, 33, 63, 64, 65])
def test_a_prompt_that_is_in_memory_whole_is_computed_again_from_its_last_chunk(model, length: int):
    prompt, group = tuple(i % VOCAB for i in range(length)), range(3)
    pages = [Paged(model, max_rows=4, num_blocks=20, capacity=CONTEXT, held_back=held) for held in (0, 1)]
    expected: dict[int, RequestOutput] = {}
    for runner in (watched(model, 4), *map(Watched, pages)):
        engine = engine_of(runner)
        for _ in range(2):
            got = ask(engine, [Request(id=i, prompt=prompt, params=params(30)) for i in group])
            expected = expected or got
            same(got, expected)
        assert runner.computed == length + length - (length - 1) // 32 * 32


def test_where_sequences_are_as_long_as_a_block_a_row_is_its_block(model):
    asked = [Request(id=i, prompt=(1, i % 7), params=params(30)) for i in range(12)]
    expected = ask(engine_of(watched(model, 12)), asked)
    for held_back in (0, 1):
        paged = Paged(model, max_rows=12, num_blocks=5, capacity=32, held_back=held_back)
        same(ask(engine_of(Watched(paged)), asked), expected)


def test_a_prompt_of_one_token_and_one_that_leaves_room_for_one(model):
    runner = watched(model, 2, capacity=100)
    requests = [
        Request(id=0, prompt=(1,), params=params(500, stop_ids=[])),
        Request(id=1, prompt=(2,) * 99, params=params()),
    ]
    got = ask(engine_of(runner), requests)
    assert [len(got[i].tokens) for i in (0, 1)] == [99, 1]
    assert got[0].stop is Stop.LENGTH


def test_a_stop_token_may_come_first(model):
    got = ask(engine_of(watched(model, lag=1)), [
        Request(id=i, prompt=(1, i), params=params(stop_ids=range(VOCAB))) for i in range(20)
    ])  # fmt: skip
    assert {(len(news.tokens), news.stop) for news in got.values()} == {(1, Stop.TOKEN)}


@each(
    ("request_", "words"),
    [
        (Request(id=1, prompt=(), params=params()), "request 1 has 0 tokens"),
        (Request(id=1, prompt=(1,) * CONTEXT, params=params()), f"has {CONTEXT} tokens, .* shorten the prompt"),
        (Request(id=1, prompt=(1, VOCAB), params=params()), f"token {VOCAB}, outside the model's vocabulary"),
        (Request(id=1, prompt=(-1,), params=params()), "token -1, outside"),
        (Request(id=1, prompt=(1,), params=params(stop_ids=[VOCAB])), f"stop id {VOCAB}"),
        (Request(id=1, prompt=(1,), params=params(banned=frozenset({VOCAB}))), f"banned token {VOCAB}"),
        (Request(id=1, prompt=(1,), params=params(bias={VOCAB: 1.0})), str(VOCAB)),
        (Request(id=1, prompt=(1,), params=params(banned=frozenset(range(VOCAB)))), "banned: leave"),
        (Request(id=1, prompt=(1,), params=params(), random_id=-1), "random numbers -1: number it from 0"),
        (Request(id=2**64, prompt=(1,), params=params()), f"random numbers {2**64}"),
        (Request(id=0, prompt=(1,), params=params()), "request 0 is in the engine already"),
        (Request(id=1, prompt=(1,), params=params(), adapter="x"), "given no adapters"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_of_it_is_taken(model, request_: Request, words: str):
    engine = engine_of(watched(model))
    fine = Request(id=0, prompt=(1, 2), params=params())
    with pytest.raises(HoneError, match=words) as error:
        engine.submit([fine, request_])
    assert "\n" not in str(error.value)
    assert not engine.busy
    assert ask(engine, [fine]).keys() == {0}


def test_what_is_running_cannot_be_submitted_again(model):
    engine = engine_of(watched(model, 1))
    engine.submit([Request(id=i, prompt=(1, 2), params=params()) for i in range(2)])
    engine.step()
    for number in (0, 1):  # one writes, one waits
        with pytest.raises(HoneError, match="already"):
            engine.submit([Request(id=number, prompt=(1,), params=params())])
    assert run(engine).keys() == {0, 1}


def test_more_blocks_than_there_are_is_refused(model):
    engine = engine_of(Paged(model, max_rows=4, num_blocks=3, capacity=CONTEXT))
    with pytest.raises(HoneError, match=r"request 4 needs 4 blocks of memory .* there are 3: .*lower max_tokens"):
        engine.submit([Request(id=4, prompt=(1,) * 60, params=params(40))])
    assert len(ask(engine, [Request(id=4, prompt=(1,) * 60, params=params(36))])) == 1


def test_stop_strings_need_a_way_to_read(model):
    engine = Engine(watched(model), vocab_size=VOCAB)
    with pytest.raises(HoneError, match=r"decode=tokenizer\.decode"):
        engine.submit([Request(id=0, prompt=(1,), params=params(stop=("a",)))])


@each("lag", [0, 1, 4])
@each("stream", [False, True])
def test_stop_strings_end_a_completion_where_they_are_complete(model, lag: int, stream: bool):
    plain = ask(engine_of(watched(model)), mixed(stop=("zzzzz",)))  # never written
    words = sorted({plain[n].text[i : i + k] for n in plain for i in range(2, 9, 3) for k in (2, 3)} - {""})[::9]
    assert len(words) > 2
    requests = [Request(id=r.id, prompt=r.prompt, params=r.params, stream=stream) for r in mixed(stop=tuple(words))]
    got, ended = ask(engine_of(watched(model, 7, lag=lag)), requests), 0
    for number, news in got.items():
        tokens = plain[number].tokens
        n = next((n for n in range(1, len(tokens) + 1) if any(w in letters(tokens[:n]) for w in words)), None)
        if n is None or (n == len(tokens) and plain[number].stop is Stop.TOKEN):
            assert (news.tokens, news.stop, news.text) == (tokens, plain[number].stop, plain[number].text)
            continue
        ended += 1
        text = letters(tokens[:n])
        assert news.tokens == tokens[:n]
        assert news.stop is Stop.STRING
        assert news.text == text[: min(text.find(w) for w in words if w in text)]
    assert ended > 5


def test_text_has_no_stop_token(model):
    got = ask(engine_of(watched(model)), mixed(stop=("zzzzz",)))
    assert {news.stop for news in got.values()} == {Stop.TOKEN, Stop.LENGTH}
    for news in got.values():
        assert news.text == letters(news.tokens[:-1] if news.stop is Stop.TOKEN else news.tokens)


@pytest.mark.parametrize("lag", [0, 2])
def test_news_are_told_one_at_a_time_as_a_step_gives_them(model, lag: int):
    told, given = list[RequestOutput](), list[RequestOutput]()
    asked = [Request(id=i, prompt=(3, 4, i % 3), params=params(6), stream=i == 5) for i in range(20)]
    one, other = (engine_of(watched(model, lag=lag)) for _ in range(2))
    one.submit(asked)
    other.submit(asked, checked=True)
    while one.busy:
        one.run_step(told.append)
    while other.busy:
        given += other.step()
    assert len(told) > 20
    assert told == given
    check_empty(one)


@pytest.mark.parametrize("lag", [0, 2])
def test_streams_give_every_token_once_and_the_others_all_at_the_end(model, alone, lag: int):
    engine = engine_of(watched(model, 6, lag=lag))
    requests = [Request(id=r.id, prompt=r.prompt, params=r.params, stream=r.id % 2 == 0) for r in mixed()]
    engine.submit(requests)
    pieces: dict[int, list[int]] = {}
    got: dict[int, RequestOutput] = {}
    while engine.busy:
        for news in engine.step():
            pieces.setdefault(news.id, []).append(len(news.tokens))
            old = got.get(news.id)
            tokens, logp, raw = (
                getattr(old, name) + getattr(news, name) if old else getattr(news, name)
                for name in ("tokens", "logp", "raw")
            )
            got[news.id] = RequestOutput(id=news.id, tokens=tokens, logp=logp, raw=raw, stop=news.stop, text=news.text)
    same(got, alone)
    assert all(set(sizes) == {1} for number, sizes in pieces.items() if number % 2 == 0)
    assert all(len(sizes) == 1 for number, sizes in pieces.items() if number % 2)


def test_streamed_tokens_are_held_back_while_a_stop_string_may_begin_in_them(model):
    plain = ask(engine_of(watched(model)), [Request(id=0, prompt=(3, 1), params=params(30, stop_ids=[]))])[0]
    text = letters(plain.tokens)
    stop = text[10:14]
    engine = engine_of(watched(model, lag=1))
    engine.submit([Request(id=0, prompt=(3, 1), params=params(30, stop_ids=[], stop=(stop,)), stream=True)])
    shown = ""
    while engine.busy:
        for news in engine.step():
            if news.stop is None:
                shown += letters(news.tokens)
                assert not any(shown.endswith(stop[:k]) for k in range(1, len(stop)))
            else:
                assert news.text == text[: text.find(stop)]
                assert news.text.startswith(shown)


@pytest.mark.parametrize("lag", [0, 2])
def test_cancelling_at_every_stage_leaves_the_others_as_they_are(model, alone, lag: int):
    for at in range(0, 40, 3):
        engine = engine_of(watched(model, 4, lag=lag), prefill_tokens=30)
        engine.submit(mixed())
        got: dict[int, RequestOutput] = {}
        for _ in range(at):
            got |= {news.id: news for news in engine.step()}
        schedule = engine.schedule
        reading = [place.request.id for r in schedule.pending for place in r.requests][:1]
        writing = [place.request.id for place in schedule.by_row if place and place.pending is None][:2]
        waiting = [number for number in schedule.owner if number not in {*reading, *writing}][-2:]
        chosen = [*reading, *writing, *waiting]
        assert engine.cancel([*chosen, 999]) == list(dict.fromkeys(chosen))
        assert engine.cancel(chosen) == []
        got |= run(engine)
        assert not got.keys() & set(chosen)
        same(got, {n: news for n, news in alone.items() if n not in chosen})


def test_an_id_is_free_again_after_cancelling_even_with_its_launches_in_flight(model, alone):
    engine = engine_of(watched(model, 2, lag=3))
    first = mixed()[0]
    for _ in range(5):
        engine.submit([Request(id=0, prompt=(1, 2, 3), params=params(30, stop_ids=[]), stream=True)])
        for _ in range(4):
            engine.step()
        assert engine.cancel([0]) == [0]
    assert ask(engine, [first])[0].tokens == alone[0].tokens


def test_one_of_a_group_half_read_is_cancelled_and_nobody_reads_from_its_row(model):
    prompt = tuple(i % VOCAB for i in range(70))
    asked = [Request(id=i, prompt=prompt, params=params(30, stop_ids=[])) for i in range(5)]
    expected = ask(engine_of(watched(model)), asked)
    for chosen in ([0], [1], [2], [1, 2]):
        engine = engine_of(watched(model), prefill_tokens=40)
        engine.submit(asked[:3])
        engine.step()
        assert engine.cancel(chosen) == chosen
        engine.step()
        engine.submit(asked[3:])
        same(run(engine), {i: expected[i] for i in range(5) if i not in chosen})
        assert engine.counts.computed == 70 + 6


def test_all_cancelled_is_all_empty(model):
    engine = engine_of(watched(model, 4, lag=2), prefill_tokens=30)
    engine.submit(mixed())
    for _ in range(7):
        engine.step()
    engine.cancel(range(100))
    assert run(engine) == {}


@pytest.mark.parametrize("pages", [False, True])
def test_the_most_probable_tokens_come_with_each(model, pages: bool):
    paged = Paged(model, max_rows=4, num_blocks=40, capacity=CONTEXT)
    engine = engine_of(Watched(paged, 1) if pages else watched(model, 4, lag=1))
    told = [params(6, stop_ids=[], temperature=0.0, top_logprobs=k) for k in (3, 0, 5)]
    got = ask(engine, [Request(id=i, prompt=(1, 2), params=each, stream=i == 2) for i, each in enumerate(told)])
    assert [[len(top) for top in got[i].top] for i in range(3)] == [[3] * 6, [], [5] * 6]
    for token, raw, top in zip(got[2].tokens, got[2].raw, got[2].top, strict=True):
        assert top[0][0] == token
        assert top[0][1] == pytest.approx(raw, abs=1e-12)
        assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)


def test_diverged_weights_are_an_error_and_the_engine_goes_on_with_others():
    model = decoder()
    engine = engine_of(watched(model, 4, lag=1))
    first = ask(engine, mixed())
    good = model.model.norm.weight.detach().clone()
    engine.submit(mixed())
    for _ in range(5):
        engine.step()
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(HoneError, match="not finite, its weights have diverged"):
        run(engine)
    assert not engine.busy
    check_empty(engine)
    with torch.no_grad():
        model.model.norm.weight.copy_(good)
    same(ask(engine, mixed()), first)


def test_a_group_that_finds_its_prompt_in_memory_gets_rows_without_old_nan():
    model = decoder()
    engine, norm = engine_of(watched(model, 4)), model.model.layers[0].input_layernorm.weight
    good, prompt = norm.detach().clone(), tuple(np.random.default_rng(0).integers(VOCAB, size=40).tolist())
    with torch.no_grad():
        norm.fill_(math.nan)
    with pytest.raises(HoneError, match="diverged"):
        ask(engine, [Request(id=i, prompt=(i, *[1] * 60), params=params(20)) for i in range(4)])
    with torch.no_grad():
        norm.copy_(good)
    ask(engine, [Request(id=4, prompt=prompt, params=params(3))])
    group = [Request(id=5 + i, prompt=prompt, params=params(20)) for i in range(3)]
    longer = Request(id=9, prompt=prompt + prompt[:30], params=params(20))  # the others see its columns, with weight 0
    assert len(ask(engine, [*group, longer])) == 4
    assert engine.counts.saved


class Forgetful(Watched):
    """Says nothing of the tokens it wrote."""

    def decode(self, rows: int) -> Ticket:
        written = super().decode(rows).read()
        return _Empty(replace(written, **{f.name: getattr(written, f.name)[:0] for f in fields(written)[:5]}))


@dataclass
class _Empty:
    written: LaunchResult

    def read(self) -> LaunchResult:
        return self.written


def test_a_runner_that_loses_tokens_is_an_error_and_no_endless_loop(model):
    engine = engine_of(Forgetful(make_runner(model, max_rows=4, capacity=CONTEXT)))
    engine.submit([Request(id=0, prompt=(1, 2), params=params(5, stop_ids=[]))])
    with pytest.raises(RuntimeError, match="no request can go on"):
        run(engine)
    check_empty(engine)


class Breaking(Watched):
    """Fails at a launch, after the work was done or before."""

    fail_at, late = 0, False

    def _count(self, launch: Callable[[], Ticket]) -> Ticket:
        if self.launches + 1 == self.fail_at:
            self.fail_at = 0
            if self.late:
                launch()
            raise RuntimeError("out of something")
        return launch()

    def prefill(self, parts: Sequence[PromptChunk]) -> Ticket:
        return self._count(lambda: super(Breaking, self).prefill(parts))

    def decode(self, rows: int) -> Ticket:
        return self._count(lambda: super(Breaking, self).decode(rows))


@each("late", [False, True])
@each("fail_at", [1, 2, 3, 7, 20])
def test_a_failure_in_the_runner_leaves_nothing_behind(model, alone, fail_at: int, late: bool):
    runner = Breaking(make_runner(model, max_rows=4, capacity=CONTEXT), 2)
    engine = engine_of(runner, prefill_tokens=30)
    runner.fail_at, runner.late = fail_at, late
    engine.submit(mixed())
    with pytest.raises(RuntimeError, match="out of something"):
        run(engine)
    assert not engine.busy
    check_empty(engine)
    same(ask(engine, mixed()), alone)


def test_adapters_by_request():
    model = decoder()
    for name, seed in (("one", 1), ("two", 2)):
        add_lora(model, name=name, rank=2, alpha=8.0, targets=("all-linear",), seed=seed)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in lora_parameters(model):
                p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.4)
    switch = partial(use_adapter, model)
    plain = make_runner(model, max_rows=4, capacity=CONTEXT, switch=switch)
    engine = engine_of(Watched(plain, 1))
    requests = [
        Request(id=r.id, prompt=r.prompt, params=r.params, adapter=("one", "two")[r.id // 3 % 2]) for r in mixed(60)
    ]
    got = ask(engine, requests)
    for name in ("one", "two"):
        with use_adapter(model, name):
            mine = [r for r in mixed(60) if ("one", "two")[r.id // 3 % 2] == name]
            same({r.id: got[r.id] for r in mine}, ask(engine_of(watched(model, 4)), mine))
    with pytest.raises(HoneError, match="use one of one, two"):
        engine.submit([Request(id=0, prompt=(1,), params=params(), adapter="three")])


def test_rows_are_closed_up_as_others_end(model):
    runner = watched(model, 32)
    ask(engine_of(runner), [Request(id=i, prompt=(1, i % 29), params=params(60, stop_ids=[0, 1])) for i in range(32)])
    assert runner.moved > 0
    assert runner.widths[0] >= 30  # one or two may have ended with the first token
    assert runner.widths[-1] <= 2
    assert runner.widths == sorted(runner.widths, reverse=True)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"tie_word_embeddings": False}),
    "Mistral with a window": ("mistral", {"sliding_window": 5}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"head_dim": 8}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_what_transformers_generates(name: str, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes = FAMILIES[name]
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4,
        "bos_token_id": None, "eos_token_id": 5, "pad_token_id": 5,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**shape, **changes}, attn_implementation="eager")
    theirs: Any = AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    prompts = list(dict.fromkeys(r.prompt[:40] for r in mixed()))
    told = params(20, stop_ids=[5], temperature=0.0)
    got = ask(engine_of(watched(ours, 5, lag=1, capacity=64)), [
        Request(id=i, prompt=prompt, params=told) for i, prompt in enumerate(prompts)
    ])  # fmt: skip
    for i, prompt in enumerate(prompts):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert list(got[i].tokens) == expected.tolist()
    assert len({tuple(news.tokens) for news in got.values()}) > len(prompts) // 2


def test_more_stop_tokens_than_the_runner_looks_for_are_refused(model):
    runner = watched(model)
    runner.most_stops = 2
    engine = engine_of(runner)
    many = SampleParams(max_tokens=2, stop_ids=frozenset({1, 2, 3}))
    with pytest.raises(HoneError, match="3 stop tokens are more than a GPU looks for: give at most 2"):
        engine.submit([Request(id=0, prompt=(1,), params=many)])
    assert not engine.busy
