"""The engine in a thread of its own, and the fair share of its rows that each client gets.

Every client has a queue of completions that wait for a row of the engine. Rows are given by self-clocked fair queueing
(Golestani 1994). A completion's finish time is that of the client's last completion plus the tokens that it may write.
The earliest finish time goes first. So a client with a hundred long completions and one with a short completion do not
wait for each other.

A completion keeps its row until it ends, so some rows are reserved for short requests. While short requests come, long
ones get more rows only if the engine's steps do not become much slower (`Pace`).
A client that does not read its answers gets no more rows (`Exchange.backlogged`). The event loop never waits for the
engine.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from hone.engine.engine import Counts, Engine
from hone.engine.requests import Request, RequestOutput
from hone.errors import HoneError
from hone.serve.http import APIError, invalid_request

MOST_UNREAD = 8192  # tokens and alternatives that a client has not read; above it the client gets no more rows
TAKEN_AT_ONCE = 512  # tokens and alternatives that are sent at once
SHORT = 1024  # a request that can write no more tokens and alternatives in all is short
RESERVED = 8  # one row in so many is only for short requests


class Pace:
    """How long the engine's steps take, and whether another long completion would slow down the short ones.

    If a step takes as long with one row as with all, as on a GPU, it always allows more.
    """

    SLOWER = 1.15  # a step may take so many times as long as with few rows
    SECONDS = 5.0  # for which a short completion is remembered
    SHARE = 0.05  # by which a new step moves a median
    STEPS = 8  # between two rows for long completions, to see what the last one cost

    def __init__(self, few: int) -> None:
        self.few = few
        self.alone = self.now = 0.0  # median seconds of a step with few rows, and of the latest ones
        self.short = -math.inf  # when the last short completion was given a row
        self.since = 0  # steps since the last long one was

    def record_step(self, rows: int, seconds: float) -> None:
        """Note how long a step of so many rows took."""
        self.since += 1
        self.now = self._median(self.now, seconds)
        if rows <= self.few:
            self.alone = self._median(self.alone, seconds)

    def _median(self, before: float, seconds: float) -> float:
        """A running median. A mean would follow the few steps in which other programs had the processor."""
        return before * (1 + self.SHARE if seconds > before else 1 - self.SHARE) if before else seconds

    def allows(self, rows: int) -> bool:
        """Whether one more long completion may begin beside these."""
        if time.monotonic() - self.short > self.SECONDS or rows < self.few or not self.alone:
            return True
        return self.since >= self.STEPS and self.now < self.SLOWER * self.alone

    def row_given(self, *, short: bool) -> None:
        """Note that a completion got a row."""
        if short:
            self.short = time.monotonic()
        else:
            self.since = 0


@dataclass(slots=True, eq=False)
class _Client:
    """Who takes turns for rows: a connection, or another machine with all its connections."""

    finish: float = 0.0  # of the last completion that was given a row
    next: float = 0.0  # finish time of the one that waits
    rows: int = 0
    waiting: deque["Exchange"] = field(default_factory=deque["Exchange"])  # exchanges with completions without a row


class Exchange:
    """The completions of one HTTP request, and the outputs that were not sent yet."""

    def __init__(self, requests: Sequence[Request], client: str, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.loop = client, loop
        self.pending = deque(requests)  # without a row; only the engine's thread uses this
        self.running = set[int]()  # with a row; likewise
        self.short = is_short(requests)
        self.unfinished = len(requests)  # requests; only the event loop uses this and what follows
        self.outputs = deque[RequestOutput]()
        self.failure: APIError | None = None
        self.unread = 0  # tokens and alternatives in `outputs`
        self.ready = asyncio.Event()

    @property
    def backlogged(self) -> bool:
        """Whether its client has not read enough to get more rows."""
        return self.unread > MOST_UNREAD

    def put(self, item: RequestOutput) -> None:
        self.outputs.append(item)
        self.unread += _size(item)
        self.ready.set()

    def fail(self, error: APIError) -> None:
        self.failure = self.failure or error
        self.ready.set()

    async def take(self) -> list[RequestOutput]:
        """Outputs, but no more at once than other clients can wait for."""
        if not self.outputs:
            self.ready.clear()
            if self.failure is None:
                await self.ready.wait()
        found, size = list[RequestOutput](), 0
        while self.outputs and size < TAKEN_AT_ONCE:
            found.append(self.outputs.popleft())
            size += _size(found[-1])
        self.unread -= size
        if not found and self.failure is not None:
            raise self.failure
        self.unfinished -= sum(item.stop is not None for item in found)
        return found


def is_short(requests: Sequence[Request]) -> bool:
    """Whether they can write only little in all."""
    return sum(request.params.max_tokens * (1 + request.params.top_logprobs) for request in requests) <= SHORT


def _size(item: RequestOutput) -> int:
    return len(item.tokens) + item.top.token.size


class Dispatcher:
    """Stands between any number of clients and one engine."""

    def __init__(self, engine: Engine, *, note: Callable[[str], None]) -> None:
        self.engine, self.note = engine, note
        self.failed: str | None = None  # why the last launch gave nothing
        self.counts = engine.counts  # as they were after the last step, for any thread to read
        self.live = self.short = 0  # exchanges, and short ones among them; only the event loop uses them
        self.last_short = -math.inf  # when the last of those began or ended
        self._commands = queue.SimpleQueue[Callable[[], None] | None]()  # for the engine's thread; None ends it
        self._mail = deque[
            Sequence[tuple[Exchange, RequestOutput | APIError]]
        ]()  # from the engine's thread to the event loop
        self._woken = False  # whether the event loop will read the mail
        self._owners: dict[int, Exchange] = {}  # by request; only the engine's thread uses this and what follows
        self._clients: dict[str, _Client] = {}  # those that wait or have a row
        self._now = 0.0  # finish time of the last completion that was given a row
        self._rows = engine.schedule.max_rows
        self._pace = Pace(few=max(1, self._rows // (2 * RESERVED)))
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = 5.0) -> bool:
        """End every request, and the thread after its current launch. False: it did not end in time."""
        self.stop_all(APIError(503, "the server is shutting down", code="shutting_down"))
        self._commands.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop_all(self, error: APIError) -> None:
        """End every request."""
        self._commands.put(lambda: self._fail(error))

    def next_ids(self, count: int) -> list[int]:
        """Ids that nobody else has."""
        return [next(self._ids) for _ in range(count)]

    async def submit(
        self, requests: Sequence[Request], *, client: str = ""
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """The outputs of these requests until each has ended. If the reader stops before, the others are cancelled."""
        exchange = Exchange(requests, client, asyncio.get_running_loop())
        self._count(exchange, 1)
        self._commands.put(lambda: self._add_exchange(exchange))
        try:
            while exchange.unfinished:
                was_backlogged = exchange.backlogged
                outputs = await exchange.take()
                if was_backlogged and not exchange.backlogged:
                    self._commands.put(lambda: None)  # wake the engine's thread: the client may get rows again
                yield outputs
        finally:
            self._count(exchange, -1)
            if exchange.unfinished:
                self._commands.put(lambda: self._cancel(exchange))

    def _count(self, exchange: Exchange, change: int) -> None:
        self.live += change
        if exchange.short:
            self.short += change
            self.last_short = time.monotonic()

    @property
    def short_waiting(self) -> bool:
        """Whether somebody waits for a short answer, or did a moment ago."""
        return self.short > 0 or time.monotonic() - self.last_short < Pace.SECONDS

    # --- in the engine's thread ---

    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._read_commands()
                self._give_rows()
                if self.engine.busy:
                    self._step()
            except Exception as error:  # of any kind: the thread must go on, and every client must get an answer
                self._fail_all_after(error)
            self.counts = self._current_counts()

    def _step(self) -> None:
        rows, begin = len(self._owners), time.monotonic()
        outputs = self.engine.step()
        self._pace.record_step(rows, time.monotonic() - begin)
        self._send_outputs(outputs)
        self.failed = None

    def _num_waiting(self) -> int:
        """How many completions wait for a row outside the engine."""
        return sum(len(exchange.pending) for client in self._clients.values() for exchange in client.waiting)

    def _current_counts(self) -> Counts:
        counts = self.engine.counts
        return replace(counts, waiting=counts.waiting + self._num_waiting())

    def _read_commands(self) -> bool:
        """Carry out commands. If there is nothing else to do, wait for one. False: the dispatcher is closed."""
        try:
            busy = self.engine.busy or self._next(self._rows) is not None
            command = self._commands.get_nowait() if busy else self._commands.get()
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _fail_all_after(self, error: Exception) -> None:
        """End every request after a failure. The engine is empty then and can be used again."""
        reason = " ".join(str(error).split()) or type(error).__name__
        self.failed = reason if isinstance(error, HoneError) else "the engine failed: ask the operator"
        ended = len(self._owners) + self._num_waiting()
        self.note(f"the engine failed, {ended} requests ended: {type(error).__name__}: {reason}")
        self._fail(APIError(503, self.failed, code="engine_failed"))

    def _add_exchange(self, exchange: Exchange) -> None:
        client = self._clients.setdefault(exchange.client, _Client(finish=self._now))
        client.waiting.append(exchange)
        if len(client.waiting) == 1:
            self._set_finish_time(client)

    def _set_finish_time(self, client: _Client) -> None:
        """Set the finish time of the client's next completion. Having been idle gives a client no advantage."""
        if client.waiting:
            client.next = max(self._now, client.finish) + _limit(client.waiting[0])

    def _give_rows(self) -> None:
        """Give free rows to completions, the earliest finish time first. Those of an exchange go together."""
        given, free = dict[Exchange, list[Request]](), self._rows - len(self._owners)
        while free > 0 and (client := self._next(free)) is not None:
            exchange = client.waiting[0]
            request = exchange.pending.popleft()
            given.setdefault(exchange, []).append(request)
            exchange.running.add(request.id)
            self._pace.row_given(short=exchange.short)
            self._owners[request.id] = exchange
            client.finish = self._now = max(self._now, client.next)
            client.rows += 1
            client.waiting.rotate(-1)
            if not exchange.pending:
                client.waiting.remove(exchange)
            self._set_finish_time(client)
            free -= 1
        for exchange, requests in given.items():
            self._submit(exchange, requests)

    def _next(self, free: int) -> _Client | None:
        """The client that gets the next free row. Only short completions get the reserved rows."""
        ready = list[_Client]()
        for client in self._clients.values():
            while any(not e.backlogged for e in client.waiting) and client.waiting[0].backlogged:
                client.waiting.rotate(-1)
            if client.waiting and not client.waiting[0].backlogged:
                ready.append(client)
        short = [client for client in ready if client.waiting[0].short]
        anybody = free > self._rows // RESERVED and self._pace.allows(self._rows - free)
        return min(ready if anybody else short, key=lambda client: client.next, default=None)

    def _submit(self, exchange: Exchange, requests: Sequence[Request]) -> None:
        try:
            self.engine.submit(requests)
        except HoneError as error:
            self._cancel(exchange)
            self._post([(exchange, invalid_request(str(error)))])

    def _cancel(self, exchange: Exchange) -> None:
        """Cancel the exchange."""
        client, ids = self._clients.get(exchange.client), list(exchange.running)
        if client is not None and exchange in client.waiting:
            client.waiting.remove(exchange)
            self._set_finish_time(client)
        for number in ids:
            self._free_row(number)
        self.engine.cancel(ids)
        exchange.pending.clear()
        self._forget(exchange.client)

    def _free_row(self, number: int) -> None:
        """Its row is free."""
        exchange = self._owners.pop(number, None)
        if exchange is not None:
            exchange.running.discard(number)
            self._clients[exchange.client].rows -= 1
            self._forget(exchange.client)

    def _forget(self, name: str) -> None:
        client = self._clients.get(name)
        if client is not None and not client.waiting and not client.rows:
            del self._clients[name]

    def _send_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        self._post([(self._owners[item.id], item) for item in outputs if item.id in self._owners])
        for item in outputs:
            if item.stop is not None:
                self._free_row(item.id)

    def _post(self, items: Sequence[tuple[Exchange, RequestOutput | APIError]]) -> None:
        """Hand items to the event loop. It is woken once for all the mail that it has not read."""
        if items:
            self._mail.append(items)
            if not self._woken and not items[0][0].loop.is_closed():
                self._woken = True
                items[0][0].loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self._mail:
            for exchange, item in self._mail.popleft():
                if isinstance(item, APIError):
                    exchange.fail(item)
                else:
                    exchange.put(item)

    def _fail(self, error: APIError) -> None:
        waiting = [exchange for client in self._clients.values() for exchange in client.waiting]
        everybody = {*self._owners.values(), *waiting}
        self.engine.cancel(self._owners)
        self._owners, self._clients = {}, {}
        for exchange in everybody:
            exchange.pending.clear()
            exchange.running.clear()
        self._post([(exchange, error) for exchange in everybody])


def _limit(exchange: Exchange) -> int:
    return exchange.pending[0].params.max_tokens
