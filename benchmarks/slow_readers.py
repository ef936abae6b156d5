"""What clients that read nothing cost the others: a real `hone serve`, real sockets, a tiny model made on the spot.

Honest clients ask for short answers all the time. Now and then 40 others ask for 128 completions each with 20 log-probs
at every token, and read nothing. The time of an honest answer is compared with and without them, in turns.
"""

import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.form import Row, main, note, row, say
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import train_bpe
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.save import save_model

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}]}
SHORT = {**HELLO, "max_tokens": 16, "logit_bias": {"1": -100}}  # token 1 would end it
HEAVY = {**HELLO, "n": 128, "logprobs": True, "top_logprobs": 20, "logit_bias": {"1": -100}}
HOSTILE = 40
HONEST = 2
KINDS = {  # of hostile clients: what they ask for, and whether they come back when they are dropped
    "streams that nobody reads": ({**HEAVY, "stream": True}, False),
    "streams that nobody reads, begun again when dropped": ({**HEAVY, "stream": True}, True),
    "whole answers that nobody reads": ({**HEAVY, "max_tokens": 200}, True),
}


def make_model(folder: Path, *, context: int = 1024) -> Path:
    """A model of a few kilobytes that chats."""
    tokenizer = train_bpe(["the cat sat on the mat"] * 3, vocab_size=300, specials=CHAT_SPECIALS)
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_model(Decoder(config), replace(tokenizer, chat_template=DEFAULT_TEMPLATE), folder / "tiny")
    return folder / "tiny"


@dataclass
class Server:
    """`hone serve` in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    token: str

    def connect(self, seconds: float = 60.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def request(self, body: Any = None, *, path: str = CHAT, method: str = "POST", **headers: str) -> bytes:
        """What a client sends."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": "localhost", "authorization": f"Bearer {self.token}", "content_length": str(len(data))}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in {**fields, **headers}.items() if value]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + data

    def ask(self, body: Any = None, *, sock: socket.socket | None = None, **how: Any) -> tuple[int, Any]:
        """The status and the JSON of one answer; (0, None) where the connection was closed instead."""
        own = sock or self.connect()
        try:
            own.sendall(self.request(body, **how))
            return read_answer(own)
        except ConnectionError:
            return 0, None
        finally:
            if sock is None:
                own.close()

    def memory(self) -> float:
        """The most megabytes it has had."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", text)[0]) / 1024


def read_answer(sock: socket.socket) -> tuple[int, Any]:
    """The status and the JSON of an answer whose length is announced."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            return 0, None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(re.findall(rb"content-length: (\d+)", head)[0])
    while len(body) < length:
        piece = sock.recv(65536)
        if not piece:
            return 0, None
        body += piece
    return int(head.split()[1]), json.loads(body) if body else None


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """It runs as long as the block does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hone", "serve", str(model), "--port", "0", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        first = process.stdout.readline() if select.select([process.stdout], [], [], 120)[0] else ""
        found = re.match(r"serving \S+ at http://\S+:(\d+)/v1  token (\S+)", first)
        if not found:
            raise RuntimeError(f"hone serve did not start: {first}")
        yield Server(process, int(found[1]), found[2])
    finally:
        process.kill()
        process.communicate()


@dataclass
class Honest:
    """Clients that ask, read, and ask again; the seconds of each answer."""

    server: Server
    seconds: list[float] = field(default_factory=list[float])
    failed: list[Any] = field(default_factory=list[Any])
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with self.server.connect() as sock:
            while not self.stopped.is_set():
                begin = time.monotonic()
                status, answer = self.server.ask(SHORT, sock=sock)
                self.seconds.append(time.monotonic() - begin)
                if status != 200:
                    self.failed.append((status, answer))
                    return
                self.stopped.wait(0.02)


@contextmanager
def asking(server: Server, number: int = HONEST) -> Iterator[Honest]:
    """Honest clients while the block lasts."""
    honest = Honest(server)
    threads = [threading.Thread(target=honest.run) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield honest
    finally:
        honest.stopped.set()
        for thread in threads:
            thread.join()


def read_nothing(server: Server, body: Any, *, seconds: float, again: bool, number: int = HOSTILE) -> None:
    """Ask and wait without a look at the answer; then leave."""
    sent, end = server.request(body), time.monotonic() + seconds

    def begin() -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(sent)
        return sock

    socks = [begin() for _ in range(number)]
    while time.monotonic() < end:
        time.sleep(0.2)
        poll = select.poll()
        for sock in socks:
            poll.register(sock, select.POLLHUP | select.POLLERR)
        dropped = {number for number, _ in poll.poll(0)}
        for i, sock in enumerate(socks):
            if again and sock.fileno() in dropped:
                sock.close()
                socks[i] = begin()
    for sock in socks:
        sock.close()


def measure(quick: bool) -> Iterator[Row]:
    rounds = 1 if quick else 2
    with tempfile.TemporaryDirectory() as place, serving(make_model(Path(place))) as server:
        with asking(server) as honest:
            time.sleep(2)
        say(f"warm: {1e3 * statistics.median(honest.seconds):.1f} ms")
        for kind, (body, again) in KINDS.items():
            alone, beside, after = list[float](), list[float](), 0.0
            hold = 5.0 if quick else 10.0 if again else 30.0
            for _ in range(rounds):
                with asking(server) as honest:
                    time.sleep(hold / 2)
                alone += honest.seconds
                with asking(server) as honest:
                    read_nothing(server, body, seconds=hold, again=again)
                    gone = time.monotonic()
                    status, _ = server.ask(SHORT)
                    after = time.monotonic() - gone
                beside += honest.seconds
                if honest.failed or status != 200:
                    raise RuntimeError(f"an honest client got {[*honest.failed, status]}")
            yield from _rows(kind, alone, beside, after)
        yield note("memory of the server", server.memory(), unit="MB")


def _rows(kind: str, alone: list[float], beside: list[float], after: float) -> Iterator[Row]:
    ours, peer = 1e3 * statistics.median(beside), 1e3 * statistics.median(alone)
    say(f"{kind}: {peer:.1f} ms alone, {ours:.1f} ms beside {HOSTILE}, longest {1e3 * max(beside):.0f} ms")
    yield row(f"median of honest answers beside {HOSTILE} clients: {kind}", ours, unit="ms",
              goal="at most twice that without them", ok=ours <= 2 * peer, peer=peer)  # fmt: skip
    yield note(f"longest honest answer: {kind}", 1e3 * max(beside), unit="ms", peer=1e3 * max(alone))
    yield note(f"first answer after they left: {kind}", 1e3 * after, unit="ms")


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
