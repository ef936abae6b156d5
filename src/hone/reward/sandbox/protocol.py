"""A conversation with one job, whatever backend runs it: the request goes in, bounded streams and values come out.

Every read is bounded, every wait has an end, and what a program wrote is data: bytes, or values of plain types.
"""

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hone.errors import HoneError
from hone.reward.sandbox import values
from hone.reward.sandbox.job import LOCKED_IN
from hone.reward.sandbox.limits import Protection

GRACE = 10.0  # seconds for the kernel to end and empty a slot
CHUNK = 1 << 16
END = b"\0\0\0\0"  # of the request: the end of the pipe does not come while a forked process has a copy of it
MAX_REQUEST = 1 << 28  # bytes of one frame of it
MAX_STRETCH = 3.0  # times the seconds allowed, at most, however busy the machine is

Ask = Callable[[list[Any]], bytes | None]  # every record so far -> more of the request, or None at its end


class SandboxError(HoneError):
    """The sandbox itself failed: no verdict on the program."""


def frame(value: Any) -> bytes:
    """A value as a frame of the request."""
    text = values.dumps(value, limit=MAX_REQUEST)
    return len(text).to_bytes(4, "big") + text


@dataclass(slots=True)
class JobOutput:
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
    _left: int = 0  # bytes of all records together that may still come

    def __post_init__(self) -> None:
        self._left = max(16 * self.result, 1 << 24)

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


def readable(*descriptors: int, seconds: float = 0.0) -> set[int]:
    """The descriptors that have something to read, or have ended, within that time. Their numbers may exceed 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


def await_lock(job: Sequence[int]) -> None:
    """Wait until the job says that it is locked in: before that it is sent no program."""
    _, _, err, result, handle = job
    said = os.read(result, len(LOCKED_IN)) if result in readable(result, handle, seconds=GRACE) else b""
    if said != LOCKED_IN:
        os.set_blocking(err, False)
        with contextlib.suppress(BlockingIOError):
            said = os.read(err, CHUNK)
        why = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise SandboxError(f"a job could not be locked in ({why}): run `hone sandbox doctor`")


class SandboxBackend(Protocol):
    """Runs jobs where they can do no harm."""

    def converse(
        self,
        request: bytes,
        job_output: JobOutput,
        *,
        seconds: float,
        ask: Ask | None = None,
        on_slot: Callable[[], None] = lambda: None,
    ) -> float: ...

    def report(self) -> list[Protection]: ...

    def close(self) -> None: ...


def waiting_seconds(handle: int) -> float:
    """Seconds that the first thread of a process has waited for a processor; 0 where the kernel does not tell."""
    try:
        line = re.search(r"^Pid:\s*(\d+)$", Path(f"/proc/self/fdinfo/{handle}").read_text(), re.MULTILINE)
        return int(Path(f"/proc/{line.group(1)}/schedstat").read_text().split()[1]) / 1e9 if line else 0.0
    except (OSError, IndexError, ValueError):
        return 0.0


class JobExchange:
    """Writes the request and reads the streams, all at once, until `told` says how the job ended.

    `job` is the request's end, stdout, stderr, the records and a pidfd; `end` can be read when `told` has something.
    """

    def __init__(
        self,
        job: Sequence[int],
        end: int,
        told: Callable[[], dict[str, Any]],
        *,
        job_output: JobOutput,
        ask: Ask | None,
    ) -> None:
        self.inbox, self.out, self.err, self.result, self.handle = job
        self.end, self.told, self.job_output, self.ask = end, told, job_output, ask
        self.pending, self.last = b"", ask is None
        self.held = set(job)
        self.poll = select.poll()
        for descriptor in job[:4]:
            os.set_blocking(descriptor, False)
        for descriptor in (self.out, self.err, self.result, end):
            self.poll.register(descriptor, select.POLLIN)

    def hold(self, request: bytes, until: float) -> None:
        """The whole conversation; on return the job has ended, or its slot is no good. Its descriptors are closed."""
        self._queue(request + (END if self.last else b""))
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
        while not self.job_output.told:
            if not killed and not self.job_output.limit and time.monotonic() >= until:
                until = began + min(allowed + waiting_seconds(self.handle), MAX_STRETCH * allowed)
            if not killed and (self.job_output.limit or time.monotonic() >= until):
                self.job_output.limit = self.job_output.limit or "time"
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
            self.job_output.told = self.told()
            return bool(self.job_output.told)
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
            self.job_output.text(self.job_output.stdout if descriptor == self.out else self.job_output.stderr, part)
        elif self.job_output.data(part) and self.ask is not None and not self.last:
            more = self.ask(self.job_output.records)
            self.last = more is None
            self._queue(END if more is None else more)
        return bool(part)

    def _queue(self, more: bytes) -> None:
        self.pending += more
        if self.pending:
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
