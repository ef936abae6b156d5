"""One HTTP exchange: who may ask, how large and slow a body may be, how an answer is sent, and the form of errors.

Starlette's own parts do not do this. `TrustedHostMiddleware` and `RequestBodyLimitMiddleware` answer in another form
than OpenAI's. The first cannot take every address of this machine, the second bounds neither the time of a body nor all
bodies together. `CORSMiddleware` lets foreign pages ask, and only keeps them from reading the answer.
"""

import asyncio
import hmac
import ipaddress
import json
import re
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hone.errors import HoneError

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE = frozenset({"0.0.0.0", "::"})
OPEN_PATHS = frozenset({"/health"})  # answered without a token
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?", re.ASCII)
TOKEN = re.compile(r"[!-~]+", re.ASCII)
HEAD_BYTES = 2**14  # of a request's line and headers
BODY_BYTES = 2**20
BODY_SECONDS = 30.0  # for the whole body
SMALL_BODY = 2**16  # bytes that every body may have, whatever else is being read
ALL_BODIES = 2**26  # bytes of all bodies together, beyond those
DRAINED = 8 * 2**20  # bytes of a refused body that are read, because the client reads the error only after sending
DRAIN_SECONDS = 2.0
PAUSE_SECONDS = 0.03  # between two parts of an answer while others are being served
SLOW_SECONDS = 2.0  # a client that reads nothing for so long is dropped if others are being served
STALLED_SECONDS = 10.0  # a client that reads nothing for so long is dropped in any case
ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def json_text(value: Any) -> str:
    """JSON in ASCII: no line separator and no half of a surrogate pair can break a stream of events."""
    return ENCODE(value)


def event(text: str) -> str:
    """A server-sent event."""
    return f"data: {text}\n\n"


# --- errors ---


class APIError(HTTPException):
    """An error for the client, in OpenAI's form: one line, never a traceback."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def json(self) -> str:
        """The body of the response."""
        kinds = {408: "timeout", 429: "rate_limit_error"}
        kind = "server_error" if self.status_code >= 500 else kinds.get(self.status_code, "invalid_request_error")
        return json_text({"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}})


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """The request itself is wrong: 400."""
    return APIError(400, message, param=param, code=code)


async def error_response(request: Request, error: APIError) -> Response:
    """The error, after the body was read. If the body has not ended, the connection is closed."""
    ended = await _drain(request)
    headers = {**(error.headers or {}), **({} if ended else {"connection": "close"})}
    return Response(error.json(), error.status_code, headers, media_type="application/json")


async def _drain(request: Request) -> bool:
    """Read the body to its end. Returns whether it ended.

    A connection that is closed on unread bytes is reset, and the client never sees the answer.
    """
    if "expect" in request.headers:
        return False  # the client waits for an answer before it sends
    remaining = DRAINED
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in request.stream():
                remaining -= len(chunk)
                if remaining < 0:
                    return False
    except (TimeoutError, ClientDisconnect):
        return False
    except RuntimeError:  # it has been read to its end
        return True
    return True


# --- who may ask ---


def is_address(name: str, *, loopback: bool = False) -> bool:
    """Whether it is an IP address. loopback: only one that no other machine can reach counts."""
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return False
    return found.is_loopback or not loopback


def check_token(token: str) -> str:
    """A token that fits into a header."""
    if not TOKEN.fullmatch(token):
        raise HoneError("the token is empty or has blanks or other than ASCII in it: use letters and digits")
    return token


class Access:
    """Who may ask: checks of Host, Origin and token. host: the address that the server is bound to."""

    def __init__(self, *, host: str, token: str) -> None:
        self.token = check_token(token).encode()
        self.everywhere = host in EVERYWHERE
        self.names = LOCAL | {host.lower()} | ({socket.gethostname().lower()} if self.everywhere else set[str]())

    def check(self, path: str, headers: Headers) -> None:
        """Raise the error of a request that may not be answered."""
        host = self._host(headers)
        own = {f"http://{host}", f"https://{host}"}
        foreign = [origin for origin in headers.getlist("origin") if origin.lower() not in own]
        if foreign or set(headers.getlist("sec-fetch-site")) - {"same-origin", "none"}:
            text = "requests from a page of another origin are refused: ask from a program, not from a browser"
            raise APIError(403, text, code="forbidden_origin")
        if path not in OPEN_PATHS and not self.has_token(headers):
            text = "the token is missing or wrong: send the one of this start as `Authorization: Bearer TOKEN`"
            raise APIError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _host(self, headers: Headers) -> str:
        """The Host header, checked: a foreign page can make its own name point here (DNS rebinding)."""
        hosts = headers.getlist("host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        found = HOST.fullmatch(host)
        name = found[1].strip("[]") if found else ""
        if name not in self.names and not (self.everywhere and is_address(name)):
            text = "the Host header is not a name of this server: use the address that `hone serve` printed"
            raise APIError(403, text, code="forbidden_host")
        return host

    def has_token(self, headers: Headers) -> bool:
        """Whether the request has the token. It is compared in constant time."""
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        fits = hmac.compare_digest(token.strip().encode("latin-1"), self.token)
        return fits and scheme.lower() == "bearer"


class AccessMiddleware:
    """Checks the size of a request's head, then `Access`, before anything else."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            head = (
                len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
            )
            if head > HEAD_BYTES:
                raise APIError(431, f"the head is longer than {HEAD_BYTES} bytes: send less", code="head_too_large")
            self.access.check(scope["path"], request.headers)
        except APIError as error:
            response = await error_response(request, error)
            return await response(scope, receive, send)
        await self.app(scope, receive, send)


