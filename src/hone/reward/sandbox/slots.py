"""The client's side of Hone's own wall: starts the server, opens slots, and talks with one job at a time in each."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from hone.reward.sandbox import cgroups as cgroups
from hone.reward.sandbox.job import ENVIRONMENT
from hone.reward.sandbox.talk import CHUNK, GRACE, Ask, Conversation, SandboxError, Talk, await_lock, readable
from hone.reward.sandbox.wall import remove_groups

START = "import sys; sys.path.insert(0, {home!r}); from hone.reward.sandbox import inside as s; s.serve({number})"
HOME = str(Path(__file__).parents[3])


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
