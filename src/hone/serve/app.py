"""The routes. A request is let in, read, checked, sampled and answered; whatever fails is told in OpenAI's form."""

import asyncio
import ipaddress
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hone.engine.requests import News
from hone.engine.requests import Request as Sampled
from hone.serve import reply
from hone.serve.answer import Choice, Piece
from hone.serve.ask import Ask, Served, read_ask
from hone.serve.dispatcher import Dispatcher, is_short
from hone.serve.guard import Guard
from hone.serve.http import SMALL_BODY, Bodies, Slow, Streamed, Writer, refused
from hone.serve.refusal import Refusal, json_text
from hone.serve.text import TokenBytes

LONG_READS = 2  # bodies above SMALL_BODY that are read into prompts at once, beside any number of small ones
SOME = 2**15  # characters of an answer that are made in one go
SMALL_ANSWER = 2**16  # characters: longer ones have no announced length, and are never whole in memory
FEW, TOGETHER = 4, 8  # streams of more choices than a few have so many tokens of a choice in an event
POSTED = ("/v1/chat/completions", "/v1/completions")
PATHS = ("/health", "/v1/models", "/v1/models/NAME", *POSTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client can cost the others."""

    concurrency: int = 64  # requests being answered at once
    head: int = 2**14  # bytes of a request's line and headers
    body: int = 2**20  # bytes
    seconds: float = 600.0  # of one request


class Gate:
    """Before anything else of a request is looked at: the size of its head, and whether it may be asked."""

    def __init__(self, app: ASGIApp, guard: Guard, limits: Limits) -> None:
        self.app, self.guard, self.limits = app, guard, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
        try:
            if head > self.limits.head:
                text = f"the head is longer than {self.limits.head} bytes: send less"
                raise Refusal(431, text, code="head_too_large")
            self.guard.check(scope["path"], scope["headers"])
        except Refusal as why:
            response = await refused(Request(scope, receive), why)
            return await response(scope, receive, send)
        await self.app(scope, receive, send)


class Turns:
    """The time in which long answers become text. While short ones are waited for, it is a part of the event loop's.

    Log-probs of 40 streams would otherwise fill all of it.
    """

    PART = 1 / 4

    def __init__(self, hurry: Callable[[], bool]) -> None:
        self.hurry, self.lock = hurry, asyncio.Lock()

    async def make(self, text: Callable[[], str], *, short: bool) -> str:
        """The text, when it is its turn."""
        if short or not self.hurry():
            return text()
        async with self.lock:
            begin = time.monotonic()
            made = text()
            await asyncio.sleep((time.monotonic() - begin) * (1 / self.PART - 1))
        return made


class Service:
    """What the routes have in common."""

    def __init__(
        self, served: Served, dispatcher: Dispatcher, guard: Guard, *, limits: Limits, note: Callable[[str], None]
    ) -> None:
        self.served, self.dispatcher, self.guard, self.limits, self.note = served, dispatcher, guard, limits, note
        self.bytes_of = TokenBytes(served.tokenizer)
        self.tokens = reply.TokenJson(self.bytes_of)
        self.bodies, self.long_reads = Bodies(limits.body), asyncio.Semaphore(LONG_READS)
        self.turns = Turns(lambda: dispatcher.hurry)
        self.active = 0

    async def health(self, request: Request) -> Response:
        """Whether it works, to anybody; how busy it is, to those with the token."""
        if self.dispatcher.failed is not None:
            raise Refusal(503, self.dispatcher.failed, code="engine_failed")
        busy = asdict(self.dispatcher.counts) if self.guard.knows_token(request.headers.raw) else {}
        return JSONResponse({"status": "ok", **busy})

    async def models(self, request: Request) -> Response:
        return JSONResponse(reply.models(self.served))

    async def model(self, request: Request) -> Response:
        return JSONResponse(reply.model(self.served, request.path_params["name"]))

    async def generate(self, request: Request, *, chat: bool) -> Response:
        """Clients whose bodies come slowly have no place yet, so that they keep nobody out."""
        self._check_room()
        raw = await self.bodies.read(request)
        if len(raw) <= SMALL_BODY:
            ask = await asyncio.to_thread(read_ask, raw, self.served, chat=chat)
        else:
            async with self.long_reads:
                ask = await asyncio.to_thread(read_ask, raw, self.served, chat=chat)
        self._check_room()
        work = partial(self._answer, ask, client_of(request))
        return Streamed(work, crowded=lambda: self.dispatcher.live > 1)

    def _check_room(self) -> None:
        if self.active >= self.limits.concurrency:
            text = f"{self.active} requests are being answered already: ask again later"
            raise Refusal(429, text, code="rate_limit_exceeded", headers={"retry-after": "1"})

    async def _answer(self, ask: Ask, client: str, writer: Writer) -> None:
        self.active += 1
        try:
            async with asyncio.timeout(self.limits.seconds):
                await (self._stream if ask.stream else self._whole)(ask, client, writer)
        except TimeoutError:
            text = f"the request took longer than {self.limits.seconds:g} seconds: ask for fewer tokens"
            await self._break_off(Refusal(504, text, code="timeout"), ask, writer)
        except Refusal as why:
            await self._break_off(why, ask, writer)
        except Slow:
            raise
        except Exception as error:
            await self._break_off(self.broke(error), ask, writer)
        finally:
            self.active -= 1

    def broke(self, error: Exception) -> Refusal:
        """A bug: the operator is told what, the client only that."""
        self.note(f"a request failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return Refusal(500, "the server failed on this request", code="internal_error")

    async def _break_off(self, why: Refusal, ask: Ask, writer: Writer) -> None:
        """With its own status where nothing was sent; as an event in a stream; any other answer just ends too soon."""
        if not writer.started:
            raise why
        if ask.stream:
            await writer.end(_event(json_text(why.body())))

    def _requests(self, ask: Ask) -> tuple[list[Sampled], dict[int, Choice]]:
        """Choice c draws the random numbers of (seed, c), whatever else is served."""
        prompts = [tuple(prompt) for prompt in ask.prompts]  # shared by the choices: the engine reads each once
        requests, choices = list[Sampled](), dict[int, Choice]()
        for c, i in enumerate(self.dispatcher.next_ids(len(prompts) * ask.n)):
            prompt, params = prompts[c // ask.n], ask.params[c // ask.n]
            requests.append(
                Sampled(
                    id=i,
                    prompt=prompt,
                    params=params,
                    adapter=ask.adapter,
                    stream=ask.stream,
                    every=1 if len(prompts) * ask.n <= FEW else TOGETHER,
                    noise=c,
                    keep=ask.chat,  # the next turn begins with this one
                )
            )
            before = () if ask.chat else prompt
            choices[i] = Choice(c, self.bytes_of, before=before, stops=params.stop)
        return requests, choices

    async def _whole(self, ask: Ask, client: str, writer: Writer) -> None:
        """Answers are kept as arrays, and become text as the client reads them."""
        requests, choices = self._requests(ask)
        pieces = dict[int, Piece]()
        async with aclosing(self.dispatcher.ask(requests, client=client)) as told:
            async for news in told:
                for item in news:
                    pieces[item.id] = choices[item.id].add(item)
                    await asyncio.sleep(0)
        in_order = (pieces.pop(i) for i in choices)
        slices = reply.Form(ask, self.tokens).whole(in_order, list(choices.values()))
        await self._send_whole(slices, writer, short=is_short(requests))

    async def _stream(self, ask: Ask, client: str, writer: Writer) -> None:
        requests, choices = self._requests(ask)
        form, short = reply.Form(ask, self.tokens), is_short(requests)
        async with aclosing(self.dispatcher.ask(requests, client=client)) as told:
            async for news in told:
                if not writer.started:  # a request that cannot be taken is refused with its own status
                    await writer.begin("text/event-stream; charset=utf-8")
                    await writer.write("".join(_event(form.opening(c.index)) for c in choices.values() if ask.chat))
                events = partial(_events, form, choices, news)
                await writer.write(await self.turns.make(events, short=short))
        last = [_event(form.closing(list(choices.values())))] if ask.usage else []
        await writer.end("".join([*last, _event("[DONE]")]))

    async def _send_whole(self, slices: Iterator[str], writer: Writer, *, short: bool) -> None:
        """With its length where it is short, in chunks where it is not."""
        begun, size = list[str](), 0
        while size <= SMALL_ANSWER and (text := await self.turns.make(partial(_some, slices), short=short)):
            begun.append(text)
            size += len(text)
        if size <= SMALL_ANSWER:
            await writer.begin("application/json", size)
            return await writer.end("".join(begun))
        await writer.begin("application/json")
        await writer.write("".join(begun))
        while text := await self.turns.make(partial(_some, slices), short=short):
            await writer.write(text)
        await writer.end()


def _events(form: reply.Form, choices: dict[int, Choice], news: list[News]) -> str:
    pieces = [choices[item.id].add(item) for item in news]
    return "".join(_event(form.part(piece)) for piece in pieces if form.tells(piece))


def _event(text: str) -> str:
    return f"data: {text}\n\n"


def _some(slices: Iterator[str]) -> str:
    """The next slices, of together some kilobytes; "" at the end."""
    found, size = list[str](), 0
    for text in slices:
        found.append(text)
        size += len(text)
        if size >= SOME:
            break
    return "".join(found)


def client_of(request: Request) -> str:
    """Whoever takes turns: another machine with all its connections, or one connection of this machine."""
    if request.client is None:
        return ""
    host, port = request.client
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = True
    return f"{host}:{port}" if local else host


def make_app(service: Service) -> Starlette:
    """An ASGI application."""

    async def refuse(request: Request, why: Exception) -> Response:
        assert isinstance(why, Refusal)
        return await refused(request, why)

    async def no_route(request: Request, why: Exception) -> Response:
        assert isinstance(why, HTTPException)
        path = request.scope["path"]
        method = "POST" if path in POSTED else "GET"
        if why.status_code == 405:
            text = f"{path} takes {method} only"
            return await refused(request, Refusal(405, text, code="method_not_allowed", headers={"allow": method}))
        return await refused(request, Refusal(404, f"there is no such path: {', '.join(PATHS)}", code="not_found"))

    async def broke(request: Request, error: Exception) -> Response:
        return await refused(request, service.broke(error))

    async def left(request: Request, why: Exception) -> Response:
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
        middleware=[Middleware(Gate, service.guard, service.limits)],
        exception_handlers={Refusal: refuse, HTTPException: no_route, ClientDisconnect: left, Exception: broke},
    )
    app.router.redirect_slashes = False
    return app
