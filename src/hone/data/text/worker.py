"""One worker process with limits reads what strangers wrote. It is started when it is first needed, then reused.

Any thread may ask; a forked child gets a worker of its own. A request that exceeds its limit of processor time or
memory raises OverLimit, and the worker is replaced. Its memory was never part of this process.
"""

import atexit
import json
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.data.text.worker_process import HEAD, MEMORY, NO_MEMORY, OK, RETIRED, Frames
from hone.errors import HoneError

PATIENCE = 600  # seconds until a worker that neither answers nor uses up its processor time is given up
RETRY = (-signal.SIGKILL, -signal.SIGTERM, RETIRED)  # exit codes of a worker that ended before it read the request
BROKEN = (OSError, EOFError, ValueError, RecursionError)  # raised here where a worker has ended or answers nonsense
IN_FLIGHT = 2  # requests
# The parent's own path, for the worker reads no environment and no site files.
_START = "import sys; sys.path[:] = {path!r}; from hone.data.text.worker_process import serve; serve({number})"


class OverLimit(Exception):
    """The request takes more processor time or memory than its limit. The message is a clause: "it takes ..."."""


class Failed(Exception):
    """The worker tried what it was asked, and this is why it failed."""


class Worker:
    """The connection to the worker process; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames: Frames | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, kind: str, argument: Any, *, seconds: float, memory: int) -> Any:
        """What the worker makes of it, as a JSON value; OverLimit or Failed where it makes nothing of it."""
        request = _framed(kind, argument, seconds, memory)
        with self._lock:
            code, answer = self._exchange(request)
            if answer is None and code in RETRY:
                code, answer = self._exchange(request)
        if answer is None:
            raise _ended(code, seconds, memory)
        state, value = answer
        if state == MEMORY:
            raise over_memory(memory)
        if state != OK:
            raise Failed(value)
        return value

    def ask_all(self, kind: str, arguments: Iterable[Any], *, seconds: float, memory: int) -> list[Any]:
        """The answers to several requests, two under way at a time; only those before the first that fails."""
        with self._lock:
            answers = list[Any]()
            try:
                self._pipe(answers, (_framed(kind, argument, seconds, memory) for argument in arguments))
            except BROKEN:
                self._end_it()
            except BaseException:
                self._end_it()
                raise
            return answers

    def _pipe(self, answers: list[Any], requests: Iterator[bytes]) -> None:
        """Answers are read before more is sent: otherwise both ends could wait for each other at full sockets."""
        frames, waiting, out = self._started(), 0, next(requests, b"")
        while waiting or out:
            if frames.rest:
                ready, free = True, False
            else:
                sends = [frames.end] if out and waiting < IN_FLIGHT else []
                ready, free, _ = select.select([frames.end] if waiting else [], sends, [], PATIENCE)
                if not ready and not free:
                    raise TimeoutError
            if ready:
                state, value = _decoded(frames.next())
                waiting -= 1
                if state != OK:
                    raise EOFError
                answers.append(value)
            if free:
                out = out[frames.end.send(out, socket.MSG_DONTWAIT) :]
                if not out:
                    waiting, out = waiting + 1, next(requests, b"")

    def _exchange(self, request: bytes) -> tuple[int, Any]:
        """(0, the answer), or how the process ended and None."""
        try:
            frames = self._started()
            frames.end.sendall(request)
            return 0, _decoded(frames.next())
        except BROKEN:
            return self._end_it(), None
        except BaseException:  # its answer would be taken for that of the next request
            self._end_it()
            raise

    def _started(self) -> Frames:
        if self._frames is not None:
            return self._frames
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE, 0))
        home = str(Path(__file__).parents[3])
        path = list(dict.fromkeys([home, *(os.path.abspath(p) for p in sys.path if p)]))
        with theirs:
            program = _START.format(path=path, number=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
                start_new_session=True,
            )
        self._frames = Frames(ours)
        return self._frames

    def _end_it(self) -> int:
        """End the process if it has not ended by itself; its exit code."""
        frames, process = self._frames, self._process
        self._frames = self._process = None
        if frames is not None:
            frames.end.close()
        if process is None:
            return 0
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        """The process ends; the next request starts another."""
        with self._lock:
            self._end_it()

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        if self._frames is not None:
            self._frames.end.close()
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self.__init__()


def _framed(kind: str, argument: Any, seconds: float, memory: int) -> bytes:
    request = marshal.dumps((kind, float(seconds), int(memory), argument))
    return HEAD.pack(len(request)) + request


def _decoded(answer: bytes) -> list[Any]:
    """The state and the value."""
    return json.loads(answer.decode("utf-8", "surrogatepass"))


def _ended(code: int, seconds: float, memory: int) -> Exception:
    if code == -signal.SIGPROF:
        return OverLimit(f"it takes more than {seconds:g} s of processor time, its limit")
    if code in (NO_MEMORY, -signal.SIGABRT):
        return over_memory(memory)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Failed(f"it took the process down that handled it ({how})")


def over_memory(memory: int) -> OverLimit:
    """The error of what needs more than so many bytes."""
    return OverLimit(f"it takes more than {memory >> 20} MiB of memory, its limit")


def plain(value: Any) -> Any:
    """The value of types that can be sent: what is no text, number, list or object becomes text."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return str(value)


def first_matches(patterns: Sequence[str], names: Sequence[str], *, where: str) -> list[int]:
    """For each name, the number of the first pattern that matches it as a whole, or -1."""
    try:
        return WORKER.ask("match", (list(patterns), list(names)), seconds=2.0, memory=256 << 20)
    except OverLimit as error:
        raise HoneError(f"{where}: matching its patterns: {error}: write simpler ones") from error
    except Failed as error:
        raise HoneError(f"{where} holds no regular expression ({error}): correct it") from error


WORKER = Worker()
os.register_at_fork(after_in_child=WORKER.forget)
atexit.register(WORKER.close)
