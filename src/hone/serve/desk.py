"""The engine in a thread of its own. Requests go in and news come out through queues: the event loop never waits."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hone.errors import HoneError
from hone.rollout.engine import Engine
from hone.rollout.request import News, Request
from hone.serve.refusal import Refusal, bad


@dataclass(frozen=True, slots=True)
class Mail:
    """What comes back to one client; only the event loop touches it."""

    loop: asyncio.AbstractEventLoop
    box: asyncio.Queue[News | Refusal] = field(default_factory=asyncio.Queue[News | Refusal])


Letter = Callable[[], None]  # done in the engine's thread


class Desk:
    """Between any number of clients and one engine."""

    def __init__(self, engine: Engine, *, note: Callable[[str], None]) -> None:
        self.engine, self.note = engine, note
        self.failed: str | None = None  # why the last launch gave nothing
        self.counts = engine.counts  # as they were after the last launch or letters, for any thread to read
        self._inbox = queue.SimpleQueue[Letter | None]()
        self._owners: dict[int, Mail] = {}  # by request; only the engine's thread touches it
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = 5.0) -> bool:
        """Every client is told, and the thread ends after the launch it is in; False: it did not within the time."""
        self.stop_all(Refusal(503, "the server is shutting down", code="shutting_down"))
        self._inbox.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop_all(self, why: Refusal) -> None:
        """End every request."""
        self._inbox.put(lambda: self._fail(why))

    def next_ids(self, count: int) -> list[int]:
        """Ids that nobody else has."""
        return [next(self._ids) for _ in range(count)]

    async def ask(self, requests: Sequence[Request]) -> AsyncGenerator[News, None]:
        """The news of these requests until each has ended; what is left when the reader goes is cancelled."""
        mail, left = Mail(asyncio.get_running_loop()), {request.id for request in requests}
        self._inbox.put(lambda: self._submit(requests, mail))
        try:
            while left:
                item = await mail.box.get()
                if isinstance(item, Refusal):
                    raise item
                if item.stop is not None:
                    left.discard(item.id)
                yield item
        finally:
            if left:
                self._inbox.put(lambda: self._cancel(left))

    # --- in the engine's thread ---

    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._read_letters()
                if self.engine.busy:
                    self._hand_out(self.engine.step())
                    self.failed = None
            except Exception as error:  # of any kind: the thread must go on, and everybody be told
                self._broke(error)
            self.counts = self.engine.counts

    def _read_letters(self) -> bool:
        """Do what was asked for; wait for it where there is nothing else to do. False: the desk is closed."""
        try:
            letter = self._inbox.get_nowait() if self.engine.busy else self._inbox.get()
            while letter is not None:
                letter()
                letter = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _broke(self, error: Exception) -> None:
        """Every request ends; the engine is empty and can be used again."""
        reason = " ".join(str(error).split()) or type(error).__name__
        self.failed = reason if isinstance(error, HoneError) else "the engine failed: ask the operator"
        self.note(f"the engine failed, {len(self._owners)} requests ended: {type(error).__name__}: {reason}")
        self._fail(Refusal(503, self.failed, code="engine_failed"))

    def _submit(self, requests: Sequence[Request], mail: Mail) -> None:
        mine = {request.id: mail for request in requests}
        self._owners |= mine
        try:
            self.engine.submit(requests)
        except HoneError as error:
            for number in mine:
                del self._owners[number]
            _post([(mail, bad(str(error)))])

    def _cancel(self, ids: Iterable[int]) -> None:
        ids = [number for number in ids if self._owners.pop(number, None) is not None]
        self.engine.cancel(ids)

    def _hand_out(self, news: Sequence[News]) -> None:
        _post([(self._owners[item.id], item) for item in news if item.id in self._owners])
        for item in news:
            if item.stop is not None:
                self._owners.pop(item.id, None)

    def _fail(self, why: Refusal) -> None:
        owners, self._owners = self._owners, {}
        _post([(mail, why) for mail in {id(mail): mail for mail in owners.values()}.values()])
        self.engine.cancel(owners)


def _post(items: Sequence[tuple[Mail, News | Refusal]]) -> None:
    """Into the boxes, from the event loop of their readers: one waking for all of one launch."""
    if items and not items[0][0].loop.is_closed():
        items[0][0].loop.call_soon_threadsafe(_put, items)


def _put(items: Sequence[tuple[Mail, News | Refusal]]) -> None:
    for mail, item in items:
        mail.box.put_nowait(item)
