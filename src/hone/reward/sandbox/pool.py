"""The native backend: slots of Hone's own, opened when they are wanted and used again, each job in a fresh fork."""

import contextlib
import os
import time
from collections import deque
from queue import Empty, SimpleQueue
from threading import Lock

from hone.reward.sandbox import cgroups as cgroups
from hone.reward.sandbox.limits import OWN_PROCESSES, Protection, Wanted, configuration
from hone.reward.sandbox.slots import Server, Slot
from hone.reward.sandbox.talk import GRACE, Ask, SandboxError, Talk

REMEDY = "open it as root, or allow user namespaces (sysctl user.max_user_namespaces; on Ubuntu also " + (
    "kernel.apparmor_restrict_unprivileged_userns=0), or install bubblewrap, or name a service with backend=URL"
)


class _Places:
    """Slots that are idle, the longest rested first; places for more, used before a slot that still prepares its
    next job; who waits is served in order."""

    def __init__(self, unopened: int) -> None:
        self._idle, self._unopened, self._lock = deque[Slot](), unopened, Lock()
        self._waiting = deque[SimpleQueue[Slot | None]]()

    def get(self, timeout: float | None = None) -> Slot | None:
        """An idle slot, or None for a place where one may be opened."""
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
        """Give a slot back, or the place of one that was ended."""
        with self._lock:
            if self._waiting:  # handed over, so that a thread that comes back at once does not push in front
                self._waiting.popleft().put(slot)
            elif slot is None:
                self._unopened += 1
            else:
                self._idle.append(slot)


class Pool:
    """Hone's own sandbox: a server, and slots in cgroups where there are any."""

    def __init__(self, wanted: Wanted, *, cgroup: bool = True, user: bool = True) -> None:
        self.wanted, self.user = wanted, user
        self.home = cgroups.find() if cgroup else None
        if self.home is not None:
            cgroups.sweep(self.home)
        self._server = self._serve()
        self._places = _Places(wanted.slots - 1)
        self._lock, self._closed, self._process = Lock(), False, os.getpid()
        try:
            first = self._first()
        except SandboxError as error:
            self._server.close()
            raise SandboxError(f"{str(error).rpartition(':')[0]}: {REMEDY}") from error
        self.proc = first.proc
        self._places.put(first)

    def _serve(self) -> Server:
        return Server(configuration(self.wanted, user=self.user, watched=self.home is None), self.wanted.python)

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
        """A slot with its cgroup, not among the places: who opens it closes it."""
        folders, limits = list[str](), self.wanted.limits
        if self.home is not None:
            processes = limits.processes + OWN_PROCESSES
            folders = self.home.make(memory=limits.memory, processes=processes, cores=limits.cores)
        return Slot(self._server, folders, watched=self.home is None)

    def talk(self, request: bytes, talk: Talk, *, seconds: float, ask: Ask | None = None) -> float:
        """Hold one conversation in a fresh job; the seconds it took, from request to the last process's end."""
        if os.getpid() != self._process:  # two that ask one slot would get each other's values
            raise SandboxError("the sandbox was opened before a fork: open one in the process that uses it")
        slot = self._places.get()
        used = None
        try:
            if self._closed:
                raise SandboxError("the sandbox is closed: open a new one")
            slot = self._living(slot)
            start = time.monotonic()
            slot.run(request, talk, seconds=seconds, ask=ask)
            used = slot if talk.told else None
            return time.monotonic() - start
        finally:
            if slot is not None and used is None:
                slot.close()
            self._places.put(used)

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
            slot = self._places.get(timeout=self.wanted.limits.seconds + 3 * GRACE)
            if slot is not None:
                slot.close()
        self._server.close()
        self._places.put(None)  # whoever still waits finds it closed

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
        return [*have, *cgroups.held_by(self.home, self.wanted.limits)]
