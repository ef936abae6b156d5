"""`hone serve` beside clients that do not read, do not send, do not leave, or send what is no request."""

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.slow_readers import (
    HEAVY,
    HOSTILE,
    SHORT,
    Server,
    asking,
    make_model,
    read_answer,
    read_nothing,
    serving,
)
from benchmarks.trials.case import Case, expect

TITLE = "A server that one client cannot take from the others"
LIMIT = 2**20  # bytes of a body
LONGEST = 3.0  # seconds that a short answer may take, however busy this machine is
PLAIN = "/v1/completions"
ASK = {"model": "tiny", "prompt": "the cat", "max_tokens": 3}
LONG = {**ASK, "max_tokens": 900, "n": 128, "logit_bias": {"1": -100}}


def cases(quick: bool) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder, serving(make_model(Path(folder))) as server:
        yield from _readers(server, quick=quick)
        yield from _turns(server)
        yield from _bodies(server)
        yield from _connections(server)
        yield from _rubbish(server)


# --- clients that do not read ---


def _readers(server: Server, *, quick: bool) -> Iterator[Case]:
    group = "clients that read nothing"
    for stream in (True, False):
        for number in (1,) if quick else (1, HOSTILE):
            kind = "streams" if stream else "whole answers"
            seconds = 2.0 if quick else 8.0
            body = {**HEAVY, "stream": stream, **({} if stream else {"max_tokens": 200})}
            yield Case(group, f"{number} {kind}, for {seconds:g} s", partial(_beside, server, body, number, seconds))
    yield Case(group, "answers on one connection come at once", partial(_at_once, server))


def _beside(server: Server, body: Any, number: int, seconds: float) -> str | None:
    with asking(server) as honest:
        read_nothing(server, body, seconds=seconds, again=False, number=number)
        time.sleep(1.0)  # and they leave
    if honest.failed:
        return f"an honest client got {honest.failed[0]}"
    longest = max(honest.seconds)
    return f"an honest answer took {longest:.1f} s" if longest > LONGEST else None


def _at_once(server: Server) -> str | None:
    took = list[float]()
    with server.connect() as sock:
        for _ in range(20):
            begin = time.monotonic()
            server.ask(path="/health", method="GET", sock=sock)
            took.append(time.monotonic() - begin)
    median = statistics.median(took)
    return f"half of the answers took {1e3 * median:.0f} ms" if median > 0.03 else None


# --- turns ---


def _turns(server: Server) -> Iterator[Case]:
    group = "turns between clients"
    for hogs in (1, 3):
        yield Case(
            group, f"a short request beside {hogs} of 128 long completions", partial(_short_beside, server, hogs)
        )
    yield Case(group, "a client that leaves frees its rows", partial(_left, server, 1))
    yield Case(group, "a client that leaves with requests to come frees its rows", partial(_left, server, 3))


def _busy(server: Server) -> dict[str, int]:
    return server.ask(path="/health", method="GET")[1]


def _short_beside(server: Server, hogs: int) -> str | None:
    with ExitStack() as stack:
        for _ in range(hogs):
            stack.enter_context(server.connect()).sendall(server.request(LONG, path=PLAIN))
        _until(lambda: _busy(server)["running"] > 8)
        begin = time.monotonic()
        status, _ = server.ask(SHORT)
        took = time.monotonic() - begin
        left = _busy(server)["waiting"]
    _until(lambda: not _busy(server)["running"])
    if status == 200 and left < 32 * hogs:
        return f"it was answered when only {left} completions were left"
    return expect(status, 200) or (f"it took {took:.1f} s" if took > LONGEST else None)


def _left(server: Server, requests: int) -> str | None:
    _until(lambda: not _busy(server)["running"])
    before = _busy(server)["written"]
    with server.connect() as sock:
        sock.sendall(server.request({**LONG, "n": 16}, path=PLAIN) * requests)
        _until(lambda: _busy(server)["running"] > 0)
    _until(lambda: not _busy(server)["running"])
    written = _busy(server)["written"] - before
    return f"{written} tokens were written for nobody" if written >= 16 * 900 else None


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.01)


# --- bodies ---


