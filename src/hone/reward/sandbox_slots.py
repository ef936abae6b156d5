"""The client's side of the wall: starts the server, opens slots, and talks with one job at a time in each.

Every read is bounded, every wait has an end, and what a program wrote is data: bytes, or values of plain types.
"""

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from hone.errors import HoneError
from hone.reward import sandbox_cgroups as cgroups
from hone.reward import sandbox_values as values
from hone.reward.sandbox_job import ENVIRONMENT, LOCKED_IN
from hone.reward.sandbox_wall import remove_groups

GRACE = 10.0  # seconds for the kernel to end and empty a slot
CHUNK = 1 << 16
PATIENCE = 3.0  # times the seconds allowed, at most, however busy the machine is
START = "import sys; sys.path.insert(0, {home!r}); from hone.reward import sandbox_inside as s; s.serve({number})"
HOME = str(Path(__file__).parents[2])

Ask = Callable[[list[Any]], bytes | None]  # every record so far -> more of the request, or None at its end


_names = itertools.count()


def names() -> str:
    """A name for a cgroup that no other of this process has."""
    return str(next(_names))


class SandboxError(HoneError):
    """The sandbox itself failed: no verdict on the program."""


def frame(value: Any, *, limit: int = 1 << 28) -> bytes:
    """A value as a frame of the request."""
    text = values.dumps(value, limit=limit)
    return len(text).to_bytes(4, "big") + text


