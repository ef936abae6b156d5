"""Processes that compare expressions: as many as there are calls at a time, forked from one that has imported SymPy.

Any thread may ask. The limit of a call is processor time, which the kernel counts and ends the process at, whatever it
is doing: a busy machine makes no call fail. The clock on the wall is only there for a machine or process that stands
still. The first call starts the processes, which takes seconds that are not its own.
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
WALL_SECONDS = 300.0  # for one call, whose processor time is limited by `symbolic.CPU_SECONDS`
END_SECONDS = 2.0  # from the end of its connection to that of a process that only forks
GRACE = 5.0  # more for the supervisor to say so
MOST = 16  # calls at a time; others wait
MEMORY = 4096  # calls that are known to exhaust a process
OUTSIDE = (b"SIGKILL", b"SIGTERM", b"SIGINT", b"SIGHUP")  # signals that no call brings on itself
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
    """What to do where the library is not installed, else ""."""
    absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed: pip install 'hone[math]'" if absent else ""


class Workers:
    """Supervisors by the connections to them; `ask` hands each to one call at a time. They end when this is gone."""

    def __init__(self) -> None:
        self._wall = WALL_SECONDS
        self._idle = list[socket.socket]()
        self._slots, self._lock = threading.BoundedSemaphore(MOST), threading.Lock()
        self._control: socket.socket | None = None
        self._asked = dict[bytes, Future[dict[str, Any]]]()  # under way, and what exhausted its process

    def ask(self, call: dict[str, str]) -> dict[str, Any]:
        """What a worker says about the call; Exhausted where that needs too much, NoVerdict where the machine failed.

        The same call from several threads is one, and one that is known to exhaust a process is not tried again.
        """
        content, ours = json.dumps(call).encode(), Future[dict[str, Any]]()
        with self._lock:
            found = self._asked.setdefault(content, ours)
        if found is not ours:
            return found.result()
        try:
            ours.set_result(self._answer(content))
        except BaseException as error:
            ours.set_exception(error)
        with self._lock:
            if not isinstance(ours.exception(), Exhausted) or len(self._asked) > MEMORY:
                del self._asked[content]
        return ours.result()

    def _answer(self, call: bytes) -> dict[str, Any]:
        with self._slots:
            about, content = self._through(call)
        how = content.decode(errors="replace")
        if about == TIMED_OUT:
            raise NoVerdict(f"timed out: the process that compares made no end within {self._wall:g} s")
        said: dict[str, Any] = json.loads(content) if about == ANSWERED else {"failed": how}
        if "failed" not in said:
            return said
        if content in OUTSIDE:
            raise NoVerdict(f"crashed: the process that compares was ended from outside ({how})")
        if content == b"SIGPROF":
            raise Exhausted("timed out: comparing takes more processor time than it may have")
        raise Exhausted(f"crashed: comparing takes its process down ({said['failed']})")

    def _through(self, call: bytes) -> tuple[float, bytes]:
        for _ in range(3):  # supervisors, and the process that forks them, may have been ended between two calls
            end = self._taken()
            try:
                send(end, call, self._wall)
                end.settimeout(self._wall + GRACE)
                content, about = receive(end)
            except Closed as error:
                end.close()  # at which its supervisor ends it
                if isinstance(error.__cause__, TimeoutError):
                    return TIMED_OUT, b""
                self._drop()
            else:
                self._put_back(end, spent=b'"slow": true' in content)
                return about, content
        raise NoVerdict("crashed: the processes that compare expressions were ended from outside")

    def _put_back(self, end: socket.socket, *, spent: bool) -> None:
        """For the next call; not if its process has stepped back behind all others, which it cannot undo."""
        with self._lock:
            if not spent:
                self._idle.append(end)
                return
        end.close()

    def _taken(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._control = self._control or _started()
            ours, theirs = pair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                except OSError:  # found out by the call, which then starts another
                    self._control = None
            return ours

    def _drop(self) -> None:
        """Drop the workers. One that waits for a call may have been ended, too."""
        with self._lock:
            ends, self._idle = self._idle, []
        for end in ends:
            end.close()


def _started() -> socket.socket:
    """The connection to a process that forks supervisors, which ends when it is closed."""
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
    weakref.finalize(ours, _reap, process).atexit = False  # at the exit of all nobody closes the connection before
    return ours


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Waits for its end. Of a cycle of garbage Python closes the connection only after this, so it is ended then."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


WORKERS = Workers()


os.register_at_fork(after_in_child=WORKERS.__init__)  # a forked child talks to processes of its own
