"""Clients beside clients: turns are fair, queues are bounded, and whoever does not read, send or leave politely costs
the others nothing."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from little import Server, make_decoder, make_tokenizer, read_answer, rest, start_server
from openai import OpenAI
from patience import patience
from starlette.requests import Request as Incoming

from hone.engine.engine import Engine
from hone.engine.params import SampleParams
from hone.engine.requests import Request
from hone.engine.runners.choose import make_runner
from hone.serve import dispatcher as module
from hone.serve.dispatcher import Dispatcher, Pace
from hone.serve.http import ALL_BODIES, SMALL_BODY, APIError, BodyReader

COMPLETIONS = "/v1/completions"
ASK = {"model": "chatty", "prompt": "the cat", "max_tokens": 3}
HEAVY = {**ASK, "max_tokens": 900, "n": 16, "stream": True, "logprobs": 20, "logit_bias": {"1": -100}}


def requests(dispatcher: Dispatcher, number: int, tokens: int, *, stream: bool = False) -> list[Request]:
    params = SampleParams(max_tokens=tokens, temperature=0.0, stop_ids=frozenset())
    return [Request(id=i, prompt=(5, 6, 7), params=params, stream=stream) for i in dispatcher.next_ids(number)]


def dispatched(work: Callable[[Dispatcher], Coroutine[Any, Any, None]], *, rows: int) -> None:
    decoder = make_decoder(make_tokenizer().vocab_size)
    runner = make_runner(decoder, max_rows=rows, capacity=1024)
    dispatcher = Dispatcher(Engine(runner, vocab_size=decoder.config.vocab_size), note=lambda text: None)

    async def run() -> None:
        dispatcher.start()
        try:
            await work(dispatcher)
        finally:
            assert await asyncio.to_thread(dispatcher.close)

    asyncio.run(run())


async def ends(dispatcher: Dispatcher, client: str, order: list[str], asked: list[Request]) -> None:
    """Note the client's name whenever one of its completions ends."""
    async with aclosing(dispatcher.submit(asked, client=client)) as told:
        async for news in told:
            order += [client for item in news if item.stop is not None]


def test_a_client_with_many_completions_takes_turns_with_one_that_has_few():
    async def work(dispatcher: Dispatcher) -> None:
        order = list[str]()
        hog = asyncio.create_task(ends(dispatcher, "hog", order, requests(dispatcher, 60, 40)))
        while not dispatcher.counts.running:
            await asyncio.sleep(0.001)
        await ends(dispatcher, "guest", order, requests(dispatcher, 6, 40))
        await hog
        last = max(i for i, name in enumerate(order) if name == "guest")
        assert order[: last + 1].count("hog") < 40, order
        assert len(order) == 66

    dispatched(work, rows=4)