# --- bodies and answers ---


class BodyReader:
    """Reads bodies within bounds on each and on all that are being read together."""

    def __init__(self) -> None:
        self.held = 0  # bytes of all bodies beyond their first SMALL_BODY

    async def read(self, request: Request) -> bytes:
        """The whole body. One that is too long is refused as soon as that is known, chunked or not."""
        too_large = APIError(
            413, f"the body is longer than {BODY_BYTES} bytes: send less at once", code="body_too_large"
        )
        if int(request.headers.get("content-length", "0")) > BODY_BYTES:
            raise too_large
        body, extra = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > BODY_BYTES:
                        raise too_large
                    more = max(0, len(body) - SMALL_BODY) - extra
                    extra, self.held = extra + more, self.held + more
                    if more and self.held > ALL_BODIES:
                        raise APIError(503, "too many long bodies at once: ask again later", code="overloaded")
        except TimeoutError:
            raise APIError(408, f"the body took longer than {BODY_SECONDS:g} seconds", code="timeout") from None
        finally:
            self.held -= extra
        return bytes(body)


class Stalled(Exception):
    """The client does not read its answer."""


class Answer(StreamingResponse):
    """An answer whose parts are sent as they are made.

    Starlette ends the work when the client leaves. This class ends it when the client does not read or when its time
    is up. An error before the first part has a status of its own; a later one is an event of a stream.
    """

    def __init__(
        self,
        parts: AsyncGenerator[str, None],
        *,
        events: bool,
        seconds: float,
        others_served: Callable[[], bool],
        failed: Callable[[Exception], APIError],
    ) -> None:
        kind = "text/event-stream" if events else "application/json"
        super().__init__(parts, headers={"cache-control": "no-store"}, media_type=kind)
        self.parts, self.events, self.seconds = parts, events, seconds
        # whether others are being served; the error after a bug
        self.others_served, self.failed = others_served, failed
        self.started = False

    async def stream_response(self, send: Send) -> None:
        try:
            await self._send_or_explain(send)
        except Stalled:
            return  # uvicorn closes a connection whose answer has no end

    async def _send_or_explain(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self.seconds), aclosing(self.parts):
                return await (self._send_events if self.events else self._send_whole)(send)
        except TimeoutError:
            text = f"the request took longer than {self.seconds:g} seconds: ask for fewer tokens"
            error = APIError(504, text, code="timeout")
        except (APIError, Stalled) as known:
            error = known
        except Exception as bug:
            error = self.failed(bug)
        if not self.started or isinstance(error, Stalled):
            raise error
        if self.events:
            await self._write(send, event(error.json()), last=True)

    async def _send_events(self, send: Send) -> None:
        async for part in self.parts:
            await self._write(send, part)
        await self._write(send, last=True)

    async def _send_whole(self, send: Send) -> None:
        """Send the body. With one part it has a length, with more it goes in chunks."""
        part, following = await anext(self.parts, ""), await anext(self.parts, "")
        if not following:
            self.headers["content-length"] = str(len(part))
        while following:
            await self._write(send, part)
            part, following = following, await anext(self.parts, "")
        await self._write(send, part, last=True)

    async def _write(self, send: Send, text: str = "", *, last: bool = False) -> None:
        """Send a part. Returns when there is room for more, and others have had a turn."""
        if not self.started:
            self.started = True
            await self._put(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._put(send, {"type": "http.response.body", "body": text.encode("ascii"), "more_body": not last})
        if not last:
            await asyncio.sleep(PAUSE_SECONDS if self.others_served() else 0)

    async def _put(self, send: Send, message: Message) -> None:
        waited = 0.0
        while True:
            try:
                async with asyncio.timeout(SLOW_SECONDS):
                    return await send(message)  # it waits before it writes, so a second try sends nothing twice
            except TimeoutError:
                waited += SLOW_SECONDS
                if waited >= STALLED_SECONDS or self.others_served():
                    raise Stalled from None