class Server:
    """A fresh interpreter that opens and ends slots; when its client is gone, so is everything it started."""

    def __init__(self, conf: Mapping[str, Any], python: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = START.format(home=HOME, number=theirs.fileno())
            self._process = subprocess.Popen(
                [python, "-I", "-S", "-c", code],
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._socket, self._lock, self._count = ours, Lock(), 0
        self._socket.settimeout(GRACE)
        self._send(conf)

    def _send(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
        except OSError as error:
            raise SandboxError(
                f"the sandbox's server has ended ({self._why() or error}): open a new sandbox"
            ) from error

    def _why(self) -> str:
        if self._process.poll() is None or self._process.stderr is None:
            return ""
        lines = self._process.stderr.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def open(self, folders: Sequence[str]) -> tuple[int, socket.socket]:
        """A slot in these cgroups: its number and the socket over which it hands out jobs."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            self._count += 1
            self._send({"do": "open", "slot": self._count, "cgroups": list(folders)}, [theirs.fileno()])
            return self._count, ours

    def end(self, number: int) -> None:
        """End a slot; on return nothing of it runs."""
        with self._lock, contextlib.suppress(OSError):  # a server that is gone has ended it
            self._send({"do": "end", "slot": number})
            self._socket.recv(16)

    def close(self) -> None:
        """End everything, and wait until it is."""
        with self._lock:
            self._socket.close()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


@dataclass(slots=True)
class Talk:
    """What has come from a job so far, each stream up to its limit."""

    output: int  # bytes of stdout, and of stderr
    result: int  # bytes of one record
    most: int  # records
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    records: list[Any] = field(default_factory=list[Any])
    limit: str = ""  # the first limit that was hit
    told: dict[str, Any] = field(default_factory=dict[str, Any])  # by the slot, at the end
    _rest: bytearray = field(default_factory=bytearray)
    _left: int = 1 << 24  # bytes of all records together

    def text(self, stream: bytearray, part: bytes) -> None:
        """Some of stdout or stderr."""
        stream += part
        if len(stream) > self.output:
            del stream[self.output :]
            self.limit = self.limit or "output"

    def data(self, part: bytes) -> bool:
        """Some of the records; whether one was completed."""
        if self.limit:
            return False
        self._rest += part
        before = len(self.records)
        while len(self._rest) >= 4 and not self.limit:
            size = int.from_bytes(self._rest[:4], "big")
            self._left -= size if len(self._rest) >= 4 + size else 0
            if size > self.result or len(self.records) >= self.most or self._left < 0:
                self.limit = "result"
            elif len(self._rest) < 4 + size:
                break
            else:
                self._record(bytes(self._rest[4 : 4 + size]))
                del self._rest[: 4 + size]
        return len(self.records) > before

    def _record(self, text: bytes) -> None:
        try:
            record = values.loads(text)
        except ValueError:
            record = None
        if isinstance(record, dict):
            self.records.append(record)
        else:
            self.limit = "result"

    @property
    def broken(self) -> bool:
        """Whether bytes are left over that are no record."""
        return bool(self._rest)


def await_lock(job: Sequence[int]) -> None:
    """Wait until the job says that it is locked in: before that it is sent no program."""
    _, _, err, result, _ = job
    said = os.read(result, len(LOCKED_IN)) if select.select([result], [], [], GRACE)[0] else b""
    if said != LOCKED_IN:
        os.set_blocking(err, False)
        with contextlib.suppress(BlockingIOError):
            said = os.read(err, CHUNK)
        why = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise SandboxError(f"a job could not be locked in ({why}): run `hone sandbox doctor`")


class Slot:
    """One place for jobs, one after the other; each is forked before it is wanted."""

    def __init__(self, server: Server, folders: Sequence[str], *, watched: bool) -> None:
        self._server, self.folders, self._watched = server, folders, watched
        self.number, self._control = server.open(folders)
        self._control.settimeout(GRACE)
        self._job: list[int] = []
        self.proc = False

    def ready(self) -> None:
        """Wait until a job is locked in and waits for its program."""
        if self._job:
            return
        try:
            text, self._job, _, _ = socket.recv_fds(self._control, 1 << 16, 5)
        except OSError as error:
            raise SandboxError(f"a slot of the sandbox did not start: {error}: run `hone sandbox doctor`") from error
        told = json.loads(text or '{"failed": "it ended"}')
        if "failed" in told:
            raise SandboxError(f"a slot of the sandbox did not start: {told['failed']}: run `hone sandbox doctor`")
        self.proc = told["proc"]
        await_lock(self._job)

    def prepared(self) -> bool:
        """Whether it has said that a job waits, so that `ready` does not have to wait for it."""
        return bool(self._job) or bool(select.select([self._control], [], [], 0)[0])

    def alive(self) -> bool:
        """Whether it is there to be used: an idle slot says nothing after its job is ready."""
        self.ready()
        return not select.select([self._control], [], [], 0)[0]

    def run(self, request: bytes, talk: Talk, *, seconds: float, ask: Ask | None = None) -> None:
        """Give the waiting job its request, and listen until it has ended or is over a limit."""
        self.ready()
        job, self._job = self._job, []
        ended = cgroups.out_of_memory(self.folders)
        if self._watched:
            self._control.send(b"go")
        conversation = Conversation(job, self._control.fileno(), self._told, talk=talk, ask=ask)
        conversation.hold(request, time.monotonic() + seconds)
        talk.limit = talk.limit or talk.told.get("over", "")
        if not talk.limit and talk.told.get("status", -signal.SIGKILL) == -signal.SIGKILL:
            talk.limit = "memory" if cgroups.out_of_memory(self.folders) > ended else ""
        if not talk.told and not talk.limit:
            raise SandboxError("a slot of the sandbox died: no verdict on its program; try again")

    def _told(self) -> dict[str, Any]:
        """How the job ended; nothing where the slot itself has."""
        return json.loads(self._control.recv(CHUNK) or "{}")

    def close(self) -> None:
        """End the slot and remove its cgroups."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        for descriptor in self._job:
            os.close(descriptor)
        self._job = []
        self._server.end(self.number)
        remove_groups(self.folders)


def waited(handle: int) -> float:
    """Seconds in which a process was ready to run and others ran, of its first thread; 0 where the kernel is silent."""
    try:
        line = re.search(r"^Pid:\s*(\d+)$", Path(f"/proc/self/fdinfo/{handle}").read_text(), re.MULTILINE)
        return int(Path(f"/proc/{line.group(1)}/schedstat").read_text().split()[1]) / 1e9 if line else 0.0
    except (OSError, IndexError, ValueError):
        return 0.0


class Conversation:
    """Writes the request and reads the streams, all at once, until `told` says how the job ended.

    `job` is the request's end, stdout, stderr, the records and a pidfd; `end` can be read when `told` has something.
    """

    def __init__(
        self, job: Sequence[int], end: int, told: Callable[[], dict[str, Any]], *, talk: Talk, ask: Ask | None
    ) -> None:
        self.inbox, self.out, self.err, self.result, self.handle = job
        self.end, self.told, self.talk, self.ask = end, told, talk, ask
        self.pending, self.last = b"", ask is None
        self.held = set(job)
        self.poll = select.poll()
        for descriptor in job[:4]:
            os.set_blocking(descriptor, False)
        for descriptor in (self.out, self.err, self.result, end):
            self.poll.register(descriptor, select.POLLIN)

    def hold(self, request: bytes, until: float) -> None:
        """The whole conversation; on return the job has ended, or its slot is no good. Its descriptors are closed."""
        self._queue(request)
        try:
            if self._listen(until):
                self._drain()
        finally:
            while self.held:
                os.close(self.held.pop())

    def _drain(self) -> None:
        """What is still in the pipes of a job that has ended."""
        for descriptor in (self.out, self.err, self.result):
            while self._take(descriptor):
                continue

    def _listen(self, until: float) -> bool:
        """Until the job has ended. On a busy machine, time in which others had the processor does not count."""
        killed, began = False, time.monotonic()
        allowed = until - began
        while not self.talk.told:
            if not killed and not self.talk.limit and time.monotonic() >= until:
                until = began + min(allowed + waited(self.handle), PATIENCE * allowed)
            if not killed and (self.talk.limit or time.monotonic() >= until):
                self.talk.limit = self.talk.limit or "time"
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    signal.pidfd_send_signal(self.handle, signal.SIGKILL)
                killed, until = True, time.monotonic() + GRACE
            ready = self.poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if killed and not ready:
                return False
            if not all(self._event(descriptor) for descriptor, _ in ready):
                return False
        return True

    def _event(self, descriptor: int) -> bool:
        """What one descriptor has to tell; False where the slot has died."""
        if descriptor == self.end:
            self.talk.told = self.told()
            return bool(self.talk.told)
        if descriptor == self.inbox:
            self._write()
        elif not self._take(descriptor):
            self.poll.unregister(descriptor)
        return True

    def _take(self, descriptor: int) -> bool:
        """Read once; False at the end of the stream, or where nothing more is there."""
        try:
            part = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if descriptor != self.result:
            self.talk.text(self.talk.stdout if descriptor == self.out else self.talk.stderr, part)
        elif self.talk.data(part) and self.ask is not None and not self.last:
            more = self.ask(self.talk.records)
            self.last = more is None
            self._queue(more or b"")
        return bool(part)

    def _queue(self, more: bytes) -> None:
        self.pending += more
        if self.pending or self.last:
            self.poll.register(self.inbox, select.POLLOUT)

    def _write(self) -> None:
        try:
            self.pending = self.pending[os.write(self.inbox, self.pending[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # nobody reads it any more
            self.pending, self.last = b"", True
        if self.pending:
            return
        self.poll.unregister(self.inbox)
        if self.last:  # the job reads the end of its request
            self.held.remove(self.inbox)
            os.close(self.inbox)
