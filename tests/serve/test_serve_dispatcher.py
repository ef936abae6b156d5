"""The dispatcher between clients and the engine: what fails in the engine's thread is reported, and ends no other."""

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
import torch
from little import make_decoder, make_tokenizer

from hone.engine.engine import Counts, Engine
from hone.engine.params import SampleParams
from hone.engine.requests import Request, RequestOutput
from hone.engine.runners.choose import make_runner
from hone.model.decoder import Decoder
from hone.serve.dispatcher import Dispatcher
from hone.serve.http import APIError

PARAMS = SampleParams(max_tokens=5, temperature=0.0, stop_ids=frozenset())


def request(number: int, **more: Any) -> Request:
    return Request(**{"id": number, "prompt": (5, 6, 7), "params": PARAMS, **more})


async def told(dispatcher: Dispatcher, *requests: Request) -> list[RequestOutput]:
    async with aclosing(dispatcher.submit(requests)) as told:
        return [item async for news in told for item in news]


def dispatched(work: Callable[[Dispatcher, Decoder], Coroutine[Any, Any, None]]) -> list[str]:
    """Do it with a real engine; what the operator was told."""
    decoder, notes = make_decoder(make_tokenizer().vocab_size), list[str]()
    runner = make_runner(decoder, max_rows=2, capacity=512)
    dispatcher = Dispatcher(Engine(runner, vocab_size=decoder.config.vocab_size), note=notes.append)

    async def run() -> None:
        dispatcher.start()
        try:
            await work(dispatcher, decoder)
        finally:
            assert await asyncio.to_thread(dispatcher.close)

    asyncio.run(run())
    return notes


def test_a_request_is_answered_and_a_wrong_one_harms_no_other():
    async def work(dispatcher: Dispatcher, decoder: Decoder) -> None:
        long = asyncio.create_task(
            told(dispatcher, request(0, params=SampleParams(max_tokens=400, stop_ids=frozenset())))
        )
        with pytest.raises(APIError, match="token 99999") as caught:
            await told(dispatcher, request(1, prompt=(99999,)))
        assert caught.value.status_code == 400
        with pytest.raises(APIError, match="adapter"):
            await told(dispatcher, request(2, adapter="none such"))
        assert [len(item.tokens) for item in await told(dispatcher, request(3))] == [5]
        assert sum(len(item.tokens) for item in await long) == 400

    assert dispatched(work) == []


def test_weights_that_diverged_are_told_and_mended_ones_serve_again():
    async def work(dispatcher: Dispatcher, decoder: Decoder) -> None:
        before = await told(dispatcher, request(0))
        with torch.no_grad():
            kept = decoder.model.norm.weight.clone()
            decoder.model.norm.weight.fill_(torch.nan)
        with pytest.raises(APIError, match="diverged") as caught:
            await told(dispatcher, request(1), request(2))
        assert (caught.value.status_code, "diverged" in (dispatcher.failed or "")) == (503, True)
        with torch.no_grad():
            decoder.model.norm.weight.copy_(kept)
        assert (await told(dispatcher, request(3)))[0].tokens == before[0].tokens
        assert dispatcher.failed is None
        assert dispatcher.engine.counts.free_blocks == 2

    (note,) = dispatched(work)
    assert "2 requests ended" in note


def test_whoever_asks_how_busy_it_is_does_not_disturb_the_engine():
    async def work(dispatcher: Dispatcher, decoder: Decoder) -> None:
        asking, seen = threading.Event(), list[Counts]()

        def poll() -> None:
            while not asking.is_set():
                seen.append(dispatcher.counts)

        thread, interval = threading.Thread(target=poll), sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        thread.start()
        try:
            short = SampleParams(max_tokens=1, temperature=0.0, stop_ids=frozenset())
            for first in range(0, 400, 8):
                await told(dispatcher, *(request(first + i, params=short) for i in range(8)))
        finally:
            asking.set()
            thread.join()
            sys.setswitchinterval(interval)
        assert dispatcher.failed is None
        assert max(counts.written for counts in seen) > 200
        assert {counts.free_blocks for counts in seen} <= {0, 1, 2}

    assert dispatched(work) == []


def test_a_reader_that_leaves_cancels_what_is_left():
    async def work(dispatcher: Dispatcher, decoder: Decoder) -> None:
        endless = SampleParams(max_tokens=500, stop_ids=frozenset())
        async with aclosing(dispatcher.submit([request(i, params=endless, stream=True) for i in range(5)])) as news:
            async for _ in news:
                break
        while dispatcher.engine.busy:
            await asyncio.sleep(0.005)
        assert dispatcher.engine.counts.free_blocks == 2
        assert dispatcher.engine.counts.written < 5 * 500

    assert dispatched(work) == []


def test_closing_tells_those_who_wait():
    async def work(dispatcher: Dispatcher, decoder: Decoder) -> None:
        endless = SampleParams(max_tokens=500, stop_ids=frozenset())
        waiting = asyncio.create_task(told(dispatcher, *(request(i, params=endless) for i in range(50))))
        await asyncio.sleep(0.05)
        dispatcher.stop_all(APIError(503, "the end"))
        with pytest.raises(APIError, match="the end"):
            await waiting

    assert dispatched(work) == []
