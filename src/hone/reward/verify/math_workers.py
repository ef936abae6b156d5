"""Processes that compare expressions: as many as there are calls at a time, forked from one that has imported SymPy.

Any thread may ask. A call that takes too long is ended by its keeper (see `hone.reward.keeper`), whatever it is doing,
and nothing that it did outlives it. The first call starts the processes, which takes seconds that are not its own.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.reward.keeper import ANSWERED, TIMED_OUT, Closed, pair, receive, send

START_SECONDS = 120.0
SECONDS, GRACE = 1.0, 0.6  # for one call, from when its process has it; more for starting that, where all are busy
CROWDED_SECONDS = 0.25  # while others wait, so that none waits long
MOST = 16  # calls at a time; others wait
MODULES = ("sympy", "latex2sympy2_extended")
# A package without its __init__, which would import torch.
_START = """
import sys, types
sys.path.insert(0, {home!r})
package = sys.modules["hone.reward.verify"] = types.ModuleType("hone.reward.verify")
package.__path__ = [{folder!r}]
from hone.reward.verify import math_symbolic
math_symbolic.serve({number})
"""


class Failed(Exception):
    """No verdict, for this reason."""


def missing() -> str:
    """What to do where the library is not installed, else ""."""
    absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed: pip install 'hone[math]'" if absent else ""


class Workers:
    """Keepers by the connections to them; `ask` hands each to one call at a time."""

    def __init__(self, *, most: int = MOST) -> None:
        self._idle = list[socket.socket]()
        self._slots, self._lock = threading.BoundedSemaphore(most), threading.Lock()
        self._control: socket.socket | None = None
        self._asking = 0  # calls, at work or waiting

    def ask(self, call: dict[str, str], *, seconds: float = SECONDS) -> dict[str, Any]:
        """What a worker says about the call; Failed where it was too slow or died."""
        with self._counted(), self._slots:
            seconds = seconds if self._asking <= MOST else min(seconds, CROWDED_SECONDS)
            about, content = self._through(json.dumps(call).encode(), seconds)
        if about == TIMED_OUT or content == b"SIGPROF":
            raise Failed(f"timed out: comparing took more than {seconds:g} s")
        if about != ANSWERED:
            raise Failed(f"crashed: comparing took its process down ({content.decode(errors='replace')})")
        return json.loads(content)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1

    def _through(self, call: bytes, seconds: float) -> tuple[float, bytes]:
        for _ in range(3):  # keepers, and the process that forks them, may have been ended between two calls
            end = self._taken()
            try:
                send(end, call, seconds)
                end.settimeout(seconds + GRACE)
                content, about = receive(end)
            except Closed as error:
                end.close()  # at which its keeper ends it
                if isinstance(error.__cause__, TimeoutError):
                    return TIMED_OUT, b""
                self._drop()
            else:
                self._put_back(end, spent=b'"slow": true' in content)
                return about, content
        raise Failed("crashed: the processes that compare expressions were ended from outside")

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
        """Those that wait for a call may have been ended, too."""
        with self._lock:
            ends, self._idle = self._idle, []
        for end in ends:
            end.close()

    def close(self) -> None:
        """Every process ends that is not at work; the next call starts others."""
        self._drop()
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.close()


def _started() -> socket.socket:
    """The connection to a process that forks keepers, which ends when it is closed."""
    absent = missing()
    if absent:
        raise HoneError(absent)
    ours, theirs = pair()
    folder = Path(__file__).parent
    program = _START.format(home=str(folder.parents[2]), folder=str(folder), number=theirs.fileno())
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd="/"
        )
    ours.settimeout(START_SECONDS)
    if not ours.recv(1):
        raise HoneError(f"the processes that compare expressions did not start (exit code {process.wait()}): see above")
    weakref.finalize(ours, process.wait).atexit = False  # at the exit of all nobody closes the connection before
    return ours


WORKERS = Workers()


os.register_at_fork(after_in_child=WORKERS.__init__)  # a forked child talks to processes of its own
