"""Programs that nobody has read, run where they can do no harm; what they return comes back as data.

    with Sandbox() as sandbox:
        done = sandbox.run(Program(source="def add(a, b): return a + b", calls=[Call("add", (1, 2))]))
        done.results  # (Returned(3),)

A program sees no network, no file of the machine but its interpreters, no other process and no environment; time, CPU,
memory, processes, files and output are bounded. What the machine cannot give is replaced or refused, and `report()`
and `hone sandbox doctor` say which. Printed text and exit codes are only ever data: who judges, judges outside.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Self

from hone.errors import HoneError
from hone.reward.sandbox.limits import BackendOptions, Protection, SandboxLimits, interpreter
from hone.reward.sandbox.native import NativeSandbox
from hone.reward.sandbox.protocol import Ask, JobOutput, SandboxBackend, SandboxError, frame
from hone.reward.sandbox.remote import RemoteBackend

__all__ = ["Call", "Finished", "Language", "Program", "Raised", "Returned", "Sandbox", "SandboxError", "SandboxLimits"]


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the program and what to call it with: plain values."""

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How a program that is not Python is built and run, in /tmp; interpreters and compilers are the machine's."""

    file: str
    run: Sequence[str]
    build: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A module whose functions are called, or with `stdin` a script that reads it and prints."""

    source: str
    calls: Sequence[Call] = ()
    stdin: str | bytes | None = None
    language: Language | None = None  # None: Python


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call returned: a value of plain types."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """What a call raised, as text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a program ended. Everything but `limit`, `seconds` and `cpu` is the program's word."""

    stdout: bytes
    stderr: bytes
    results: tuple[Returned | Raised, ...]  # one a call, as far as it got
    loaded: bool  # the module was read, or the script ran, to its end
    error: str  # why it was not
    limit: str  # "", or the limit that ended it: time, cpu, memory, processes, output, result
    status: int | None  # the exit code, or minus the signal
    seconds: float  # on the clock, from request to the last process's end
    cpu: float
    memory: int  # the most resident bytes of one process


def order_of(program: Program) -> dict[str, Any]:
    """The first message to a job."""
    language, stdin = program.language, program.stdin
    return {
        "source": program.source,
        "stdin": stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else stdin,
        "file": language.file if language else "",
        "build": [list(command) for command in language.build] if language else [],
        "run": list(language.run) if language else [],
    }


def call_frame(call: Call) -> bytes:
    """A call of one of the program's functions, as a frame of the request."""
    return frame({"name": call.name, "args": list(call.args), "kwargs": dict(call.kwargs)})


def _finished(job_output: JobOutput, seconds: float, *, asked: bool) -> Finished:
    """What came from a job. A record out of place means that the program wrote to the channel: none counts then.

    asked: whoever held the conversation has seen its records, and only how the module was loaded is told here.
    """
    records = [r for r in job_output.records if "loaded" in r][:1] if asked else job_output.records
    loaded, *answers = records or [{"loaded": False, "error": ""}]
    limit = job_output.limit or ("result" if job_output.broken else "")
    good = "loaded" in loaded and all(set(a) in ({"value"}, {"error"}) for a in answers) and limit != "result"
    results = [Returned(a["value"]) if "value" in a else Raised(str(a["error"])) for a in answers if good]
    return Finished(
        stdout=bytes(job_output.stdout),
        stderr=bytes(job_output.stderr),
        results=tuple(results),
        loaded=good and loaded["loaded"] is True,
        error=str(loaded.get("error", "")) if good else "the program wrote to the channel of its results",
        limit=limit,
        status=job_output.told.get("status"),
        seconds=seconds,
        cpu=job_output.told.get("cpu", 0.0),
        memory=job_output.told.get("rss", 0),
    )


def open_backend(name: str, wanted: BackendOptions) -> SandboxBackend:
    """The backend of that name, ready to run jobs."""
    if name == "native":
        return NativeSandbox(wanted)
    if name.startswith(("http://", "https://")):
        return RemoteBackend(name, wanted)
    raise HoneError(f"no sandbox backend {name!r}: use native or an http(s) URL")


class Sandbox:
    """Up to `slots` programs at once, from any number of threads.

    `backend`: "native" is Hone's own; an http(s) URL is a service that speaks docs/sandbox.md's protocol. `strict`
    refuses a machine on which a protection has to be replaced by a weaker one.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        backend: str | SandboxBackend = "native",
        slots: int = 0,
        python: str = "",
        packages: Sequence[str] = (),
        strict: bool = False,
    ) -> None:
        self.limits = limits or SandboxLimits()
        wanted = BackendOptions(
            limits=self.limits, slots=slots or os.cpu_count() or 1, python=python or interpreter(), packages=packages
        )
        self._backend = open_backend(backend, wanted) if isinstance(backend, str) else backend
        replaced = [p for p in self.report() if p.replaced]
        if strict and replaced:
            self.close()
            raise SandboxError(f"this machine lacks {replaced[0].name} ({replaced[0].how}): {replaced[0].remedy}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def report(self) -> list[Protection]:
        """What stands between a program and the machine, and by what means."""
        return self._backend.report()

    def run(self, program: Program, *, seconds: float | None = None) -> Finished:
        """Run one program in a fresh job; `seconds` can only shorten the limit."""
        if program.calls and (program.language or program.stdin is not None):
            raise HoneError("functions can be called in a Python module only: give calls, or stdin, or a language")
        frames = [frame(order_of(program)), *map(call_frame, program.calls)]
        return self.converse(b"".join(frames), most=len(frames), seconds=seconds)

    def converse(
        self,
        request: bytes,
        *,
        most: int,
        seconds: float | None = None,
        ask: Ask | None = None,
        on_slot: Callable[[], None] = lambda: None,
    ) -> Finished:
        """A conversation with one job: `ask` sees the records so far and says what to send next.

        on_slot: called when the job has one of the slots, before its clock starts.
        """
        if seconds is not None and not seconds > 0:
            raise HoneError(f"a program is given {seconds} seconds: give a number above 0")
        job_output = JobOutput(output=self.limits.output, result=self.limits.result, most=most)
        limit = min(seconds or inf, self.limits.seconds)
        taken = self._backend.converse(request, job_output, seconds=limit, ask=ask, on_slot=on_slot)
        return _finished(job_output, taken, asked=ask is not None)

    def close(self) -> None:
        """Wait for the programs that run, and end everything."""
        self._backend.close()
