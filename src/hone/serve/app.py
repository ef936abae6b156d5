"""The routes: a request is read, checked, sampled and answered. Whatever fails is told in OpenAI's form."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hone.engine.requests import Request as EngineRequest
from hone.serve import reply
from hone.serve.body import CompletionRequest, ServedModels, read_request
from hone.serve.detokenize import Completion, Delta, TokenBytes
from hone.serve.dispatcher import Dispatcher, is_short
from hone.serve.http import (
    SMALL_BODY,
    Access,
    AccessMiddleware,
    Answer,
    APIError,
    BodyReader,
    error_response,
    is_address,
)

LONG_READS = 2  # bodies above SMALL_BODY that are read into prompts at once, beside any number of small ones
PART = 2**15  # characters of an answer that are made in one go; longer answers are never whole in memory
FEW, TOGETHER = 4, 8  # streams of more completions than a few have so many tokens of each in an event
POSTED = ("/v1/chat/completions", "/v1/completions")
PATHS = ("/health", "/v1/models", "/v1/models/NAME", *POSTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client can cost the others."""

    concurrency: int = 64  # requests being answered at once
    seconds: float = 600.0  # of one request


class Throttle:
    """While short answers are waited for, long ones become text in a share of the event loop's time.

    Log-probs of 40 streams would otherwise fill all of it.
    """

    SHARE = 1 / 4

    def __init__(self, short_waiting: Callable[[], bool]) -> None:
        self.short_waiting, self.lock = short_waiting, asyncio.Lock()

    async def make(self, text: Callable[[], str], *, short: bool) -> str:
        """The text, when it is its turn."""
        if short or not self.short_waiting():
            return text()
        async with self.lock:
            begin = time.monotonic()
            made = text()
            await asyncio.sleep((time.monotonic() - begin) * (1 / self.SHARE - 1))
        return made


