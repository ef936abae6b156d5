"""Questions to an OpenAI-compatible endpoint, with limits on time, on tries and on the number of requests."""

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hone.errors import HoneError
from hone.types import Message

RETRY_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})  # after these statuses a second try may help
MAX_PAUSE = 8.0  # seconds between two tries
MAX_BYTES = 1 << 22  # bytes of an answer


class NoAnswer(Exception):
    """There is no answer; the message says why."""


@dataclass(slots=True)
class Budget:
    """How many requests may be made in all. Several threads share it."""

    requests: int
    spent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def spend(self) -> None:
        """Counts one request. NoAnswer where none is left."""
        with self.lock:
            if self.spent >= self.requests:
                raise NoAnswer(f"the judge's budget of {self.requests} requests is spent")
            self.spent += 1


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A chat model behind a URL."""

    url: str  # up to /v1
    model: str
    key: str = ""  # the environment variable that holds it
    timeout: float = 60.0  # seconds a request may take
    retries: int = 3  # tries after the first one
    budget: Budget = field(default_factory=lambda: Budget(10_000))

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise HoneError(f"the judge's endpoint is {self.url!r}: write http://HOST:PORT/v1")
        if self.key and not os.environ.get(self.key):
            raise HoneError(f"the judge's key is to be in the environment variable {self.key}, which is empty: set it")

    def __call__(self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int) -> str:
        """The answer's text, or NoAnswer. What may succeed later is tried again, after growing pauses."""
        request = {"model": self.model, "messages": list(messages), "temperature": temperature}
        why = ""
        body = json.dumps({**request, "max_tokens": max_tokens, "seed": seed}).encode()
        for attempt in range(self.retries + 1):
            self.budget.spend()
            try:
                return _content(self._post(body))
            except urllib.error.HTTPError as error:
                why, wait = f"status {error.code}: {self._error_text(error)}", _retry_after(error)
                if error.code not in RETRY_STATUSES:
                    raise NoAnswer(f"the judge refused with {why}") from error
            except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, too late, or no JSON
                why, wait = f"{type(error).__name__}: {error}", 0.0
            if attempt < self.retries:
                time.sleep(max(wait, min(MAX_PAUSE, 0.25 * 2**attempt) * random.uniform(0.5, 1.0)))
        raise NoAnswer(f"the judge did not answer in {self.retries + 1} tries, the last with {why}")

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", body, headers, method="POST")
        if self.key:  # a server that the endpoint redirects to does not get the key
            request.add_unredirected_header("Authorization", f"Bearer {os.environ.get(self.key, '')}")
        until = time.monotonic() + self.timeout
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            return _read(answer, most=MAX_BYTES, until=until)

    def _error_text(self, error: urllib.error.HTTPError) -> str:
        """The beginning of what an error says; "" where that cannot be read in time."""
        with error:
            try:
                answer = cast(http.client.HTTPResponse, error)
                return _read(answer, most=300, until=time.monotonic() + self.timeout).decode("utf-8", "replace")
            except (OSError, http.client.HTTPException):
                return ""


def _read(answer: http.client.HTTPResponse, *, most: int, until: float) -> bytes:
    """At most so many bytes of an answer; TimeoutError where it goes on for longer, even byte by byte."""
    parts = bytearray()
    while len(parts) < most and (part := answer.read1(most - len(parts))):
        parts += part
        if time.monotonic() > until:
            raise TimeoutError("timed out")
    return bytes(parts)


def _retry_after(error: urllib.error.HTTPError) -> float:
    text = error.headers.get("Retry-After", "") if error.headers else ""
    return min(float(text), 30.0) if text.isdecimal() else 0.0


def _content(answer: bytes) -> str:
    try:
        found: Any = json.loads(answer)["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError("the answer is no chat completion") from error
    if not isinstance(found, str):
        raise ValueError("the answer has no text")
    return found
