"""The routes. A request is let in, read, checked, sampled and answered; whatever fails is told in OpenAI's form."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from hone.rollout.request import News, Request
from hone.serve import reply
from hone.serve.answer import Choice, Piece, joined
from hone.serve.ask import Ask, Served, read_ask
from hone.serve.desk import Desk
from hone.serve.guard import Guard
from hone.serve.http import Gone, Incoming, Receive, Reply, Scope, Send
from hone.serve.refusal import Refusal
from hone.serve.text import TokenBytes

MODEL = "/v1/models/"  # and a name, strokes in it as they are
ROUTES = {
    "/health": "GET",
    "/v1/models": "GET",
    f"{MODEL}NAME": "GET",
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client can cost the others."""

    concurrency: int = 64  # requests being answered at once
    head: int = 2**14  # bytes of a request's line and headers
    body: int = 2**20  # bytes
    seconds: float = 600.0  # of one request


class App:
    """An ASGI application."""

    def __init__(
        self, served: Served, desk: Desk, guard: Guard, *, limits: Limits, note: Callable[[str], None]
    ) -> None:
        self.served, self.desk, self.guard, self.limits, self.note = served, desk, guard, limits, note
        self.bytes_of = TokenBytes(served.tokenizer)
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming, answer = Incoming(scope, receive), Reply(send)
        try:
            await self._answer(scope, incoming, answer)
        except Gone:
            return
        except Refusal as why:
            await _refuse(why, incoming, answer)
        except Exception as error:  # a bug: the operator is told what, the client only that
            self.note(f"a request failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            await _refuse(Refusal(500, "the server failed on this request", code="internal_error"), incoming, answer)

    async def _answer(self, scope: Scope, incoming: Incoming, answer: Reply) -> None:
        path, method = scope["path"], scope["method"]
        head = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
        if head > self.limits.head:
            raise Refusal(431, f"the head is longer than {self.limits.head} bytes: send less", code="head_too_large")
        self.guard.check(path, scope["headers"])
        route = f"{MODEL}NAME" if path.startswith(MODEL) and path != MODEL else path
        if route not in ROUTES:
            raise Refusal(404, f"there is no such path: {', '.join(ROUTES)}", code="not_found")
        if method not in (ROUTES[route], "HEAD" if ROUTES[route] == "GET" else ""):
            allow = {"allow": ROUTES[route]}
            raise Refusal(405, f"{route} takes {ROUTES[route]} only", code="method_not_allowed", headers=allow)
        if route == "/health":
            await self._health(incoming, answer)
        elif route == "/v1/models":
            await answer.json(reply.models(self.served))
        elif path.startswith(MODEL):
            await answer.json(reply.model(self.served, path.removeprefix(MODEL)))
        else:
            await self._generate(incoming, answer, chat=route == "/v1/chat/completions")

    async def _health(self, incoming: Incoming, answer: Reply) -> None:
        """Whether it works, to anybody; how busy it is, to those with the token."""
        if self.desk.failed is not None:
            raise Refusal(503, self.desk.failed, code="engine_failed")
        busy = asdict(self.desk.counts) if self.guard.knows_token(incoming.headers) else {}
        await answer.json({"status": "ok", **busy})

    async def _generate(self, incoming: Incoming, answer: Reply, *, chat: bool) -> None:
        if self.active >= self.limits.concurrency:
            wait = {"retry-after": "1"}
            text = f"{self.active} requests are being answered already: ask again later"
            raise Refusal(429, text, code="rate_limit_exceeded", headers=wait)
        self.active += 1
        try:
            async with asyncio.timeout(self.limits.seconds):
                raw = await incoming.body(limit=self.limits.body)
                ask = await asyncio.to_thread(read_ask, raw, self.served, chat=chat)
                await _unless_gone(incoming, self._stream(ask, answer) if ask.stream else self._whole(ask, answer))
        except TimeoutError:
            text = f"the request took longer than {self.limits.seconds:g} seconds: ask for fewer tokens"
            raise Refusal(504, text, code="timeout") from None
        finally:
            self.active -= 1

    def _requests(self, ask: Ask) -> tuple[list[Request], dict[int, Choice]]:
        """Choice c draws the random numbers of (seed, c), whatever else is served."""
        prompts = [tuple(prompt) for prompt in ask.prompts]  # shared by the choices: the engine reads each once
        requests, choices = list[Request](), dict[int, Choice]()
        for c, i in enumerate(self.desk.next_ids(len(prompts) * ask.n)):
            prompt, params = prompts[c // ask.n], ask.params[c // ask.n]
            one = Request(id=i, prompt=prompt, params=params, adapter=ask.adapter, stream=ask.stream, noise=c)
            requests.append(replace(one, keep=ask.chat))  # the next turn begins with this one
            before = () if ask.chat else prompt
            choices[i] = Choice(c, self.served.tokenizer, before=before, stops=params.stop)
        return requests, choices

    async def _whole(self, ask: Ask, answer: Reply) -> None:
        requests, choices = self._requests(ask)
        async with aclosing(self.desk.ask(requests)) as news:
            told = [item async for item in news]
        form = await asyncio.to_thread(self._form, ask, told, choices)
        await answer.json(form)

    def _form(self, ask: Ask, told: list[News], choices: dict[int, Choice]) -> reply.Json:
        pieces: dict[int, list[Piece]] = {i: [] for i in choices}
        for item in told:
            pieces[item.id].append(choices[item.id].add(item))
        return reply.Form(ask, self.bytes_of).whole([joined(pieces[i]) for i in choices], list(choices.values()))

    async def _stream(self, ask: Ask, answer: Reply) -> None:
        requests, choices = self._requests(ask)
        form = reply.Form(ask, self.bytes_of)
        async with aclosing(self.desk.ask(requests)) as news:
            async for item in news:
                if not answer.started:  # a request that cannot be taken is refused with its own status
                    await answer.begin()
                    for choice in choices.values() if ask.chat else ():
                        await answer.event(form.opening(choice.index))
                piece = choices[item.id].add(item)
                if piece.text or piece.finish or (piece.entries and ask.logprobs is not None):
                    await answer.event(form.part(piece))
        if ask.usage:
            await answer.event(form.closing(list(choices.values())))
        await answer.end(b"data: [DONE]\n\n")


async def _refuse(why: Refusal, incoming: Incoming, answer: Reply) -> None:
    try:
        await incoming.drain()
    except Gone:
        return
    await answer.refuse(why, close=not incoming.ended)


async def _unless_gone(incoming: Incoming, work: Coroutine[Any, Any, None]) -> None:
    """Do it while the client waits; a client that leaves ends it."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(incoming.until_gone())
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Gone
        await doing
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)
