"""What a row wrote begins the prompt of the next turn, and is not computed again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from odd_runners import Paged, Watched

from hone.engine.blocks import CHUNK
from hone.engine.engine import Engine
from hone.engine.params import SampleParams
from hone.engine.requests import Request, RequestOutput
from hone.engine.runners.choose import make_runner
from hone.engine.runners.torch.runner import TorchRunner
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder

torch.set_num_threads(1)

VOCAB, CONTEXT = 61, 256
NEVER = frozenset[int]()


def decoder(dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """Heads of 16, which the C++ takes in float32."""
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, initializer_range=0.4,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config).to(dtype)


def engine_of(runner: Any) -> Engine:
    return Engine(runner, vocab_size=VOCAB, decode=lambda tokens: "".join(chr(65 + t) for t in tokens))


def params(max_tokens: int = 45, **settings: Any) -> SampleParams:
    return SampleParams(**{"max_tokens": max_tokens, "stop_ids": NEVER, **settings})


def ask(engine: Engine, requests: Sequence[Request]) -> dict[int, RequestOutput]:
    engine.submit(requests)
    found = {}
    while engine.busy:
        found |= {news.id: news for news in engine.step()}
    assert engine.counts.free_blocks == engine.runner.num_blocks
    assert not any(engine.schedule.pool.refs)
    return found


def opening(number: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(number).integers(VOCAB, size=20 + 7 * number).tolist())


def turn(number: int, prompt: Sequence[int], t: int, *, keep: bool = True, **settings: Any) -> Request:
    return Request(id=number, prompt=tuple(prompt), params=params(**settings), random_id=100 * number + t, keep=keep)


def talk(engine: Engine, turns: int, talks: int, **settings: Any) -> list[dict[int, RequestOutput]]:
    """Several conversations at once: each goes on from all that was read and written in it."""
    prompts, told = {c: opening(c) for c in range(talks)}, []
    for t in range(turns):
        told.append(ask(engine, [turn(c, prompt, t, **settings) for c, prompt in prompts.items()]))
        prompts = {c: (*prompt, *told[-1][c].tokens, 7, 8) for c, prompt in prompts.items()}
    return told


def check_alone(runner: Any, told: list[dict[int, RequestOutput]], **settings: Any) -> None:
    """Each turn is what an engine writes that has never seen the ones before."""
    prompts = {c: opening(c) for c in told[0]}
    for t, news in enumerate(told):
        for c, prompt in prompts.items():
            fresh = ask(engine_of(runner), [turn(c, prompt, t, keep=False, **settings)])[c]
            assert fresh.tokens == news[c].tokens
            assert list(fresh.logp) == pytest.approx(list(news[c].logp), abs=1e-10)
        prompts = {c: (*prompt, *news[c].tokens, 7, 8) for c, prompt in prompts.items()}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


@pytest.fixture(scope="module")
def alone(model: Decoder) -> TorchRunner:
    return make_runner(model, max_rows=1, capacity=CONTEXT)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_turns_in_rows_are_what_they_are_alone(model: Decoder, alone: TorchRunner, rows: int, lag: int):
    engine = engine_of(Watched(make_runner(model, max_rows=rows, capacity=CONTEXT), lag))
    check_alone(alone, talk(engine, 3, 4))


@pytest.mark.parametrize("held_back", [0, 1])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 8), (3, 11)])
def test_turns_in_pages_are_what_they_are_alone(model, alone, rows: int, blocks: int, held_back: int):
    paged = Paged(model, max_rows=rows, num_blocks=blocks, capacity=CONTEXT, held_back=held_back)
    check_alone(alone, talk(engine_of(Watched(paged, 2)), 2, 4))


def test_only_what_is_new_is_computed(model: Decoder):
    runners: list[Any] = [Paged(model, max_rows=4, num_blocks=40, capacity=CONTEXT, held_back=held) for held in (0, 1)]
    for runner in (make_runner(model, max_rows=4, capacity=CONTEXT), *runners):
        engine = engine_of(runner)
        first = ask(engine, [turn(0, opening(3), 0)])[0]
        whole = (*opening(3), *first.tokens)
        before = engine.counts
        ask(engine, [turn(0, (*whole, 7, 8), 1)])
        in_memory = (len(whole) - 1) // CHUNK * CHUNK  # the last token written was never read
        assert in_memory > len(opening(3))
        assert engine.counts.saved - before.saved == in_memory
        assert engine.counts.computed - before.computed == len(whole) + 2 - in_memory


def test_what_is_not_to_be_kept_is_read_again(model: Decoder):
    engine = engine_of(make_runner(model, max_rows=2, capacity=CONTEXT))
    first = ask(engine, [turn(0, opening(3), 0, keep=False)])[0]
    before = engine.counts.saved
    ask(engine, [turn(0, (*opening(3), *first.tokens, 7), 1)])
    assert engine.counts.saved - before == len(opening(3)) // CHUNK * CHUNK


def test_the_last_token_is_in_memory_for_nobody(model: Decoder, alone: TorchRunner):
    """Prompt and completion fill a chunk exactly, and the last token's column was never written."""
    for size in (CHUNK - 1, CHUNK, CHUNK + 1):
        paged = Paged(model, max_rows=2, num_blocks=20, capacity=CONTEXT)
        engine = engine_of(paged)
        first = ask(engine, [turn(0, opening(0), 0, max_tokens=size + CHUNK - len(opening(0)))])[0]
        prompt = (*opening(0), *first.tokens, 7)
        assert len(prompt) == size + CHUNK + 1
        second = ask(engine, [turn(0, prompt, 1)])[0]
        assert second.tokens == ask(engine_of(alone), [turn(0, prompt, 1)])[0].tokens


