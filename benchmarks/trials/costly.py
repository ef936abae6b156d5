"""Answers that are costly to compare: what only the answer causes is a 0, what the gold answer or the machine causes is
invalid, and a process that gets no processor for a while turns no right answer into either."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.trials.case import Case
from hone.reward.verify.math import workers as math_workers
from hone.reward.verify.math.verdict import math_reward
from hone.types import Task

TITLE = "Answers that are costly to compare"
COSTLY = (  # each passes the guard, and needs more than a second of processor time, or breaks its process
    *(r"\sqrt{3000!+1}", r"\sqrt{2^{9999}+1}", r"\binom{3000}{1500}^{3000}", r"\lfloor e^{9999}\rfloor"),
    *(r"\sqrt{2999!+1}", r"\sqrt{2^{9998}+1}+1", r"\lfloor 10^{9999}\sqrt{2}\rfloor"),
)
STOPPED_SECONDS = 1.6


def _dodges(answer: str, gold: str) -> str | None:
    found = math_reward(f"\\boxed{{{answer}}}", Task(prompt="q", answer=gold))
    return None if found.value == 0 else f"{found.value} {found.reason}"


def _blamed(gold: str) -> str | None:
    found = math_reward(r"\boxed{\sqrt{2}}", Task(prompt="q", answer=gold))
    return None if found.value is None and "gold" in found.reason else f"{found.value} {found.reason}"


def leaves(process: int) -> list[int]:
    """The processes below it that have no children: those that compare."""
    children = dict[int, list[int]]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    below, found = [process], list[int]()
    while below:
        under = children.get(below.pop(), [])
        below += under
        found += [number for number in under if number not in children]
    return found


def _awake(processes: set[int]) -> None:
    for number in processes:
        with suppress(ProcessLookupError):  # ended meanwhile, by a limit on the clock
            os.kill(number, signal.SIGCONT)


def _stopped() -> str | None:
    """A right answer whose process stands still for a while, as on a machine that is busy with other things."""
    workers = math_workers.Workers()
    call = {"kind": "value", "gold": "2 \\sqrt { 3 }", "answer": "\\sqrt { 12 }"}
    before = {*leaves(os.getpid())}
    workers.ask({**call, "answer": "\\sqrt { 27 }"})
    found = {*leaves(os.getpid())} - before
    for number in found:
        os.kill(number, signal.SIGSTOP)
    timer = threading.Timer(STOPPED_SECONDS, _awake, [found])
    timer.start()
    start = time.monotonic()
    try:
        said = workers.ask(call).get("equal")
    finally:
        timer.join()
    waited = time.monotonic() - start >= STOPPED_SECONDS * 0.9
    return None if said is True and waited else f"{said}, stopped processes {len(found)}"


def cases(quick: bool) -> Iterator[Case]:
    """By who is to blame."""
    for answer in COSTLY[:1] if quick else COSTLY:
        for gold in ("5",) if quick else ("5", r"2\sqrt{3}", r"1, 7", "0 < x < 5"):
            asked = answer if "<" not in gold else f"0 < x < {answer}"
            asked = f"1, {answer}" if "," in gold else asked
            yield Case("costly answers score 0", f"{answer} for {gold}", lambda a=asked, g=gold: _dodges(a, g))
    for gold in COSTLY[:1] if quick else (*COSTLY[:2], *COSTLY[4:6]):
        yield Case("costly gold answers are invalid", gold, lambda g=gold: _blamed(g))
    yield Case("a busy machine refuses no right answer", "a process that is stopped for a while", _stopped)
