"""Async functions awaited from plain code: one event loop a process, in a thread of its own.

It outlives a call, so that a client the function keeps stays bound to a loop that runs.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from functools import cache
from typing import Any

AT_ONCE = 64  # calls that wait at a time


class TimedOut(Exception):
    """It took longer than it may."""


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """A forked child has none of its parent's threads, so a process makes its own."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while not loop.is_closed():
            loop.run_forever()  # until a function stops it, for which the others cannot wait

    threading.Thread(target=run, name="hone-awaits", daemon=True).start()
    return loop


async def _within(make: Callable[[], Awaitable[Any]], seconds: float | None, room: asyncio.Semaphore) -> Any:
    """What it gives or raises; a SystemExit that left the task would end the loop."""
    async with room:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await make()
        except BaseException as error:
            return TimedOut() if limit.expired() else error


async def _all(makes: Sequence[Callable[[], Awaitable[Any]]], seconds: float | None) -> list[Any]:
    room = asyncio.Semaphore(AT_ONCE)
    return await asyncio.gather(*(_within(make, seconds, room) for make in makes))


def await_all(makes: Sequence[Callable[[], Awaitable[Any]]], *, seconds: float | None = None) -> list[Any]:
    """What each gives, in order, or the exception it ended with: TimedOut after so many seconds of its own."""
    future = asyncio.run_coroutine_threadsafe(_all(makes, seconds), _loop(os.getpid()))
    try:
        return future.result()
    except CancelledError:  # one of them has cancelled all that the loop runs
        return [CancelledError("cancelled by a function that ran beside it")] * len(makes)
    except BaseException:
        future.cancel()
        raise