class Service:
    """What the routes have in common."""

    def __init__(
        self,
        served: ServedModels,
        dispatcher: Dispatcher,
        access: Access,
        *,
        limits: ServerLimits,
        note: Callable[[str], None],
    ) -> None:
        self.served, self.dispatcher, self.access, self.limits, self.note = served, dispatcher, access, limits, note
        self.bytes_of = TokenBytes(served.tokenizer)
        self.tokens = reply.TokenJson(self.bytes_of)
        self.bodies, self.long_reads = BodyReader(), asyncio.Semaphore(LONG_READS)
        self.throttle = Throttle(lambda: dispatcher.short_waiting)
        self.active = 0

    async def health(self, request: Request) -> Response:
        """Whether it works, to anybody; how busy it is, to those with the token."""
        if self.dispatcher.failed is not None:
            raise APIError(503, self.dispatcher.failed, code="engine_failed")
        busy = asdict(self.dispatcher.counts) if self.access.knows_token(request.headers) else {}
        return JSONResponse({"status": "ok", **busy})

    async def models(self, request: Request) -> Response:
        return JSONResponse(reply.models(self.served))

    async def model(self, request: Request) -> Response:
        return JSONResponse(reply.model(self.served, request.path_params["name"]))

    async def generate(self, request: Request, *, chat: bool) -> Response:
        """A request counts from when its body has come: clients that send slowly keep nobody out."""
        self._check_concurrency()
        raw = await self.bodies.read(request)
        async with self.long_reads if len(raw) > SMALL_BODY else nullcontext():
            asked = await asyncio.to_thread(read_request, raw, self.served, chat=chat)
        self._check_concurrency()
        parts = (self._stream if asked.stream else self._whole)(asked, client_of(request))
        return Answer(
            parts,
            events=asked.stream,
            seconds=self.limits.seconds,
            crowded=lambda: self.dispatcher.live > 1,
            failed=self.failed,
        )

    def _check_concurrency(self) -> None:
        if self.active >= self.limits.concurrency:
            text = f"{self.active} requests are being answered already: ask again later"
            raise APIError(429, text, code="rate_limit_exceeded", headers={"retry-after": "1"})

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def failed(self, error: Exception) -> APIError:
        """Answer after a bug. The operator learns what it was, the client only that there was one."""
        self.note(f"a request failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return APIError(500, "the server failed on this request", code="internal_error")

    def _completions(self, asked: CompletionRequest) -> tuple[list[EngineRequest], dict[int, Completion]]:
        """Completion c draws the random numbers of (seed, c), whatever else is served."""
        prompts = [tuple(prompt) for prompt in asked.prompts]  # shared by completions: the engine reads each once
        requests, completions = list[EngineRequest](), dict[int, Completion]()
        for c, i in enumerate(self.dispatcher.next_ids(len(prompts) * asked.n)):
            prompt, params = prompts[c // asked.n], asked.params[c // asked.n]
            requests.append(
                EngineRequest(
                    id=i,
                    prompt=prompt,
                    params=params,
                    adapter=asked.adapter,
                    stream=asked.stream,
                    every=1 if len(prompts) * asked.n <= FEW else TOGETHER,
                    random_id=c,
                    keep=asked.chat,  # the next turn begins with this one
                )
            )
            before = () if asked.chat else prompt
            completions[i] = Completion(c, self.bytes_of, before=before, stops=params.stop)
        return requests, completions

    async def _whole(self, asked: CompletionRequest, client: str) -> AsyncGenerator[str, None]:
        """Answers are kept as arrays, and become text as the client reads them."""
        requests, completions = self._completions(asked)
        deltas = dict[int, Delta]()
        with self._counted():
            async with aclosing(self.dispatcher.submit(requests, client=client)) as told:
                async for news in told:
                    for item in news:
                        deltas[item.id] = completions[item.id].add(item)
                        await asyncio.sleep(0)
            written = reply.Reply(asked, list(completions.values()), self.tokens)
            slices = written.whole(deltas.pop(i) for i in completions)
            while part := await self.throttle.make(partial(_some, slices), short=is_short(requests)):
                yield part

    async def _stream(self, asked: CompletionRequest, client: str) -> AsyncGenerator[str, None]:
        """Nothing is said before the first news: a request that cannot be taken is refused with its own status."""
        requests, completions = self._completions(asked)
        written, opened = reply.Reply(asked, list(completions.values()), self.tokens), False
        with self._counted():
            async with aclosing(self.dispatcher.submit(requests, client=client)) as told:
                async for news in told:
                    if not opened:
                        opened = True
                        yield written.opening()
                    events = partial(written.events, (completions[item.id].add(item) for item in news))
                    yield await self.throttle.make(events, short=is_short(requests))
            yield written.closing()


def _some(slices: Iterator[str]) -> str:
    """The next slices, of together some kilobytes; "" at the end."""
    found, size = list[str](), 0
    for text in slices:
        found.append(text)
        size += len(text)
        if size >= PART:
            break
    return "".join(found)


def client_of(request: Request) -> str:
    """Whoever takes turns: another machine with all its connections, or one connection of this machine."""
    if request.client is None:
        return ""
    host, port = request.client
    return f"{host}:{port}" if is_address(host, loopback=True) or not is_address(host) else host


def make_app(service: Service) -> Starlette:
    """An ASGI application."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await error_response(request, error if isinstance(error, APIError) else _no_route(request, error))

    async def fail(request: Request, error: Exception) -> Response:
        return await error_response(request, service.failed(error))

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    chat, plain = POSTED
    app = Starlette(
        routes=[
            Route("/health", service.health),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route(chat, partial(service.generate, chat=True), methods=["POST"]),
            Route(plain, partial(service.generate, chat=False), methods=["POST"]),
        ],
        middleware=[Middleware(AccessMiddleware, service.access)],
        exception_handlers={HTTPException: refuse, ClientDisconnect: left, Exception: fail},
    )
    app.router.redirect_slashes = False
    return app


def _no_route(request: Request, error: HTTPException) -> APIError:
    path = request.scope["path"]
    if error.status_code == 405:
        method = "POST" if path in POSTED else "GET"
        return APIError(405, f"{path} takes {method} only", code="method_not_allowed", headers={"allow": method})
    return APIError(404, f"there is no such path: {', '.join(PATHS)}", code="not_found")
