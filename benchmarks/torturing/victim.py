"""Runs in forked children: torch and Hone are imported once, so that a kill costs a fraction of a second."""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

import hone
from benchmarks.torturing.points import Points
from hone.cli import explain
from hone.config.recipe import Recipe

LIMIT = 60.0  # seconds after which a child hangs


@dataclass(slots=True)
class Told:
    """What became of a child."""

    code: int  # exit code, or minus the signal
    lines: list[str] = field(default_factory=list[str])
    said: str = ""  # on stderr
    seconds: float = 0.0
    hung: bool = False

    @property
    def words(self) -> str:
        """The last line on stderr."""
        return (self.said.strip().splitlines() or [""])[-1]

    @property
    def saved(self) -> int:
        """The last step whose save had returned."""
        return max((int(line.split()[1]) for line in self.lines if line.startswith("saved ")), default=0)

    @property
    def killed(self) -> str:
        """The kind of moment at which it killed itself, "" if it did not."""
        return next((line.split()[1] for line in self.lines if line.startswith("killed ")), "")

    @property
    def counts(self) -> dict[str, int]:
        """How many moments of each kind it had, if it ended by itself."""
        return next((json.loads(line[7:]) for line in self.lines if line.startswith("counts ")), {})


Prepare = Callable[[Points], None]  # what is done to the child before it runs


def start(recipe: Recipe, log: Path, *, kill: tuple[str, int] | None = None, prepare: Prepare | None = None) -> "Child":
    """Begin or continue the run in a child."""
    read, write = os.pipe()
    number = os.fork()
    if not number:
        os.close(read)
        _live(recipe, log, write, kill=kill, prepare=prepare)
    os.close(write)
    return Child(number, read, log)


def run(
    recipe: Recipe,
    log: Path,
    *,
    kill: tuple[str, int] | None = None,
    after: float | None = None,
    prepare: Prepare | None = None,
) -> Told:
    """The run in a child until it ends, is killed at that moment, or `after` so many seconds."""
    return start(recipe, log, kill=kill, prepare=prepare).wait(after=after)


def _live(recipe: Recipe, log: Path, tell: int, *, kill: tuple[str, int] | None, prepare: Prepare | None) -> NoReturn:
    """The child: never returns."""
    code = 1
    try:
        nothing, said = os.open(os.devnull, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, target in ((0, nothing), (1, nothing), (2, said)):
            os.dup2(target, stream)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)
        points = Points(recipe.run_dir, lambda line: _tell(tell, line), kill)
        points.install()
        if prepare is not None:
            prepare(points)
        _tell(tell, "ready")
        code = _ended(recipe)
        _tell(tell, f"counts {json.dumps(points.counts)}")
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stderr.flush()
        finally:  # whatever happens: a child that went on would be a second parent
            os._exit(code)


def _ended(recipe: Recipe) -> int:
    """As the command would: its exit code, and a line on stderr."""
    try:
        hone.run(recipe, resume=True)
    except Exception as error:
        code, message = explain(error)
        print(f"hone: {' '.join(message.split())}", file=sys.stderr)
        return code
    return 0


def _tell(handle: int, line: str) -> None:
    os.write(handle, f"{line}\n".encode())


class Child:
    """A run under way."""

    def __init__(self, number: int, pipe: int, log: Path) -> None:
        self.number, self.pipe, self.log = number, pipe, log
        self._text, self._since = b"", time.monotonic()

    def until(self, sign: str, *, seconds: float = LIMIT) -> bool:
        """Whether it has told this, before it ended."""
        end = time.monotonic() + seconds
        while sign.encode() not in self._text.splitlines() and self._more(end - time.monotonic()):
            continue
        return sign.encode() in self._text.splitlines()

    def wait(self, *, after: float | None = None) -> Told:
        """Until it ends; it is killed `after` so many seconds from when it was ready."""
        if after is not None and self.until("ready"):
            end = time.monotonic() + after
            while (left := end - time.monotonic()) > 0 and self._more(left):
                continue
            os.kill(self.number, signal.SIGKILL)  # it is not waited for yet, so that the number is nobody else's
        end = self._since + LIMIT
        while self._more(end - time.monotonic()):
            continue
        if hung := time.monotonic() >= end:
            os.kill(self.number, signal.SIGKILL)
        _, status = os.waitpid(self.number, 0)
        os.close(self.pipe)
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = self._text.decode().splitlines()
        return Told(os.waitstatus_to_exitcode(status), lines, said, time.monotonic() - self._since, hung)

    def _more(self, seconds: float) -> bool:
        """Read on; False at the end, or when the time is up."""
        if seconds <= 0 or not select.select([self.pipe], [], [], seconds)[0]:
            return False
        part = os.read(self.pipe, 1 << 16)
        self._text += part
        return bool(part)
