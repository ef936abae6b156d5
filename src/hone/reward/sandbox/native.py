"""The native backend: a server's slots, opened when they are wanted and used again, each job in a fresh fork."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from hone.reward.sandbox import cgroups
from hone.reward.sandbox.job import ENVIRONMENT
from hone.reward.sandbox.limits import OWN_PROCESSES, BackendOptions, Protection, configuration
from hone.reward.sandbox.namespaces import remove_groups
from hone.reward.sandbox.protocol import (
    CHUNK,
    GRACE,
    MAX_STRETCH,
    Ask,
    JobExchange,
    JobOutput,
    SandboxError,
    await_lock,
    readable,
)

START = "import sys; sys.path.insert(0, {home!r}); from hone.reward.sandbox import server; server.serve({number})"
HOME = str(Path(__file__).parents[3])


class SandboxServer:
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


class Slot:
    """One place for jobs, one after the other; each is forked before it is wanted."""

    def __init__(self, server: SandboxServer, folders: Sequence[str], *, watched: bool) -> None:
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
            text, self._job, _, _ = socket.recv_fds(self._control, 1 << 16, 5, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"a slot of the sandbox did not start: {error}: run `hone sandbox doctor`") from error
        told = json.loads(text or '{"failed": "it ended"}')
        if "failed" in told:
            raise SandboxError(f"a slot of the sandbox did not start: {told['failed']}: run `hone sandbox doctor`")
        self.proc = told["proc"]
        await_lock(self._job)

    def prepared(self) -> bool:
        """Whether it has said that a job waits, so that `ready` does not have to wait for it."""
        return bool(self._job) or bool(readable(self._control.fileno()))

    def alive(self) -> bool:
        """Whether it is there to be used: an idle slot says nothing after its job is ready."""
        self.ready()
        return not readable(self._control.fileno())

    def run(self, request: bytes, job_output: JobOutput, *, seconds: float, ask: Ask | None = None) -> None:
        """Give the waiting job its request, and listen until it has ended or is over a limit."""
        self.ready()
        job, self._job = self._job, []
        ended = cgroups.out_of_memory(self.folders)
        if self._watched:
            self._control.send(b"go")
        exchange = JobExchange(job, self._control.fileno(), self._told, job_output=job_output, ask=ask)
        exchange.hold(request, time.monotonic() + seconds)
        job_output.limit = job_output.limit or job_output.told.get("over", "")
        if not job_output.limit and job_output.told.get("status", -signal.SIGKILL) == -signal.SIGKILL:
            job_output.limit = "memory" if cgroups.out_of_memory(self.folders) > ended else ""
        if not job_output.told and not job_output.limit:
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


REMEDY = "open it as root, or allow user namespaces (sysctl user.max_user_namespaces; on Ubuntu also " + (
    "kernel.apparmor_restrict_unprivileged_userns=0), or name a service with backend=URL"
)


class _SlotQueue:
    """The idle slots, longest idle first, and how many more may be opened.

    A new slot is opened rather than waiting for one that still prepares its next job. Threads that wait are served in
    order."""

    def __init__(self, unopened: int) -> None:
        self._idle, self._unopened, self._lock = deque[Slot](), unopened, Lock()
        self._waiting = deque[SimpleQueue[Slot | None]]()

    def get(self, timeout: float | None = None) -> Slot | None:
        """An idle slot; None: the caller may open one."""
        with self._lock:
            if self._idle and (self._idle[0].prepared() or not self._unopened):
                return self._idle.popleft()
            if self._unopened:
                self._unopened -= 1
                return None
            turn = SimpleQueue[Slot | None]()
            self._waiting.append(turn)
        try:
            return turn.get(timeout=timeout)
        except Empty:
            raise SandboxError("a program does not end: the machine may be overloaded; try again") from None

    def put(self, slot: Slot | None) -> None:
        """Give a slot back; None: it was ended, and another may be opened."""
        with self._lock:
            if self._waiting:  # handed over, so that a thread that comes back at once does not push in front
                self._waiting.popleft().put(slot)
            elif slot is None:
                self._unopened += 1
            else:
                self._idle.append(slot)


class NativeSandbox:
    """Hone's own sandbox: a server, and slots in cgroups where there are any."""

    def __init__(self, wanted: BackendOptions, *, cgroup: bool = True, user: bool = True) -> None:
        self.wanted, self.user = wanted, user
        self.home = cgroups.find() if cgroup else None
        if self.home is not None:
            cgroups.sweep(self.home)
        self._server = self._serve()
        self._slot_queue = _SlotQueue(wanted.slots - 1)
        self._lock, self._closed, self._process = Lock(), False, os.getpid()
        try:
            first = self._first()
        except SandboxError as error:
            self._server.close()
            raise SandboxError(f"{str(error).rpartition(':')[0]}: {REMEDY}") from error
        self.proc = first.proc
        self._slot_queue.put(first)

    def _serve(self) -> SandboxServer:
        return SandboxServer(configuration(self.wanted, user=self.user, watched=self.home is None), self.wanted.python)

    def _first(self) -> Slot:
        """A slot that works. Root can do without a user namespace: programs then run as a user of the machine's."""
        slot = self.open_slot()
        try:
            slot.ready()
        except SandboxError:
            slot.close()
            if not self.user or os.geteuid() != 0:
                raise
            self.user = False
            self._server.close()
            self._server = self._serve()
            slot = self.open_slot()
            slot.ready()
        if self.home is None and not slot.proc:
            slot.close()
            raise SandboxError("there are no cgroups and no /proc, so memory cannot be bounded: ")
        return slot

    def open_slot(self) -> Slot:
        """A slot with its cgroup. It is not in the queue: whoever opens it closes it."""
        folders, limits = list[str](), self.wanted.limits
        if self.home is not None:
            processes = limits.processes + OWN_PROCESSES
            folders = self.home.make(memory=limits.memory, processes=processes, cores=limits.cores)
        return Slot(self._server, folders, watched=self.home is None)

    def converse(
        self,
        request: bytes,
        job_output: JobOutput,
        *,
        seconds: float,
        ask: Ask | None = None,
        on_slot: Callable[[], None] = lambda: None,
    ) -> float:
        """Hold one exchange in a fresh job; the seconds it took, from request to the last process's end."""
        if os.getpid() != self._process:  # two that ask one slot would get each other's values
            raise SandboxError("the sandbox was opened before a fork: open one in the process that uses it")
        slot = self._slot_queue.get()
        used = None
        try:
            if self._closed:
                raise SandboxError("the sandbox is closed: open a new one")
            slot = self._living(slot)
            on_slot()
            start = time.monotonic()
            slot.run(request, job_output, seconds=seconds, ask=ask)
            used = slot if job_output.told else None
            return time.monotonic() - start
        finally:
            if slot is not None and used is None:
                slot.close()
            self._slot_queue.put(used)

    def _living(self, slot: Slot | None) -> Slot:
        """The slot, or another in its place if it has died since it was used."""
        if slot is not None:
            with contextlib.suppress(SandboxError):  # it died before its next job was ready
                if slot.alive():
                    return slot
            slot.close()
        slot = self.open_slot()
        slot.ready()
        return slot

    def close(self) -> None:
        """Wait for what runs, then end all slots and the server."""
        if os.getpid() != self._process:
            return  # it is the other process's to end
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in range(self.wanted.slots):
            slot = self._slot_queue.get(timeout=MAX_STRETCH * self.wanted.limits.seconds + 3 * GRACE)
            if slot is not None:
                slot.close()
        self._server.close()
        self._slot_queue.put(None)  # whoever still waits finds it closed

    def report(self) -> list[Protection]:
        """What every job is locked in by."""
        user = "a user namespace without rights" if self.user else "another user of the machine, without rights"
        have = [
            Protection(name="rights", how=f"{user}; no_new_privs, no capabilities, bounding set empty"),
            Protection(name="network", how="a network namespace without interfaces; sockets of the Unix family only"),
            Protection(name="files", how="a read-only root of interpreters and libraries; /tmp fresh, bounded"),
            Protection(name="processes in sight", how="a pid namespace a job; /proc shows its own" if self.proc else
                       "a pid namespace a job; no /proc, for the machine masks its own"),
            Protection(name="system calls", how="a list of allowed ones (seccomp)"),
            Protection(name="time, files, output", how="a clock outside, rlimits, bounded reads"),
        ]  # fmt: skip
        return [*have, *cgroups.protections_of(self.home, self.wanted.limits)]
