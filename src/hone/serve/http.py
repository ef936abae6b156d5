"""One HTTP exchange over ASGI: a body with a bound on its size and time, JSON out, or a stream of events."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from hone.serve.refusal import Refusal, packed

BODY_SECONDS = 30.0  # for the whole body
DRAINED = 8 * 2**20  # bytes of a refused body that are read away, so that the client gets to read the refusal
DRAIN_SECONDS = 2.0

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Gone(Exception):
    """The client has left: there is nobody to answer."""


def too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body is longer than {limit} bytes: send less at once", code="body_too_large")


class Incoming:
    """The body of one request, and whether the client is still there."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.headers, self._receive = scope["headers"], receive
        self.ended = False  # nothing of the body is left to come

    async def body(self, *, limit: int) -> bytes:
        """All of it, refused as soon as it is known to be longer than the limit, chunked or not."""
        if self._announced() > limit:
            raise too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while not self.ended and len(body) <= limit:
                    body += await self._piece()
        except TimeoutError:
            raise Refusal(408, f"the body took longer than {BODY_SECONDS:g} seconds", code="timeout") from None
        if len(body) > limit:
            raise too_large(limit)
        return bytes(body)

    def _announced(self) -> int:
        lengths = [value for name, value in self.headers if name == b"content-length"]
        return int(lengths[0]) if lengths else 0

    async def _piece(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            self.ended = True
            raise Gone
        self.ended = not message.get("more_body")
        return message.get("body", b"")

    async def drain(self) -> None:
        """Read away some of a refused body: a connection closed on unread bytes is reset, and nobody learns why."""
        if any(name == b"expect" for name, _ in self.headers):
            return  # it waits to be told whether to send at all
        left = DRAINED
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.ended and left > 0:
                    left -= len(await self._piece())
        except TimeoutError:
            return

    async def until_gone(self) -> None:
        """Returns when the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)


class Reply:
    """The answer of one exchange: JSON at once, or events as they come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def json(
        self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None, close: bool = False
    ) -> None:
        """close: the body was perhaps not read to its end, nothing can follow on this connection."""
        body = packed(value)
        more = {**(headers or {}), **({"connection": "close"} if close else {})}
        await self._start(status, {"content-type": "application/json", "content-length": str(len(body)), **more})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, why: Refusal, *, close: bool) -> None:
        """An error object; inside a stream, an event that holds it."""
        if self.started:
            await self.event(why.body())
            await self.end()
            return
        await self.json(why.body(), status=why.status, headers=why.headers, close=close)

    async def begin(self) -> None:
        """A stream of events."""
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"})

    async def event(self, value: Any) -> None:
        await self._send({"type": "http.response.body", "body": b"data: " + packed(value) + b"\n\n", "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        safe = {"x-content-type-options": "nosniff", **headers}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in safe.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
