"""The routes: a request is read, checked, sampled and answered. Every error has OpenAI's form."""

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

LONG_READS = 2  # bodies above SMALL_BODY that are tokenised at once, beside any number of small ones
PART = 2**15  # characters of an answer that are made at once; a longer answer is never whole in memory
FEW, TOGETHER = 4, 8  # a stream of more than FEW completions sends TOGETHER tokens of each in an event
POSTED = ("/v1/chat/completions", "/v1/completions")
PATHS = ("/health", "/v1/models", "/v1/models/NAME", *POSTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client can cost the others."""

    concurrency: int = 64  # requests being answered at once
    seconds: float = 600.0  # of one request


class Throttle:
    """Bounds the event loop's time for long answers while clients wait for short ones.

    Otherwise the log-probs of 40 streams would fill all of it.
    """

    SHARE = 1 / 4

    def __init__(self, short_waiting: Callable[[], bool]) -> None:
        self.short_waiting, self.lock = short_waiting, asyncio.Lock()

    async def make(self, text: Callable[[], str], *, short: bool) -> str:
        """The text. For a long answer it may have to wait."""
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
        """Whether the server works. With the token, also how busy it is."""
        if self.dispatcher.failed is not None:
            raise APIError(503, self.dispatcher.failed, code="engine_failed")
        busy = asdict(self.dispatcher.counts) if self.access.has_token(request.headers) else {}
        return JSONResponse({"status": "ok", **busy})

    async def models(self, request: Request) -> Response:
        return JSONResponse(reply.models(self.served))

    async def model(self, request: Request) -> Response:
        return JSONResponse(reply.model(self.served, request.path_params["name"]))

    async def generate(self, request: Request, *, chat: bool) -> Response:
        """A request counts once its body has come: clients that send slowly keep nobody out."""
        self._check_concurrency()
        raw = await self.bodies.read(request)
        async with self.long_reads if len(raw) > SMALL_BODY else nullcontext():
            wanted = await asyncio.to_thread(read_request, raw, self.served, chat=chat)
        self._check_concurrency()
        parts = (self._stream if wanted.stream else self._full_answer)(wanted, client_of(request))
        return Answer(
            parts,
            events=wanted.stream,
            seconds=self.limits.seconds,
            others_served=lambda: self.dispatcher.live > 1,
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
        """The error after a bug. The operator reads what it was, the client only that there was one."""
        self.note(f"a request failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return APIError(500, "the server failed on this request", code="internal_error")

    def _completions(self, wanted: CompletionRequest) -> tuple[list[EngineRequest], dict[int, Completion]]:
        """Completion c draws the random numbers of (seed, c), whatever else is served."""
        # one object for its completions: the engine reads it once
        prompts = [tuple(prompt) for prompt in wanted.prompts]
        requests, completions = list[EngineRequest](), dict[int, Completion]()
        for c, i in enumerate(self.dispatcher.next_ids(len(prompts) * wanted.n)):
            prompt, params = prompts[c // wanted.n], wanted.params[c // wanted.n]
            requests.append(
                EngineRequest(
                    id=i,
                    prompt=prompt,
                    params=params,
                    adapter=wanted.adapter,
                    stream=wanted.stream,
                    every=1 if len(prompts) * wanted.n <= FEW else TOGETHER,
                    random_id=c,
                    keep=wanted.chat,  # the next turn begins with this one
                )
            )
            before = () if wanted.chat else prompt
            completions[i] = Completion(c, self.bytes_of, before=before, stops=params.stop)
        return requests, completions

    async def _full_answer(self, wanted: CompletionRequest, client: str) -> AsyncGenerator[str, None]:
        """Keep the completions as arrays, and make text of them while the client reads."""
        requests, completions = self._completions(wanted)
        deltas = dict[int, Delta]()
        with self._counted():
            async with aclosing(self.dispatcher.submit(requests, client=client)) as outputs:
                async for ready in outputs:
                    for output in ready:
                        deltas[output.id] = completions[output.id].add(output)
                        await asyncio.sleep(0)
            written = reply.Reply(wanted, list(completions.values()), self.tokens)
            slices = written.full_answer(deltas.pop(i) for i in completions)
            while part := await self.throttle.make(partial(_next_part, slices), short=is_short(requests)):
                yield part

    async def _stream(self, wanted: CompletionRequest, client: str) -> AsyncGenerator[str, None]:
        """Send nothing before the first output: a request that cannot be taken is then refused with its own status."""
        requests, completions = self._completions(wanted)
        written, opened = reply.Reply(wanted, list(completions.values()), self.tokens), False
        with self._counted():
            async with aclosing(self.dispatcher.submit(requests, client=client)) as outputs:
                async for ready in outputs:
                    if not opened:
                        opened = True
                        yield written.opening()
                    events = partial(written.events, (completions[output.id].add(output) for output in ready))
                    yield await self.throttle.make(events, short=is_short(requests))
            yield written.closing()


def _next_part(slices: Iterator[str]) -> str:
    """The next slices, some kilobytes together; "" at the end."""
    found, size = list[str](), 0
    for text in slices:
        found.append(text)
        size += len(text)
        if size >= PART:
            break
    return "".join(found)


def client_of(request: Request) -> str:
    """The name of the client for fair turns: another machine with all its connections, or a connection of this one."""
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

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has gone

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
        exception_handlers={HTTPException: refuse, ClientDisconnect: disconnected, Exception: fail},
    )
    app.router.redirect_slashes = False
    return app


def _no_route(request: Request, error: HTTPException) -> APIError:
    path = request.scope["path"]
    if error.status_code == 405:
        method = "POST" if path in POSTED else "GET"
        return APIError(405, f"{path} takes {method} only", code="method_not_allowed", headers={"allow": method})
    return APIError(404, f"there is no such path: {', '.join(PATHS)}", code="not_found")