def test_a_stop_string_read_late_keeps_no_more_than_what_was_told(model: Decoder, alone: TorchRunner):
    plain = ask(engine_of(alone), [turn(0, opening(2), 0)])[0]
    stop = "".join(chr(65 + t) for t in plain.tokens[36:38])
    for runner in (
        make_runner(model, max_rows=2, capacity=CONTEXT),
        Paged(model, max_rows=2, num_blocks=20, capacity=CONTEXT),
    ):
        engine = engine_of(Watched(runner, 3))
        first = ask(engine, [turn(0, opening(2), 0, stop=(stop,))])[0]
        assert len(first.tokens) <= 38
        prompt = (*opening(2), *first.tokens, 7)
        other = (*prompt[:-2], (prompt[-2] + 1) % VOCAB, 7)  # not what was written
        for p in (prompt, other):
            got = ask(engine, [turn(0, p, 1)])[0]
            assert got.tokens == ask(engine_of(alone), [turn(0, p, 1)])[0].tokens


@pytest.mark.parametrize(("dtype", "invariant"), [(torch.float32, False), (torch.float32, True), (torch.float64, True)])
def test_going_on_from_what_was_written_gives_the_same_bits(dtype: torch.dtype, invariant: bool):
    """In C++ (float32, where there is a compiler) and in the invariant mode."""
    model = decoder(dtype)
    runner = make_runner(model, max_rows=3, capacity=CONTEXT, invariant=invariant)
    if not invariant and not type(runner.layers).__name__.startswith("Native"):
        pytest.skip("torch adds in another order for another number of tokens")
    told = talk(engine_of(runner), 2, 3)
    fresh, prompts = (
        make_runner(model, max_rows=1, capacity=CONTEXT, invariant=invariant),
        {c: opening(c) for c in range(3)},
    )
    for t, news in enumerate(told):
        for c, prompt in prompts.items():
            one = ask(engine_of(fresh), [turn(c, prompt, t, keep=False)])[c]
            assert (one.tokens, one.logp, one.raw) == (news[c].tokens, news[c].logp, news[c].raw)
        prompts = {c: (*prompt, *news[c].tokens, 7, 8) for c, prompt in prompts.items()}
