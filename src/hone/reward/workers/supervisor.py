"""A supervisor: a process that runs no code of the user's, and has a worker that does.

It ends a worker whose time is up and forks another from its own memory, which no reward has touched. It hands on a
worker's answer as bytes and never reads it. When the other end of its connection closes, it ends itself, the worker,
and every process that the worker has started. An orphan that a call leaves behind is ended after that call.
"""

import os
import select
import signal
import socket
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from hone.reward.workers.process_tree import (
    Bounds,
    adopt_orphans,
    descendants,
    die_with_parent,
    end_below,
    give_back_free_memory,
    mapped_shared,
    memory_taken,
    orphans,
    resident,
)

HEAD = struct.Struct("!Id")  # length of what follows, seconds it may take
LARGEST = 1 << 28  # bytes of an answer
ANSWERED, TIMED_OUT, DIED, OUT_OF_MEMORY = (
    0.0,
    1.0,
    2.0,
    3.0,
)  # how a call ended: sent back where a call has its seconds
IDLE_SECONDS = 5.0  # between two looks for what a call has left behind
WATCH_SECONDS = 0.2  # between two looks at the memory of a worker's children
Work = Callable[[bytes], bytes]
_ours = weakref.WeakSet[socket.socket]()


class Closed(Exception):
    """The other end of the connection is closed."""


def send(to: socket.socket, content: bytes, about: float) -> None:
    """Send one message; Closed where the other end is gone."""
    try:
        to.sendall(HEAD.pack(len(content), about) + content)
    except OSError as error:
        raise Closed from error


def receive(of: socket.socket) -> tuple[bytes, float]:
    """The next message and the number that came with it; Closed where the other end is gone."""
    length, about = HEAD.unpack(_receive_exactly(of, HEAD.size))
    if length > LARGEST:
        raise Closed
    return _receive_exactly(of, length), about


def _receive_exactly(of: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = of.recv(min(size - len(parts), 1 << 20))
        except OSError as error:
            raise Closed from error
        if not part:
            raise Closed
        parts += part
    return bytes(parts)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection. The first is for this process alone: its forked children close it."""
    ours, theirs = socket.socketpair()
    _ours.add(ours)
    return ours, theirs


def _close_inherited_ends() -> None:
    """In a forked child: if it kept these ends open, the processes behind them would never see them close."""
    for end in list(_ours):
        end.close()


os.register_at_fork(after_in_child=_close_inherited_ends)


class _Worker:
    """A child in a session of its own."""

    def __init__(self, work: Work, supervisor: socket.socket, bounds: Bounds | None) -> None:
        self.end, theirs = pair()
        self.bounds = bounds
        self.number = os.fork()
        if not self.number:
            supervisor.close()
            _serve(work, theirs, bounds)
        theirs.close()
        watched = bounds is not None and not bounds.folders
        self.began_with = resident(self.number) + mapped_shared() if watched else 0

    def how_it_ended(self) -> str:
        """The exit code or signal with which it ended; "" while it runs."""
        number, status = os.waitpid(self.number, os.WNOHANG)
        return _described(status) if number else ""

    def kill(self) -> str:
        """End it with all that it has started; returns the exit code or signal with which it ended."""
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):  # it has no group yet, or none any more
                kill(self.number, signal.SIGKILL)
        self.end.close()
        how = _described(os.waitpid(self.number, 0)[1])
        self.clear()
        return how

    def clear(self) -> None:
        """End what it has left running, once it has ended itself."""
        if self.bounds is not None:
            self.bounds.end()
            self.bounds.exceeded()  # those that were ended meanwhile are not the next one's fault
        end_below()

    def ended(self) -> bool:
        """Whether it has ended; a child of it may still hold its end of the connection open."""
        if not hasattr(os, "waitid"):  # macOS: it is found out when its time is up
            return False
        return os.waitid(os.P_PID, self.number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def too_large(self) -> bool:
        """Whether it and its children have more memory than they may."""
        if self.bounds is None:
            return False
        if self.bounds.folders:
            return self.bounds.exceeded()
        if resident(self.number) > self.began_with + self.bounds.memory:
            return True
        if not (others := descendants(self.number)):
            return False
        return memory_taken([self.number, *others]) > self.bounds.memory


def _described(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _serve(work: Work, of: socket.socket, bounds: Bounds | None) -> NoReturn:
    """Answer call after call. It never returns."""
    try:
        os.setsid()
        owner = os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()  # nobody else would end the worker of a supervisor that was killed
        if bounds is not None:
            bounds.enter()
        while True:
            content, _ = receive(of)
            answer = work(content)
            if os.getpid() != owner:  # a child that the user's code left behind may not answer in our place
                os._exit(1)
            send(of, answer, ANSWERED)
    except Closed:
        os._exit(0)
    finally:
        os._exit(1)


def _end(number: int, frame: object) -> None:
    raise Closed


def supervise(work: Work, parent: socket.socket, bounds: Bounds | None = None) -> NoReturn:
    """Hand each call to a worker, and send back its answer, or how it failed. It never returns."""
    kept = list[_Worker]()  # one at most
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then lets us go
        signal.signal(signal.SIGTERM, _end)
        adopt_orphans()
        give_back_free_memory()
        with suppress(Closed):
            while True:
                _await_call(parent, kept)
                send(parent, *_through(work, parent, kept, *receive(parent), bounds=bounds))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for worker in kept:
            worker.kill()
        if bounds is not None:
            bounds.close()
        os._exit(0)


def _through(
    work: Work, parent: socket.socket, kept: list[_Worker], content: bytes, seconds: float, *, bounds: Bounds | None
) -> tuple[bytes, float]:
    """One call: the answer, or the signal or exit code of the worker; and how the call ended."""
    if kept and kept[0].how_it_ended():  # between two calls
        worker = kept.pop()
        worker.end.close()
        worker.clear()
    worker = kept[0] if kept else _Worker(work, parent, bounds)
    kept[:] = [worker]
    about, answer = _ask(worker, content, parent, until=time.monotonic() + seconds)
    if worker.too_large():
        about = OUT_OF_MEMORY
    return (answer if about == ANSWERED else kept.pop().kill().encode()), about


def _await_call(parent: socket.socket, kept: list[_Worker]) -> None:
    """Wait for a call. Meanwhile end orphans of the last one: some appear only after its answer."""
    wait = 0.0
    while not select.select([parent], [], [], wait)[0]:
        if kept and orphans(kept[0].number):
            end_below(keep=kept[0].number)
        wait = min(2 * wait + 0.02, IDLE_SECONDS)


def _ask(worker: _Worker, content: bytes, parent: socket.socket, *, until: float) -> tuple[float, bytes]:
    """(how the call ended, the answer); Closed where the parent has ended meanwhile."""
    try:
        worker.end.settimeout(max(until - time.monotonic(), 0.001))
        send(worker.end, content, 0.0)
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([worker.end, parent], [], [], min(left, WATCH_SECONDS))
            if parent in ready:  # it says nothing while it waits for us
                raise _ParentGone
            if ready:
                worker.end.settimeout(max(until - time.monotonic(), 0.001))
                return ANSWERED, receive(worker.end)[0]
            if worker.too_large():
                return OUT_OF_MEMORY, b""
            if worker.ended():
                return DIED, b""
    except _ParentGone:
        raise Closed from None
    except Closed as error:
        return (TIMED_OUT if isinstance(error.__cause__, TimeoutError) else DIED), b""
    return TIMED_OUT, b""


class _ParentGone(Exception):
    """The parent has gone."""
