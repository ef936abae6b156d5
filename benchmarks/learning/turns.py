"""Sides that take turns, so that what else a machine does falls on all of them; only one computes at a time.

`apart` gives each a process of its own, with threads, memory and caches that are nobody else's, and its times come from
there. A side builds what it needs, then calls `clock.begin()`, and `clock.lap()` after every iteration.
"""

import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection

from hone.errors import HoneError

Took = tuple[float, float]  # seconds, and seconds of all cores: on a busy machine only the second can be compared


class Clock:
    """Times so many iterations at a stretch; after each stretch the others have their turn.

    others: told what an iteration took (None before the first turn), it comes back when the side may go on.
    stretch: iterations of a turn. Of small models several: one after the other is how they are trained, and the first
    after another side's finds nothing of its own in the caches. warm: turns before those that count, on every side.
    """

    def __init__(self, others: Callable[[Took | None], object], *, turns: int, stretch: int, warm: int = 1) -> None:
        self.others, self.stretch = others, stretch
        self.iterations = (turns + warm) * stretch
        self.done, self.began = 0, now()

    def begin(self) -> None:
        """All is built."""
        self._hand_on(None)

    def lap(self) -> None:
        """An iteration is through."""
        self.done += 1
        if not self.done % self.stretch:
            self._hand_on(since(self.began, self.stretch))

    def _hand_on(self, taken: Took | None) -> None:
        self.others(taken)
        self.began = now()


Side = Callable[[Clock], object]  # found by its name in another process, as are the arguments of a partial


def now() -> Took:
    return time.perf_counter(), time.process_time()


def since(began: Took, iterations: int) -> Took:
    """Of each of so many iterations."""
    wall, cpu = now()
    return (wall - began[0]) / iterations, (cpu - began[1]) / iterations


def median(taken: Sequence[Took], *, warm: int = 1) -> Took:
    """Of one iteration, without the turns that warmed up."""
    wall, cpu = zip(*taken[warm:], strict=True)
    return statistics.median(wall), statistics.median(cpu)


def run(step: Callable[[], object], clock: Clock) -> None:
    """All iterations of a side that does one a call."""
    clock.begin()
    for _ in range(clock.iterations):
        step()
        clock.lap()


def apart(sides: Mapping[str, Side], *, turns: int, stretch: int = 1) -> list[Took]:
    """Each side's median of one iteration, in a process of its own; HoneError names the side that failed."""
    clock = partial(Clock, turns=turns, stretch=stretch)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        players = [stack.enter_context(Player(name, side, clock, folder)) for name, side in sides.items()]
        for player in players:
            player.heard()  # it is ready
        taken = [[player.turn() for player in players] for _ in range(turns + 1)]
        for player in players:
            player.leave()
    return [median(side) for side in zip(*taken, strict=True)]


class Player:
    """A side's process, which ends with the block."""

    def __init__(self, name: str, side: Side, clock: Callable[..., Clock], folder: str) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")  # not forked: this process may have computed
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_play, args=(side, clock, theirs, folder), daemon=True)
        self.process.start()
        theirs.close()  # the pipe ends with the process

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def heard(self) -> Took | None:
        """What it says when its turn is over."""
        try:
            found = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            found = f"its process ended with {self.process.exitcode}"
        if isinstance(found, str):
            raise HoneError(f"{self.name} failed: {found}")
        return found

    def turn(self) -> Took:
        self.pipe.send(None)
        taken = self.heard()
        assert taken is not None, f"{self.name} began twice"
        return taken

    def leave(self) -> None:
        """After the last turn of all it may say what it has seen."""
        self.pipe.send(None)
        self.process.join()
        if self.process.exitcode:
            self.heard()


def _play(side: Side, clock: Callable[..., Clock], pipe: Connection, folder: str) -> None:
    """In the side's process: its files go to a folder that is removed even where the process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says how things end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tempfile.tempdir = folder

    def others(taken: Took | None) -> None:
        pipe.send(taken)
        pipe.recv()

    try:
        side(clock(others))
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        sys.exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
