"""What this machine can hold a program with, tried out: harmless probes, outside where they must work, then inside."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hone.reward.sandbox.limits import Protection
from hone.reward.sandbox.sandbox import Call, Program, Returned, Sandbox

SECRET = "HONE_DOCTOR_SECRET"
# Each prints REACHED where it gets at something. Only reading, and connecting to a listener of our own.
PROBES = {
    "a file of yours": "print(open('{file}').read())",
    "your environment": f"import os\nprint(os.environ['{SECRET}'])",
    "a service on this machine": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('REACHED')",
    "other processes": "import os\nif sum(name.isdigit() for name in os.listdir('/proc')) > 1: print('REACHED')",
    "other folders of the machine": "import os\nif os.path.isdir('/var/log'): print('REACHED')",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One probe: whether it reaches its goal without a sandbox (it must, or it proves nothing) and inside."""

    name: str
    outside: bool
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    protections: list[Protection]
    tried: list[Tried]
    milliseconds: float  # of a small program, the median

    @property
    def holds(self) -> bool:
        return not any(t.inside for t in self.tried)


@contextmanager
def _goals() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        path = Path(folder, "canary")
        path.write_text("REACHED")
        os.environ[SECRET] = "REACHED"
        try:
            yield {"{file}": str(path), "{port}": str(server.getsockname()[1])}
        finally:
            del os.environ[SECRET]


def _aimed(code: str, goals: Mapping[str, str]) -> str:
    for name, value in goals.items():
        code = code.replace(name, value)
    return code


def _outside(code: str) -> bool:
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=60)
    return b"REACHED" in done.stdout


def examine(backend: str = "native") -> Findings:
    """Open a sandbox, say what it is made of, and try it."""
    with _goals() as goals, Sandbox(backend=backend) as sandbox:
        tried = list[Tried]()
        for name, code in PROBES.items():
            aimed = _aimed(code, goals)
            inside = b"REACHED" in sandbox.run(Program(source=aimed)).stdout
            tried.append(Tried(name=name, outside=_outside(aimed), inside=inside))
        return Findings(protections=sandbox.report(), tried=tried, milliseconds=1000 * _speed(sandbox))


def _speed(sandbox: Sandbox) -> float:
    taken = list[float]()
    for n in range(20):
        start = time.perf_counter()
        done = sandbox.run(Program(source="def f(x): return x + 1", calls=[Call("f", (n,))]))
        taken.append(time.perf_counter() - start)
        assert done.results == (Returned(n + 1),), "the sandbox returns what the program did"
    return median(taken)