def test_equal_clients_have_equal_turns():
    async def work(dispatcher: Dispatcher) -> None:
        order = list[str]()
        names = ("a", "b", "c")
        await asyncio.gather(*(ends(dispatcher, name, order, requests(dispatcher, 24, 10)) for name in names))
        half = order[: len(order) // 2]
        assert max(map(half.count, names)) - min(map(half.count, names)) <= 12, order

    dispatched(work, rows=4)


def test_a_short_request_needs_not_wait_for_a_row_of_a_long_one():
    async def work(dispatcher: Dispatcher) -> None:
        order = list[str]()
        hog = asyncio.create_task(ends(dispatcher, "hog", order, requests(dispatcher, 8, 900)))
        while dispatcher.counts.running < 7:
            await asyncio.sleep(0.001)
        await ends(dispatcher, "guest", order, requests(dispatcher, 1, 5))
        assert order == ["guest"]
        hog.cancel()
        await asyncio.gather(hog, return_exceptions=True)

    dispatched(work, rows=8)


def test_a_client_that_takes_nothing_gets_no_more_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_UNREAD", 100)

    async def work(dispatcher: Dispatcher) -> None:
        asked = requests(dispatcher, 40, 50, stream=True)
        async with aclosing(dispatcher.submit(asked, client="idle")) as told:
            first = await anext(told)
            while dispatcher.engine.busy or dispatcher.counts.running or not dispatcher.counts.waiting:
                await asyncio.sleep(0.002)
            assert dispatcher.counts.written < 10 * 50
            assert dispatcher.counts.waiting > 25
            rest = [item async for news in told for item in news]  # and goes on where it was
            assert sum(len(item.tokens) for item in [*first, *rest]) == 40 * 50

    dispatched(work, rows=4)


def test_long_completions_give_way_only_where_they_cost_time():
    pace = Pace(few=2)
    for _ in range(30):
        pace.record_step(1, 0.001)
    assert pace.allows(20), "nobody wants little"
    pace.row_given(short=True)
    assert pace.allows(20), "a step takes no longer"
    pace.row_given(short=False)
    assert not pace.allows(20), "what the last one costs is not known yet"
    for _ in range(30):
        pace.record_step(20, 0.002)
    assert not pace.allows(20)
    assert pace.allows(1)


def test_bodies_are_bounded_together_and_small_ones_are_always_read():
    def incoming(size: int) -> Incoming:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        return Incoming({"type": "http", "headers": []}, receive)

    bodies = BodyReader()
    bodies.held = ALL_BODIES
    assert len(asyncio.run(bodies.read(incoming(SMALL_BODY)))) == SMALL_BODY
    with pytest.raises(APIError) as caught:
        asyncio.run(bodies.read(incoming(SMALL_BODY + 1)))
    assert (caught.value.status_code, bodies.held) == (503, ALL_BODIES)


# --- over sockets ---


@pytest.fixture(scope="module")
def hasty(folders: Path) -> Iterator[Server]:
    """Little patience with clients that do not read, few connections, and four requests at a time."""
    before = (
        "import hone.serve.server as s, hone.serve.http as h; s.CONNECTIONS = 12; "
        f"s.STALLED_SECONDS = {patience(0.5)}; h.SLOW_SECONDS = 0.2; h.STALLED_SECONDS = 30"
    )
    made = start_server(folders / "chatty", "--concurrency", "4", before=before)
    yield made
    assert made.close() == 0


def post(server: Server, body: Any, *, buffer: int = 4096) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(patience(30))
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(server.head("POST", COMPLETIONS, content_length=str(len(data))) + data)
    return sock


def test_clients_that_read_nothing_are_dropped_and_others_are_served(hasty: Server):
    with ExitStack() as stack:
        stuck = [stack.enter_context(post(hasty, HEAVY)) for _ in range(3)]
        until = time.monotonic() + patience(1)  # what waits to be sent is dropped only while others are served
        while hasty.busy()["running"] or hasty.busy()["waiting"] or time.monotonic() < until:
            assert hasty.ask("POST", COMPLETIONS, ASK)[0] == 200
        assert all(b"[DONE]" not in rest(sock) for sock in stuck)
    assert hasty.idle()["free_blocks"] == 32


def test_a_client_that_reads_slowly_gets_all_of_its_answer(hasty: Server):
    ask = {**HEAVY, "n": 2, "max_tokens": 150}
    with post(hasty, ask) as sock:
        told = b""
        while piece := sock.recv(16384):
            told += piece
            time.sleep(0.005)
            if b"data: [DONE]" in told:
                break
    assert told.count(b'"finish_reason":"length"') == 2


def test_a_client_that_leaves_with_requests_still_to_come_is_noticed(hasty: Server):
    """Of a pipelined request nothing is read before its turn; the end of the connection is."""
    ask = json.dumps({**ASK, "max_tokens": 900, "n": 8, "logit_bias": {"1": -100}}).encode()
    head = hasty.head("POST", COMPLETIONS, content_length=str(len(ask)))
    before = hasty.idle()["written"]
    with hasty.connect() as sock:
        sock.sendall((head + ask) * 3)
        hasty.writes(before)
    assert hasty.idle()["written"] - before < 8 * 900


def test_bytes_sent_while_an_answer_is_made_are_bounded(hasty: Server):
    hasty.idle()
    with (
        post(hasty, {**ASK, "max_tokens": 900, "n": 8, "logit_bias": {"1": -100}}) as sock,
        pytest.raises((BrokenPipeError, ConnectionResetError)),
    ):
        sock.sendall(b"GET /health HTTP/1.1\r\n" + b"x" * 2**26)
    assert hasty.idle()["running"] == 0


def test_bodies_that_never_end_keep_nobody_out(hasty: Server):
    with ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(hasty.connect())
            sock.sendall(hasty.head("POST", COMPLETIONS, content_length="1000") + b"{")
        assert hasty.ask("POST", COMPLETIONS, ASK)[0] == 200


def test_connections_that_say_nothing_give_way_to_new_ones(hasty: Server):
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(hasty.connect())
        for _ in range(3):
            assert hasty.ask("POST", COMPLETIONS, ASK)[0] == 200


def test_a_length_that_lies_reaches_only_its_own_connection(hasty: Server):
    body = json.dumps(ASK).encode()
    with hasty.connect() as sock:  # less than is sent
        sock.sendall(hasty.head("POST", COMPLETIONS, content_length="10") + body)
        assert read_answer(sock)[0] in (0, 400)
    assert hasty.ask("POST", COMPLETIONS, ASK)[0] == 200


def test_a_long_answer_with_log_probs_is_whole(server: Server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0)
    ask = {"model": "chatty", "messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 60}
    asked = {**ask, "n": 4, "logprobs": True, "logit_bias": {"1": -100}}
    long = client.chat.completions.create(**asked, top_logprobs=20)  # type: ignore[call-overload]
    short = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert [c.message.content for c in long.choices] == [c.message.content for c in short.choices]
    assert [[len(e.top_logprobs) for e in c.logprobs.content] for c in long.choices] == [[20] * 60] * 4
    plain = {**ASK, "max_tokens": 60, "n": 4, "logit_bias": {"1": -100}, "seed": 3}
    found = client.completions.create(**plain, logprobs=20).choices  # type: ignore[call-overload]
    assert [len(c.logprobs.top_logprobs) for c in found] == [60] * 4
    assert all(
        token in top for c in found for token, top in zip(c.logprobs.tokens, c.logprobs.top_logprobs, strict=True)
    )
