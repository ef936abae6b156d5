"""One HTTP exchange: a body with a bound on its size and time, and an answer that is written as fast as it is read."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Send

from hone.serve.refusal import Refusal, json_text

BODY_SECONDS = 30.0  # for the whole body
DRAINED = 8 * 2**20  # bytes of a refused body that are read away, so that the client gets to read the refusal
DRAIN_SECONDS = 2.0
SMALL_BODY = 2**16  # bytes that every body may have, however many are being read
ALL_BODIES = 2**26  # bytes of all bodies together, beyond those
TURN_SECONDS = 0.03  # between two pieces of an answer while others are being served
SLOW_SECONDS = 2.0  # a client that takes nothing of its answer for so long is dropped when others are being served
STALLED_SECONDS = 10.0  # and for so long in any case


class Slow(Exception):
    """The client does not read its answer."""


class Bodies:
    """The bodies that are being read, bounded one by one and together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0

    async def read(self, request: Request) -> bytes:
        """All of it, refused as soon as it is known to be longer than the limit, chunked or not."""
        if int(request.headers.get("content-length", "0")) > self.limit:
            raise self._too_large()
        body, extra = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.limit:
                        raise self._too_large()
                    more = max(0, len(body) - SMALL_BODY) - extra
                    extra, self.held = extra + more, self.held + more
                    if more and self.held > ALL_BODIES:
                        raise Refusal(503, "too many long bodies at once: ask again later", code="overloaded")
        except TimeoutError:
            raise Refusal(408, f"the body took longer than {BODY_SECONDS:g} seconds", code="timeout") from None
        finally:
            self.held -= extra
        return bytes(body)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is longer than {self.limit} bytes: send less at once", code="body_too_large")


async def refused(request: Request, why: Refusal) -> Response:
    """An error object, once the body is read away; the connection ends where some of it is still to come."""
    whole = await _drained(request)
    headers = why.headers | ({} if whole else {"connection": "close"})
    return Response(json_text(why.body()), why.status, headers, media_type="application/json")


async def _drained(request: Request) -> bool:
    """Read away some of a refused body: a connection closed on unread bytes is reset, and nobody learns why."""
    if "expect" in request.headers:
        return False  # it waits to be told whether to send at all
    left = DRAINED
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in request.stream():
                left -= len(chunk)
                if left < 0:
                    return False
    except (TimeoutError, ClientDisconnect):
        return False
    except RuntimeError:  # it has been read to its end
        return True
    return True


class Writer:
    """What is sent, a piece at a time. A client that does not read holds up nobody but itself, and not for long."""

    def __init__(self, send: Send, *, crowded: Callable[[], bool]) -> None:
        self._send, self._crowded = send, crowded
        self.started = False

    async def begin(self, kind: str, length: int | None = None) -> None:
        """The head, before the first piece of the body."""
        self.started = True
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store")]
        headers += [] if length is None else [(b"content-length", str(length).encode())]
        await self._put({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, text: str) -> None:
        """Returns when there is room for more and others have had a turn; meanwhile the next pieces come together."""
        await self._put({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})
        await asyncio.sleep(TURN_SECONDS if self._crowded() else 0)

    async def end(self, text: str = "") -> None:
        await self._put({"type": "http.response.body", "body": text.encode("ascii")})

    async def _put(self, message: Message) -> None:
        waited = 0.0
        while True:
            try:
                async with asyncio.timeout(SLOW_SECONDS):
                    return await self._send(message)  # waits before it writes: it can be asked again
            except TimeoutError:
                waited += SLOW_SECONDS
                if waited >= STALLED_SECONDS or self._crowded():
                    raise Slow from None


class Streamed(Response):
    """A response that writes itself while the client is there."""

    def __init__(self, work: Callable[[Writer], Coroutine[Any, Any, None]], *, crowded: Callable[[], bool]) -> None:
        super().__init__()
        self.work, self.crowded = work, crowded

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Do the work; a client that leaves, or does not read, ends it."""
        doing = asyncio.ensure_future(self.work(Writer(send, crowded=self.crowded)))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                await doing
        except Slow:
            return  # uvicorn closes a connection whose answer has no end
        finally:
            for task in (doing, gone):
                task.cancel()
            await asyncio.gather(doing, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
