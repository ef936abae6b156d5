"""A model of a few kilobytes that chats, an adapter for it, and `hone serve` on it in a process of its own."""

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from patience import eventually, patience
from places import decoder

from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.model.formats.peft import save_peft
from hone.model.formats.save import save_model
from hone.model.lora import add_lora, lora_parameters

CONTEXT = 1024
WORDS = ["the cat sat on the mat", "Größe €5 日本 😀", "one two three four five six seven"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}


def make_tokenizer(*, chats: bool = True) -> Tokenizer:
    tokenizer = train_bpe(WORDS * 3, vocab_size=320, specials=CHAT_SPECIALS)
    return replace(tokenizer, chat_template=DEFAULT_TEMPLATE) if chats else tokenizer


make_decoder = partial(decoder, context=CONTEXT, layers=2, spread=0.3)


def make_folders(folder: Path) -> Path:
    """`chatty`, `plain` without a chat template, `brief` with a context of 64, and `tuned`, an adapter of `chatty`."""
    tokenizer = make_tokenizer()
    save_model(make_decoder(tokenizer.vocab_size), tokenizer, folder / "chatty")
    save_model(make_decoder(tokenizer.vocab_size), make_tokenizer(chats=False), folder / "plain")
    save_model(make_decoder(tokenizer.vocab_size, context=64), tokenizer, folder / "brief")
    decoder = make_decoder(tokenizer.vocab_size)
    add_lora(decoder, rank=2, alpha=64, seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for p in lora_parameters(decoder):
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    save_peft(decoder, folder / "tuned")
    return folder


@dataclass
class Server:
    """One that runs; `close` ends it as Ctrl-C would."""

    process: subprocess.Popen[str]
    port: int
    token: str
    greeting: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=patience(20))

    def head(self, method: str, path: str, **headers: str | None) -> bytes:
        """A request's head; a header that is None is left out."""
        fields = {"host": f"127.0.0.1:{self.port}", "authorization": f"Bearer {self.token}", **headers}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value is not None]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()

    def raw(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """What comes back over a connection of its own."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_answer(sock, bare=data.startswith(b"HEAD"))

    def ask(self, method: str, path: str, body: Any = None, **headers: str | None) -> tuple[int, dict[str, str], Any]:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        length = {} if body is None else {"content_length": str(len(data))}
        status, found, answer = self.raw(self.head(method, path, **{**length, **headers}) + data)
        return status, found, json.loads(answer) if answer else None

    def busy(self) -> dict[str, Any]:
        return self.ask("GET", "/health")[2]

    def idle(self, seconds: float = 10.0) -> dict[str, Any]:
        """Wait until the engine has nothing to do."""
        end = time.monotonic() + patience(seconds)
        while (found := self.busy())["running"] or found["waiting"]:
            assert time.monotonic() < end, found
            time.sleep(0.02)
        return found

    def writes(self, before: int) -> None:
        """Wait until it has written more tokens than these: a short request may begin and end between two looks."""
        assert eventually(lambda: self.busy()["written"] > before)

    def close(self) -> int:
        self.process.terminate()
        self.process.communicate()
        return self.process.returncode


def read_answer(sock: socket.socket, *, bare: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, body; (0, {}, b"") where the connection was closed without an answer; bare: to HEAD."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            piece = sock.recv(65536)
            if not piece:
                return 0, {}, data
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        while not bare and len(body) < int(headers.get("content-length", "0")):
            piece = sock.recv(65536)
            if not piece:
                break
            body += piece
    except ConnectionResetError:
        return 0, {}, data
    return int(first.split()[1]), headers, body[: int(headers.get("content-length", len(body)))]


def start_server(model: Path | str, *options: str, before: str = "", **environment: str) -> Server:
    """Wait until it says that it serves; before: Python that runs first, to make waiting times short."""
    start = ["-c", f"{before}; import sys, hone.cli; sys.exit(hone.cli.main())"] if before else ["-m", "hone"]
    process = subprocess.Popen(
        [sys.executable, *start, "serve", str(model), "--port", "0", *options],
        env={**ENVIRONMENT, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert select.select([process.stdout], [], [], patience(60))[0]
    first = process.stdout.readline()
    found = re.match(r"serving \S+ at http://\S+:(\d+)/v1(?:  token (\S+))?", first)
    if not found:
        process.kill()
        raise AssertionError(first + process.communicate()[1])
    lines = [process.stdout.readline() for _ in range(9)]
    return Server(process, int(found[1]), found[2] or "", first + "".join(lines))


def hone(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [sys.executable, "-m", "hone", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, **options)


def rest(sock: socket.socket) -> bytes:
    """What still comes, until the server closes the connection."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        return data
    return data
