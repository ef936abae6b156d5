"""What a hostile page, neighbour or client may try: each attempt over a raw socket against a real server."""

import json
import re
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from each import each
from little import Server, read_answer, start_server
from patience import eventually, patience

METHODS = ("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT", "PATCH", "TRACE", "X")
ASK = {"model": "chatty", "prompt": "the cat", "max_tokens": 3}
COMPLETIONS = "/v1/completions"


def is_error(answer: Any) -> bool:
    return set(answer["error"]) == {"message", "type", "param", "code"} and answer["error"]["message"] != ""


@each("method", METHODS)
@each(
    "host",
    ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "127.0.0.2:8000", "127.0.0.1@evil", "",
     "localhost:8000:9000", "[::1", "0", "2130706433"],
)  # fmt: skip
def test_a_name_that_is_not_ours_is_refused_on_every_method(server: Server, method: str, host: str):
    for path in ("/health", "/v1/models", "/v1/models/chatty", COMPLETIONS):
        status, headers, _ = server.raw(server.head(method, path, host=host))
        assert status in (400, 403), (method, path)
        assert not any(name.startswith("access-control") for name in headers)


def test_names_of_this_machine_are_taken(server: Server):
    for host in ("localhost", f"127.0.0.1:{server.port}", "LOCALHOST:9", f"[::1]:{server.port}"):
        assert server.raw(server.head("GET", "/health", host=host))[0] == 200


def test_a_request_with_no_host_or_two_is_refused(server: Server):
    two = server.head("GET", "/health").replace(b"host:", b"host: evil.example\r\nhost:", 1)
    none = server.head("GET", "/health", host=None)
    old = none.replace(b"HTTP/1.1", b"HTTP/1.0")
    assert [server.raw(data)[0] for data in (two, none, old)] == [400, 400, 403]


@each("method", METHODS)
@each("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost", "file://"])
def test_a_page_of_another_origin_is_refused_on_every_method(server: Server, method: str, origin: str):
    for path in ("/health", COMPLETIONS):
        status, headers, _ = server.raw(server.head(method, path, origin=origin))
        assert status == 403
        assert not any(name.startswith("access-control") for name in headers)


def test_requests_that_a_browser_marks_as_cross_site_are_refused(server: Server):
    for site, status in (("cross-site", 403), ("same-site", 403), ("none", 200), ("same-origin", 200)):
        assert server.raw(server.head("GET", "/health", sec_fetch_site=site))[0] == status
    own = f"http://127.0.0.1:{server.port}"
    assert server.raw(server.head("GET", "/health", origin=own))[0] == 200


@each("method", METHODS)
@each(
    "given",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x", "Bearer \xff"],
)
def test_without_the_token_nothing_is_answered(server: Server, method: str, given: str | None):
    authorization = None if given is None else given.format(token=server.token)
    for path in ("/v1/models", "/v1/models/chatty", COMPLETIONS, "/v1/chat/completions", "/", "/nothing"):
        head = server.head(method, path, authorization=None if authorization is None else "@")
        data = head.replace(b"authorization: @", f"authorization: {authorization}".encode("latin-1"))
        status, headers, _ = server.raw(data)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")


def test_two_tokens_are_none(server: Server):
    twice = server.head("GET", "/v1/models").replace(
        b"host:", f"authorization: Bearer {server.token}\r\nhost:".encode()
    )
    assert server.raw(twice)[0] == 401


def test_health_tells_those_without_a_token_nothing_more(server: Server):
    assert server.ask("GET", "/health", authorization=None)[2] == {"status": "ok"}
    assert server.ask("GET", "/health")[2]["free_blocks"] == 8


@each(
    "path",
    ["/", "/v1", "/v1/models/", "/v1/models/nobody", "/v1/models/chatty/", "/v1/models/../models", "/v1/../health",
     "/health/", "//health", "/HEALTH", "/docs",
     "http://evil.example/health", "/v1/completions%00", "/%2e%2e/etc/passwd", "/openapi.json"],
)  # fmt: skip
def test_there_is_no_other_path(server: Server, path: str):
    status, _, answer = server.ask("GET", path)
    assert status == 404
    assert is_error(answer)


def test_each_path_has_its_method(server: Server):
    wrong = ("POST", "/health"), ("DELETE", "/v1/models"), ("DELETE", "/v1/models/chatty")
    for method, path in (("GET", COMPLETIONS), ("OPTIONS", COMPLETIONS), *wrong):
        status, headers, answer = server.ask(method, path)
        assert (status, headers["allow"]) == (405, "POST" if path == COMPLETIONS else "GET")
        assert is_error(answer)
    status, headers, body = server.raw(server.head("HEAD", "/health"))
    assert (status, body) == (200, b"")


