"""Programs that a model might write when its reward depends on running code, and the world they are let loose on.

The task of all: `add(a, b)` returns `a + b`. Each file says what its programs want. A block begins with `#### ID name`
and marks in brackets: `ok` solves the task, `long` is ended by the clock alone, `heavy` takes its time,
`control` is harmless and must succeed where there is no sandbox.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hone.reward.sandbox.sandbox import Call, Finished, Program, Returned, Sandbox

FOLDER = Path(__file__).parent
INPUTS = ((17, 25), (-6, -7), (0, 41), (1000, 2), (9, -9))
SECRET = "HONE_FAKE_SECRET"
_HEAD = re.compile(r"^#### (\w+) (.+?)(?: \[([a-z ]+)\])?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """One program; `kind` is R (resources), C (escapes), V (verdicts) or H (honest)."""

    id: str
    name: str
    code: str
    marks: frozenset[str]

    @property
    def kind(self) -> str:
        return self.id[0]


def read(path: Path) -> list[Hostile]:
    """The programs of one file."""
    _, *parts = _HEAD.split(path.read_text(encoding="utf-8"))
    blocks = zip(*[iter(parts)] * 4, strict=True)
    return [
        Hostile(id=id, name=name, marks=frozenset((marks or "").split()), code=code.strip() + "\n")
        for id, name, marks, code in blocks
    ]


PROGRAMS = [program for path in sorted(FOLDER.glob("*.txt")) for program in read(path)]


@contextmanager
def world() -> Iterator[dict[str, str]]:
    """What there is to reach on the host: a canary, listeners of our own, a fake secret; yields the placeholders."""
    with ExitStack() as stack:
        short = None if len(tempfile.gettempdir()) < 70 else "/tmp"  # a socket's path has at most 107 characters
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="canary", dir=short))
        Path(folder, ".ssh").mkdir()
        Path(folder, ".ssh", "id_rsa").write_text("canary")
        Path(folder, "expected.json").write_text("[42]")
        named, abstract = f"{folder}/socket", f"hone-probe-{os.getpid()}"
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (named, f"\0{abstract}"):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(address)
            unix.listen()
        os.environ[SECRET] = "canary"
        stack.callback(os.environ.pop, SECRET, None)
        yield {"{CANARY}": folder, "{PORT}": str(tcp.getsockname()[1]), "{ABS}": abstract}


def aimed(program: Hostile, places: dict[str, str]) -> str:
    """Its text with the placeholders filled in."""
    code = program.code
    for name, value in places.items():
        code = code.replace(name, value)
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    passed: bool
    escaped: bool
    finished: Finished


def judge(sandbox: Sandbox, code: str) -> Verdict:
    """The verdict, from returned values alone; what it printed only tells an escape."""
    done = sandbox.run(Program(source=code, calls=[Call("add", pair) for pair in INPUTS]))
    passed = done.results == tuple(Returned(a + b) for a, b in INPUTS) and all(
        type(r.value) is int for r in done.results if isinstance(r, Returned)
    )
    return Verdict(passed=passed, escaped=b"ESCAPED" in done.stdout + done.stderr, finished=done)


def unsandboxed(code: str) -> str:
    """What a harmless probe prints in a plain interpreter: only for those marked `control`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    return done.stdout


def groups_of(process: int) -> list[str]:
    """The control groups that sandboxes of this process have; those that another removes meanwhile are passed over."""
    return [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"/hone-sandbox-{process}-" in path]
