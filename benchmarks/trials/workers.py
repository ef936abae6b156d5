"""Reward functions that take too much memory or leave processes behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.trials.case import Case
from hone.reward.workers.reward_worker import in_workers
from hone.types import Outcome, Rollout

TITLE = "Reward functions that take too much or leave something behind"
MEMORY = 0.15  # GiB
BOMB = 400 * 2**20  # bytes


def cases(quick: bool) -> Iterator[Case]:
    for name, leave in STARTED.items():
        for ending in ("the call ends", "its time is up", "it dies", "the pool ends", "the run is killed"):
            if quick and ending not in ("its time is up", "the run is killed"):
                continue
            yield Case("processes left behind", f"{name}, when {ending}", partial(_left, leave, ending))
    for name, take in TAKEN.items():
        yield Case("memory without end", name, partial(_taken, take))
    yield Case("memory without end", "what is within the limit counts", _modest)


# --- processes ---


def note(path: Path) -> None:
    """Say the number of this process, whole or not at all."""
    path.with_suffix(".new").write_text(f"{os.getpid()}\n")
    path.with_suffix(".new").rename(path)


def _child(path: Path) -> None:
    if os.fork() == 0:
        note(path)
        time.sleep(600)


def _session(path: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        note(path)
        time.sleep(600)


def daemon(path: Path) -> None:
    """Leave as daemons do: two forks and a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            note(path)
            time.sleep(600)
        os._exit(0)


def _program(path: Path) -> None:
    said = f"import os, time; open({str(path)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    subprocess.Popen(["setsid", sys.executable, "-c", said])


def _shell(path: Path) -> None:
    os.system(f"(sh -c 'echo $$ > {path}; exec sleep 600' &) >/dev/null 2>&1")


STARTED: dict[str, Callable[[Path], None]] = {
    "a child": _child,
    "a child in a session of its own": _session,
    "a daemon": daemon,
    "another program": _program,
    "a shell's background job": _shell,
}


def _left(leave: Callable[[Path], None], ending: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "process")
        alive = _play(leave, ending, path)
        pid = _number(path)
        if not alive or _eventually(lambda: not _running(pid)):
            return None
        os.kill(pid, signal.SIGKILL)
        return f"process {pid} was still there"


def _play(leave: Callable[[Path], None], ending: str, path: Path) -> bool:
    """The reward is called and ends; False: what it left may still live."""

    def reward(completion: str) -> float:
        leave(path)
        _number(path)
        if ending in ("its time is up", "the run is killed"):
            time.sleep(600)
        if ending == "it dies":
            os._exit(3)
        return 1.0

    if ending == "the run is killed":
        program = os.fork()
        if not program:
            (made,) = in_workers([reward], seconds=600.0, workers=1)
            _scored(made)
            os._exit(0)
        _number(path)
        os.kill(program, signal.SIGKILL)
        os.waitpid(program, 0)
        return True
    (made,) = in_workers([reward], seconds=2.0, workers=1)
    _scored(made)
    if ending == "the pool ends":
        made.pool.close()  # type: ignore[attr-defined]
        return True
    time.sleep(0.5 if ending == "the call ends" else 0.0)
    # a child that its worker still has may serve the next call: only what has no parent is left behind
    return not (ending == "the call ends" and leave in (_child, _session, _program))


def _number(path: Path) -> int:
    if not _eventually(lambda: path.exists() and path.read_text().endswith("\n")):
        raise TimeoutError("the process did not begin")
    return int(path.read_text())


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _eventually(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


# --- memory ---


def _one_piece(size: int) -> int:
    return len(bytearray(b"x") * size)


def _small_pieces(size: int) -> int:
    return len([os.urandom(2**16) for _ in range(size >> 16)])


def _children(size: int) -> int:
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(b"x") * (size // 8)
            time.sleep(600)
            os._exit(len(held) & 1)
    time.sleep(600)
    return 0


def _arrays(size: int) -> int:
    import numpy as np

    return int(np.ones(size, dtype=np.uint8).sum())


TAKEN: dict[str, Callable[[int], int]] = {
    "in one piece": _one_piece,
    "in small pieces": _small_pieces,
    "in an array": _arrays,
    "in eight children": _children,
}


def _taken(take: Callable[[int], int]) -> str | None:
    def reward(completion: str) -> float:
        return float(take(BOMB)) if completion == "much" else 1.0

    (made,) = in_workers([reward], seconds=20.0, workers=1, memory=MEMORY)
    before, much, after = _scored(made, "little", "much", "little")
    if (before.value, after.value) != (1.0, 1.0):
        return f"others were {before} and {after}"
    if much.value is not None or "train.reward_memory" not in much.reason:
        return f"its outcome was {much}"
    return None


def _modest() -> str | None:
    (made,) = in_workers([lambda completion: float(_one_piece(BOMB // 8))], seconds=20.0, workers=1, memory=MEMORY)
    (found,) = _scored(made)
    return None if found.value == BOMB // 8 else f"its outcome was {found}"


def _scored(reward: Callable[[list[Rollout]], list[Outcome]], *texts: str) -> list[Outcome]:
    return reward([Rollout(tokens=[1], mask=[True], text=text) for text in texts or ("x",)])