def test_a_body_that_is_too_long_is_refused_and_the_client_learns_why(server: Server):
    long = json.dumps({**ASK, "prompt": "a" * 2**20}).encode()
    status, _, answer = server.ask("POST", COMPLETIONS, long)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert is_error(answer)


def test_a_length_that_is_announced_is_refused_before_the_body_comes(strict: Server):
    head = strict.head("POST", COMPLETIONS, content_length=str(10**12))
    start = time.monotonic()
    assert strict.raw(head)[0] == 413
    assert strict.raw(strict.head("POST", COMPLETIONS, content_length=str(10**12), expect="100-continue"))[0] == 413
    assert time.monotonic() - start < patience(5)


def test_chunks_without_end_are_cut_off(server: Server):
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.connect() as sock:
        sock.sendall(server.head("POST", COMPLETIONS, transfer_encoding="chunked"))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(chunk * 1000)  # 64 MiB


def test_chunks_that_end_are_read_and_too_many_are_refused(server: Server):
    head = server.head("POST", COMPLETIONS, transfer_encoding="chunked")
    body = json.dumps(ASK).encode()
    small = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:])) + b"0\r\n\r\n"
    status, _, answer = server.raw(head + small)
    assert (status, json.loads(answer)["object"]) == (200, "text_completion")
    large = b"".join(b"10000\r\n" + b" " * 0x10000 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
    assert server.raw(head + large)[0] == 413


@each(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100,
     b"GET /health HTTP/1.1\r\nhost: localhost\r\n bad\r\n\r\n",
     b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
     b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
     b"GET / HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(9000)) + b"\r\n"],
)  # fmt: skip
def test_what_is_not_http_is_refused_in_one_line(server: Server, data: bytes):
    status, _, answer = server.raw(data)
    assert status in (0, 400, 403, 431)  # 0: reset while it still sent; 403: read as HTTP from an unknown host
    assert status == 0 or is_error(json.loads(answer))
    assert server.ask("GET", "/health")[0] == 200


def test_heads_are_bounded(server: Server):
    assert server.raw(server.head("GET", "/health", x="a" * 8_000))[0] == 200
    assert server.raw(server.head("GET", "/health", x="a" * 17_000))[0] in (400, 431)
    assert server.raw(server.head("GET", "/health?" + "a" * 17_000))[0] in (400, 431)
    with server.connect() as sock:  # a piece at a time
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        for _ in range(4):
            sock.sendall(b"x: " + b"a" * 8_000 + b"\r\n")
            time.sleep(0.05)
        assert read_answer(sock)[0] in (0, 400)


def test_a_length_and_chunks_at_once_smuggle_nothing(server: Server):
    inner = server.head("GET", "/v1/models")
    head = server.head("POST", COMPLETIONS, content_length="4", transfer_encoding="chunked")
    with server.connect() as sock:
        sock.sendall(head + b"0\r\n\r\n" + inner)
        answers = b""
        while piece := sock.recv(65536):
            answers += piece
            if answers.count(b"HTTP/1.1") >= 2:
                break
    first = answers.split(b"HTTP/1.1")[1]
    assert first.startswith(b" 400")  # an empty body, or refused outright; never a body that holds the second


def test_rubbish_after_a_request_harms_nobody(server: Server):
    body = json.dumps(ASK).encode()
    with server.connect() as sock:
        sock.sendall(
            server.head("POST", COMPLETIONS, content_length=str(len(body))) + body + b"\x00rubbish\r\n\r\n" * 9
        )
        status, _, answer = read_answer(sock)
    assert status in (0, 200)
    assert status == 0 or json.loads(answer)["object"] == "text_completion"
    assert server.ask("POST", COMPLETIONS, ASK)[0] == 200


def test_pipelined_requests_are_answered_in_order(server: Server):
    with server.connect() as sock:
        sock.sendall(server.head("GET", "/health") + server.head("GET", "/nothing", connection="close"))
        data = b""
        while piece := sock.recv(65536):
            data += piece
    assert re.findall(rb"HTTP/1\.1 (\d+)", data) == [b"200", b"404"]


def test_an_upgrade_to_a_websocket_is_not_made(server: Server):
    head = server.head("GET", "/health", connection="Upgrade", upgrade="websocket", sec_websocket_version="13",
                       sec_websocket_key="dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
    assert server.raw(head)[0] == 200


def _is_closed(sock: socket.socket) -> bool:
    """Whether the server is gone after one more byte and a moment."""
    try:
        sock.sendall(b"x")
        time.sleep(0.1)
    except (ConnectionResetError, BrokenPipeError):
        return True
    return False


def test_a_head_that_never_ends_is_given_up(strict: Server):
    for first in (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n", strict.head("GET", "/health")):
        with strict.connect() as sock:
            sock.sendall(first)
            if first.endswith(b"\r\n\r\n"):
                read_answer(sock)  # a connection that is kept is no safer place
            assert eventually(lambda sock=sock: _is_closed(sock))


def test_a_connection_that_says_nothing_is_closed(strict: Server):
    with strict.connect() as sock:
        try:
            assert sock.recv(1) == b""
        except ConnectionResetError:
            return


def test_a_body_that_never_ends_is_given_up(strict: Server):
    head = strict.head("POST", COMPLETIONS, content_length="1000")
    status, _, answer = strict.raw(head + b"{")
    assert (status, json.loads(answer)["error"]["type"]) == (408, "timeout")


def test_many_slow_connections_keep_nobody_out(strict: Server):
    slow = [strict.connect() for _ in range(100)]
    try:
        for sock in slow:
            sock.sendall(b"GET / HTTP/1.1\r\n")
        assert strict.ask("POST", COMPLETIONS, ASK)[0] == 200
    finally:
        for sock in slow:
            sock.close()


def test_a_client_that_does_not_read_is_dropped(folders: Path):
    """Its connection is closed long before the request's time is up, and so it is never told of that."""
    impatient = (
        "import hone.serve.server as s, hone.serve.http as h; s.STALLED_SECONDS = 0.5; "
        "h.SLOW_SECONDS = 0.25; h.STALLED_SECONDS = 0.5"
    )
    patient = start_server(folders / "chatty", "--timeout", "120", "--max-tokens", "900", before=impatient)
    try:
        _read_nothing(patient)
    finally:
        assert patient.close() == 0


def _read_nothing(strict: Server) -> None:
    ask = {**ASK, "max_tokens": 900, "n": 8, "stream": True, "logprobs": 20, "logit_bias": {"1": -100}}
    body = json.dumps(ask).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(patience(20))
        sock.connect(("127.0.0.1", strict.port))
        sock.sendall(strict.head("POST", COMPLETIONS, content_length=str(len(body))) + body)
        strict.writes(0)
        assert strict.idle(60)["running"] == 0
        time.sleep(patience(2))  # the model may be done before the connection counts as stalled
        told = b""
        try:
            while piece := sock.recv(65536):
                told += piece
        except ConnectionResetError:
            assert told
    assert b"timeout" not in told
    assert b"[DONE]" not in told


def test_deep_json_is_refused(server: Server):
    for body in (b"[" * 500_000, b'{"a":' * 100_000, b'{"model": "chatty", "prompt": ' + b"[" * 400_000):
        status, _, answer = server.ask("POST", COMPLETIONS, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_json")


def test_threads_that_hammer_see_only_answers_and_errors(server: Server):
    seen = list[int]()

    def hammer(number: int) -> None:
        for k in range(10):
            path = (COMPLETIONS, "/v1/models", "/health", "/x")[(number + k) % 4]
            body = ASK if path == COMPLETIONS else None
            seen.append(server.ask("POST" if body else "GET", path, body)[0])

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 120
    assert set(seen) == {200, 404}
    assert server.idle()["free_blocks"] == 8


def reset(sock: socket.socket) -> None:
    """Leave as if the cable was pulled: no goodbye, unread bytes lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


LONG = {**ASK, "max_tokens": 1000, "logit_bias": {"1": -100}}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: Server, stream: bool):
    before = server.idle()["written"]
    body = json.dumps({**LONG, "stream": stream, "n": 8}).encode()
    sock = server.connect()
    sock.sendall(server.head("POST", COMPLETIONS, content_length=str(len(body))) + body)
    if stream:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    else:
        server.writes(before)
    reset(sock)
    after = server.idle()
    assert after["free_blocks"] == 8
    assert after["written"] - before < 8 * 1000


def test_clients_that_leave_while_they_wait_are_forgotten(server: Server):
    body = json.dumps({**LONG, "n": 8}).encode()
    socks = [server.connect() for _ in range(5)]
    for sock in socks:
        sock.sendall(server.head("POST", COMPLETIONS, content_length=str(len(body))) + body)
    while not server.busy()["waiting"]:
        time.sleep(0.005)
    for sock in reversed(socks):
        reset(sock)
    assert server.idle()["free_blocks"] == 8
    assert server.ask("POST", COMPLETIONS, ASK)[0] == 200
