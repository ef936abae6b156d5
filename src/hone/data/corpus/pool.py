"""The same function over many arguments in several processes; results in the order of the arguments."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from hone.errors import HoneError

A = TypeVar("A")
B = TypeVar("B")


class WorkerKilled(HoneError):
    """A worker process was killed. Finished shards are kept, and the same command goes on."""


def _end_with_parent() -> None:
    """End this worker with its parent. Otherwise it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def check_workers(workers: int) -> None:
    """HoneError if the number of workers is below 1."""
    if workers < 1:
        raise HoneError(f"workers is {workers}: give at least 1")


def map_in_processes(function: Callable[[A], B], arguments: Sequence[A], *, workers: int) -> Iterator[B]:
    """function(a) for every a; one worker is this process itself."""
    if workers == 1 or len(arguments) < 2:
        yield from map(function, arguments)
        return
    # Not forked: the parent may hold threads (torch), whose locks a fork would copy as they stand.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(arguments)), mp_context=context, initializer=_end_with_parent)
    try:
        yield from pool.map(function, arguments)
    except BrokenProcessPool as error:
        raise WorkerKilled(
            "a worker process was killed (memory?): run the same command again to go on, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
