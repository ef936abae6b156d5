"""Async functions called from synchronous code, on one event loop for each process, in a thread of its own.

The loop outlives a call: a client that the function keeps stays bound to a running loop.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from functools import cache
from typing import Any

MAX_CONCURRENT = 64  # calls that wait at the same time


class TimedOut(Exception):
    """The call took longer than its limit."""


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of a process. A forked child has none of its parent's threads, so it needs its own loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while not loop.is_closed():
            loop.run_forever()  # again where a function has stopped it: other calls still wait

    threading.Thread(target=run, name="hone-awaits", daemon=True).start()
    return loop


async def _await_one(call: Callable[[], Awaitable[Any]], seconds: float | None, slots: asyncio.Semaphore) -> Any:
    """The call's result or exception. Exceptions are returned: a SystemExit that left the task would end the loop."""
    async with slots:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call()
        except BaseException as error:
            return TimedOut() if limit.expired() else error


async def _gather(calls: Sequence[Callable[[], Awaitable[Any]]], seconds: float | None) -> list[Any]:
    slots = asyncio.Semaphore(MAX_CONCURRENT)
    return await asyncio.gather(*(_await_one(call, seconds, slots) for call in calls))


def await_all(calls: Sequence[Callable[[], Awaitable[Any]]], *, seconds: float | None = None) -> list[Any]:
    """The calls' results or exceptions, in order; TimedOut for a call that itself ran for more than `seconds`."""
    future = asyncio.run_coroutine_threadsafe(_gather(calls, seconds), _loop(os.getpid()))
    try:
        return future.result()
    except CancelledError:  # one of the functions has cancelled every task of the loop
        return [CancelledError("cancelled by a function that ran beside it")] * len(calls)
    except BaseException:
        future.cancel()
        raise