def _bodies(server: Server) -> Iterator[Case]:
    group = "bodies over the limit"
    long = json.dumps({**ASK, "prompt": "a" * LIMIT}).encode()
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = server.request(path=PLAIN, content_length="", transfer_encoding="chunked")
    sent = {
        "one that is sent": server.request(long, path=PLAIN),
        "one that is announced": server.request(path=PLAIN, content_length=str(10**12), expect="100-continue"),
        "a byte too many": server.request(b" " * (LIMIT + 1), path=PLAIN),
        "chunks that end": head + chunk * 20 + b"0\r\n\r\n",
        "a chunk that is too large": head + b"%x\r\n" % (2 * LIMIT) + b" " * (2 * LIMIT) + b"\r\n0\r\n\r\n",
    }
    for name, data in sent.items():
        yield Case(group, name, partial(_status, server, data, {413}))
    yield Case(group, "as long as may be", partial(_status, server, server.request(b" " * LIMIT, path=PLAIN), {400}))


def _status(server: Server, data: bytes, wanted: set[int]) -> str | None:
    with server.connect() as sock:
        sock.sendall(data)
        try:
            status, answer = read_answer(sock)
        except ConnectionError:
            status, answer = 0, None
    if status not in wanted:
        return f"{status} instead of {wanted}: {answer}"
    if status and set((answer or {}).get("error", ())) != {"message", "type", "param", "code"}:
        return f"not an error object: {answer}"
    return expect(server.ask(path="/health", method="GET")[0], 200)


# --- connections ---


def _connections(server: Server) -> Iterator[Case]:
    group = "clients that neither send nor leave"
    heads = {
        "600 connections that say nothing": (600, b""),
        "200 heads that never end": (200, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"),
        "100 bodies that never end": (100, server.request(path=PLAIN, content_length="1000") + b"{"),
        "100 bodies of a megabyte that stop at its end": (
            100,
            server.request(path=PLAIN, content_length=str(LIMIT)) + b" " * (LIMIT - 1),
        ),
    }
    for name, (number, data) in heads.items():
        yield Case(group, name, partial(_crowd, server, number, data))


def _crowd(server: Server, number: int, data: bytes) -> str | None:
    with ExitStack() as stack:
        for _ in range(number):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            try:
                sock.sendall(data)
            except ConnectionError:  # it has been refused already
                continue
        begin = time.monotonic()
        status, answer = server.ask(SHORT)
        took = time.monotonic() - begin
    if status != 200:
        return f"an honest client got {status}: {answer}"
    return f"an honest answer took {took:.1f} s" if took > LONGEST else None


# --- what is no request ---


def _rubbish(server: Server) -> Iterator[Case]:
    group = "what is no request"
    deep = b'{"model":"tiny","prompt":' + b"[" * 300_000 + b"]" * 300_000 + b"}"
    bodies = {
        "lists nested 300,000 deep": deep,
        "objects nested 100,000 deep": b'{"a":' * 100_000,
        "no UTF-8": b'{"model":"tiny","prompt":"\xff\xfe"}',
        "half a surrogate pair": b'{"model":"tiny","prompt":"\\ud800"}',
        "NaN": b'{"model":"tiny","prompt":"a","temperature":NaN}',
        "Infinity": b'{"model":"tiny","prompt":"a","top_p":Infinity}',
        "a number that overflows": b'{"model":"tiny","prompt":"a","temperature":1e999}',
        "a number of 5,000 digits": b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5000 + b"}",
        "true for a number": b'{"model":"tiny","prompt":"a","n":true}',
        "a bias for no token": b'{"model":"tiny","prompt":"a","logit_bias":{"x":1}}',
        "a bias of NaN": b'{"model":"tiny","prompt":"a","logit_bias":{"1":NaN}}',
        "a parameter that is not known": b'{"model":"tiny","prompt":"a","best_off":1}',
        "nothing": b"",
    }
    for name, body in bodies.items():
        yield Case(group, name, partial(_status, server, server.request(body, path=PLAIN), {400}))
    yield Case(
        group, "headers of 100 KB", partial(_status, server, server.request(path=PLAIN, x="a" * 100_000), {0, 400, 431})
    )
