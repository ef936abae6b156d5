"""A judge's endpoint that fails in every way: each is a failed question with its reason, within its time and tries."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from patience import patience

from hone.errors import HoneError
from hone.reward.learned.endpoint import Budget, Endpoint, NoAnswer

RIGHT = json.dumps({"choices": [{"message": {"content": "Score: 7"}}]}).encode()


def whole(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def _request(end: socket.socket) -> bytes:
    """All of it, for a connection that is closed with something unread is reset."""
    text = b""
    while b"\r\n\r\n" not in text and (part := end.recv(1 << 16)):
        text += part
    head, _, body = text.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length and len(body) < int(length[1]) and (part := end.recv(1 << 16)):
        body += part
    return head + body


class Fake:
    """Answers each connection with the next of these bytes, the last one for ever; keeps what it was sent."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.answers, self.pause, self.asked = [b""], 0.0, list[bytes]()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                end, _ = self.socket.accept()
            except OSError:
                return
            with end:
                self.asked.append(_request(end))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                self._say(end, answer)

    def _say(self, end: socket.socket, answer: bytes) -> None:
        try:
            for byte in answer if self.pause else [None]:
                end.sendall(answer if byte is None else bytes([byte]))
                time.sleep(self.pause)
        except OSError:
            return  # nobody listens any more


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    yield made
    made.socket.close()


def ask(fake: Fake, **settings) -> str:
    url = f"http://127.0.0.1:{fake.socket.getsockname()[1]}/v1"
    endpoint = Endpoint(url=url, model="m", **{"timeout": 5.0, "retries": 1, **settings})
    return endpoint([{"role": "user", "content": "q"}], temperature=0.0, max_tokens=5, seed=0)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "RemoteDisconnected"),
        (b"HELLO\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "HTTPException"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", "LineTooLong"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "JSONDecodeError"),
        (whole(b""), "JSONDecodeError"),
        (whole(b"<html>"), "JSONDecodeError"),
        (whole(b"[" * 100_000), "no chat completion"),
        (whole(b"5"), "no chat completion"),
        (whole(b'{"choices": []}'), "no chat completion"),
        (whole(b'{"choices": [{"message": {"content": null}}]}'), "no text"),
        (whole(b"busy", status="529 Overloaded"), "status 529: busy"),
        (whole(b"slower", status="429 Too Many"), "status 429: slower"),
    ],
)
def test_what_may_pass_is_tried_again_and_then_failed(fake: Fake, answer: bytes, says: str):
    fake.answers = [answer]
    with pytest.raises(NoAnswer, match=rf"did not answer in 2 tries, the last with .*{says}"):
        ask(fake)
    assert len(fake.asked) == 2
    fake.answers = [answer, whole(RIGHT)]
    assert ask(fake) == "Score: 7"


def test_an_error_whose_text_breaks_off_or_never_comes_is_tried_again_as_well(fake: Fake):
    head = b"HTTP/1.1 503 Busy\r\n"
    for broken in (head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", head + b"Transfer-Encoding: chunked\r\n\r\nx"):
        fake.answers = [broken, whole(RIGHT)]
        assert ask(fake) == "Score: 7"
    fake.answers, fake.pause = [whole(b"x" * 300, status="503 Busy"), whole(RIGHT)], 0.01
    start = time.monotonic()
    with pytest.raises(NoAnswer, match="did not answer in 1 tries, the last with status 503"):
        ask(fake, timeout=0.5, retries=0)
    assert time.monotonic() - start < patience(3)


@pytest.mark.parametrize("status", ["400 Bad", "401 Key", "404 None"])
def test_a_refusal_is_not_tried_again(fake: Fake, status: str):
    fake.answers = [whole(b"no", status=status)]
    with pytest.raises(NoAnswer, match=f"refused with status {status[:3]}: no"):
        ask(fake)
    assert len(fake.asked) == 1


def test_an_answer_that_comes_byte_by_byte_is_late_too(fake: Fake):
    fake.answers, fake.pause = [whole(RIGHT)], 0.05  # about 5 s in all, and never 0.5 s without a byte
    start = time.monotonic()
    with pytest.raises(NoAnswer, match="TimeoutError"):
        ask(fake, timeout=0.5, retries=0)
    assert time.monotonic() - start < patience(4)


def test_every_try_costs(fake: Fake):
    budget = Budget(3)
    fake.answers = [whole(b"", status="500 Oops")]
    for says in ("did not answer in 2 tries", "budget of 3 requests is spent", "budget of 3 requests is spent"):
        with pytest.raises(NoAnswer, match=says):
            ask(fake, budget=budget)
    assert len(fake.asked) == 3


def test_a_key_that_is_not_there_is_said_at_once_and_one_that_is_goes_to_nobody_else(fake: Fake, monkeypatch):
    monkeypatch.delenv("TRIAL_KEY", raising=False)
    with pytest.raises(HoneError, match="environment variable TRIAL_KEY, which is empty: set it"):
        ask(fake, key="TRIAL_KEY")
    monkeypatch.setenv("TRIAL_KEY", "secret")
    fake.answers = [whole(b"", status="302 There", headers="Location: /elsewhere\r\n"), whole(RIGHT)]
    assert ask(fake, key="TRIAL_KEY") == "Score: 7"
    assert [b"secret" in text for text in fake.asked] == [True, False]
