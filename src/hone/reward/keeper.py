"""A keeper: a process that runs no code of the user's, and has a worker that does.

It ends a worker whose time is up and forks another from its own memory, which nothing has touched. What a worker
answers is handed on as bytes, never read; when the other end of its connection closes, both are gone.
"""

import ctypes
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

HEAD = struct.Struct("!Id")  # length of what follows, seconds it may take
LARGEST = 1 << 28  # bytes of an answer
ANSWERED, TIMED_OUT, DIED = 0.0, 1.0, 2.0  # in the place of seconds, on the way back
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
Work = Callable[[bytes], bytes]
_ours = weakref.WeakSet[socket.socket]()


class Closed(Exception):
    """The other end is gone."""


def send(to: socket.socket, content: bytes, about: float) -> None:
    """One message; Closed where nobody can read it."""
    try:
        to.sendall(HEAD.pack(len(content), about) + content)
    except OSError as error:
        raise Closed from error


def receive(of: socket.socket) -> tuple[bytes, float]:
    """The next message and the number that came with it; Closed at the end of all."""
    length, about = HEAD.unpack(_exactly(of, HEAD.size))
    if length > LARGEST:
        raise Closed
    return _exactly(of, length), about


def _exactly(of: socket.socket, size: int) -> bytes:
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
    """Two ends of a connection, the first of which is this process's alone."""
    ours, theirs = socket.socketpair()
    _ours.add(ours)
    return ours, theirs


def _forget() -> None:
    """A forked child that kept our ends would keep the processes behind them alive."""
    for end in list(_ours):
        end.close()


os.register_at_fork(after_in_child=_forget)


class _Worker:
    """A child in a session of its own, so that what it starts can be ended with it."""

    def __init__(self, work: Work, keeper: socket.socket) -> None:
        self.end, theirs = pair()
        self.number = os.fork()
        if not self.number:
            keeper.close()
            _serve(work, theirs)
        theirs.close()

    def gone(self) -> str:
        """How it ended, "" while it runs."""
        number, status = os.waitpid(self.number, os.WNOHANG)
        return _described(status) if number else ""

    def kill(self) -> str:
        """End it with all it started; how it had ended, if it had."""
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):  # it has no group yet, or none any more
                kill(self.number, signal.SIGKILL)
        self.end.close()
        return _described(os.waitpid(self.number, 0)[1])


def _described(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _serve(work: Work, of: socket.socket) -> NoReturn:
    """Never returns: call after call."""
    try:
        os.setsid()
        owner = os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _die_with_parent()
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


def _die_with_parent() -> None:
    """Where the system can see to it (Linux): nobody else would end the worker of a keeper that was killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def keep(work: Work, parent: socket.socket) -> NoReturn:
    """Never returns: hands calls on to a worker, and back its answer, or that it was too slow, or how it died."""
    kept = list[_Worker]()  # one at most
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then lets us go
        signal.signal(signal.SIGTERM, _end)
        with suppress(Closed):
            while True:
                send(parent, *_through(work, parent, kept, *receive(parent)))
    finally:
        for worker in kept:
            worker.kill()
        os._exit(0)


def _through(
    work: Work, parent: socket.socket, kept: list[_Worker], content: bytes, seconds: float
) -> tuple[bytes, float]:
    """One call: the answer, or how the worker died, and which of it."""
    if kept and kept[0].gone():  # between two calls
        kept.pop().end.close()
    worker = kept[0] if kept else _Worker(work, parent)
    kept[:] = [worker]
    about, answer = _ask(worker, content, parent, until=time.monotonic() + seconds)
    if about == ANSWERED:
        return answer, about
    how = kept.pop().kill()
    return how.encode(), about


def _ask(worker: _Worker, content: bytes, parent: socket.socket, *, until: float) -> tuple[float, bytes]:
    """(what became of it, the answer); Closed where the parent has gone meanwhile."""
    try:
        worker.end.settimeout(max(until - time.monotonic(), 0.001))
        send(worker.end, content, 0.0)
        ready, _, _ = select.select([worker.end, parent], [], [], max(until - time.monotonic(), 0.0))
        gone = parent in ready  # it says nothing while it waits for us
        if ready and not gone:
            worker.end.settimeout(max(until - time.monotonic(), 0.001))
            return ANSWERED, receive(worker.end)[0]
    except Closed as error:
        return (TIMED_OUT if isinstance(error.__cause__, TimeoutError) else DIED), b""
    if gone:
        raise Closed
    return TIMED_OUT, b""
