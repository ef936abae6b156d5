"""Processes that compare expressions: as many as there are calls at a time, forked from one that has imported SymPy.

Any thread may ask. A call is limited by processor time. The kernel counts it and ends the process at the limit, so a
busy machine makes no call fail. A limit of elapsed time only catches a machine or process that hangs. The first call
starts the processes; these seconds do not count as the call's.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.reward.workers.supervisor import ANSWERED, TIMED_OUT, Closed, pair, receive, send

START_SECONDS = 120.0
WALL_SECONDS = 300.0  # elapsed, of one call; `symbolic.CPU_SECONDS` limits its processor time
END_SECONDS = 2.0  # from the end of its connection until the process that forks has to end
GRACE = 5.0  # more seconds for the supervisor to report it
MOST = 16  # calls at a time; others wait
MEMORY = 4096  # how many calls that exhaust a process are remembered
OUTSIDE = (b"SIGKILL", b"SIGTERM", b"SIGINT", b"SIGHUP")  # signals that a call cannot cause
MODULES = ("sympy", "latex2sympy2_extended")
# A package without its __init__, which would import torch.
_START = """
import sys, types
sys.path.insert(0, {home!r})
package = sys.modules["hone.reward.verify"] = types.ModuleType("hone.reward.verify")
package.__path__ = [{folder!r}]
from hone.reward.verify.math import symbolic
symbolic.serve({number})
"""


class NoVerdict(Exception):
    """No verdict, for this reason."""


class Exhausted(NoVerdict):
    """The reason lies in the call: it needs more processor time, memory or depth than it may have."""


def missing() -> str:
    """The remedy if the library is not installed, else ""."""
    absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed: pip install 'hone[math]'" if absent else ""


class Workers:
    """Supervisors by the connections to them; `ask` hands each to one call at a time. They end when this is gone."""

    def __init__(self) -> None:
        self._wall = WALL_SECONDS
        self._idle = list[socket.socket]()
        self._slots, self._lock = threading.BoundedSemaphore(MOST), threading.Lock()
        self._control: socket.socket | None = None
        self._calls = dict[bytes, Future[dict[str, Any]]]()  # running calls, and calls that exhausted their process

    def ask(self, call: dict[str, str]) -> dict[str, Any]:
        """A worker's verdict on the call; Exhausted if the call needs too much, NoVerdict if the machine failed.

        Threads with the same call share one. A call that is known to exhaust a process is not tried again.
        """
        content, ours = json.dumps(call).encode(), Future[dict[str, Any]]()
        with self._lock:
            shared = self._calls.setdefault(content, ours)
        if shared is not ours:
            return shared.result()
        try:
            ours.set_result(self._answer(content))
        except BaseException as error:
            ours.set_exception(error)
        with self._lock:
            if not isinstance(ours.exception(), Exhausted) or len(self._calls) > MEMORY:
                del self._calls[content]
        return ours.result()

    def _answer(self, call: bytes) -> dict[str, Any]:
        with self._slots:
            about, content = self._exchange(call)
        how = content.decode(errors="replace")
        if about == TIMED_OUT:
            raise NoVerdict(f"timed out: the process that compares made no end within {self._wall:g} s")
        verdict: dict[str, Any] = json.loads(content) if about == ANSWERED else {"failed": how}
        if "failed" not in verdict:
            return verdict
        if content in OUTSIDE:
            raise NoVerdict(f"crashed: the process that compares was ended from outside ({how})")
        if content == b"SIGPROF":
            raise Exhausted("timed out: comparing takes more processor time than it may have")
        raise Exhausted(f"crashed: comparing takes its process down ({verdict['failed']})")

    def _exchange(self, call: bytes) -> tuple[float, bytes]:
        for _ in range(3):  # the supervisor, or the process that forks them, may have been killed since the last call
            end = self._take()
            try:
                send(end, call, self._wall)
                end.settimeout(self._wall + GRACE)
                content, about = receive(end)
            except Closed as error:
                end.close()  # its supervisor then ends the worker
                if isinstance(error.__cause__, TimeoutError):
                    return TIMED_OUT, b""
                self._drop()
            else:
                self._put_back(end, lowered=b'"slow": true' in content)
                return about, content
        raise NoVerdict("crashed: the processes that compare expressions were ended from outside")

    def _put_back(self, end: socket.socket, *, lowered: bool) -> None:
        """Keep the worker for the next call, unless its priority was lowered, which cannot be undone."""
        with self._lock:
            if not lowered:
                self._idle.append(end)
                return
        end.close()

    def _take(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._control = self._control or _start()
            ours, theirs = pair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                except OSError:  # the call then fails to send, and starts another
                    self._control = None
            return ours

    def _drop(self) -> None:
        """Drop all idle workers: they may have been killed, too."""
        with self._lock:
            ends, self._idle = self._idle, []
        for end in ends:
            end.close()


def _start() -> socket.socket:
    """Start the process that forks supervisors; the connection to it. It ends when the connection is closed."""
    absent = missing()
    if absent:
        raise HoneError(absent)
    ours, theirs = pair()
    folder = Path(__file__).parent
    program = _START.format(home=str(folder.parents[3]), folder=str(folder.parent), number=theirs.fileno())
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd="/"
        )
    ours.settimeout(START_SECONDS)
    if not ours.recv(1):
        raise HoneError(f"the processes that compare expressions did not start (exit code {process.wait()}): see above")
    weakref.finalize(ours, _reap, process).atexit = False  # at exit the connection would still be open
    return ours


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process to end, and kill it if its connection stays open, as in a cycle of garbage."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


WORKERS = Workers()


os.register_at_fork(after_in_child=WORKERS.__init__)  # a forked child talks to processes of its own
