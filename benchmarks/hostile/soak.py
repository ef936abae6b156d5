"""A soak: many jobs, a fifth of them hostile; every verdict has to be right, and nothing may grow or be left behind."""

import gc
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.form import Row, note, row, say
from benchmarks.hostile import PROGRAMS, Hostile, aimed, groups_of, judge, world
from hone.reward.sandbox.sandbox import Sandbox, SandboxError, SandboxLimits

CLIENTS, STRETCHES = 2, 10
HONEST = [p for p in PROGRAMS if p.kind == "H"]
SLOW = [p for p in PROGRAMS if p.kind != "H" and p.marks & {"long", "heavy"}]
FAST = [p for p in PROGRAMS if p.kind != "H" and not p.marks & {"long", "heavy"}]


def below(pid: int) -> list[int]:
    """Every descendant of a process."""
    parents = dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents.setdefault(int(fields[1]), []).append(int(path.name))
    found, left = list[int](), [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def megabytes(pids: Iterable[int], *, kind: str = "Pss") -> float:
    """Of these processes: Pss counts shared pages in part, Private_Dirty what each alone has written."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))
    return total / 1024


def drawn(rng: random.Random) -> Hostile:
    """An honest program four times of five; long and heavy ones now and then."""
    if rng.random() < 0.8:
        return rng.choice(HONEST)
    return rng.choice(SLOW if rng.random() < 0.03 else FAST)


class Soak:
    """What a soak has found so far."""

    def __init__(self, sandbox: Sandbox, places: dict[str, str]) -> None:
        self.sandbox, self.places = sandbox, places
        self.wrong, self.done, self.hostile = list[str](), 0, 0
        self.lock, self.marks = threading.Lock(), list[tuple[float, float, int, int]]()

    def work(self, seed: int, jobs: int) -> None:
        """One client."""
        rng = random.Random(seed)
        for program in (drawn(rng) for _ in range(jobs)):
            fault = self.fault(program)
            with self.lock:
                self.done += 1
                self.hostile += program.kind != "H"
                self.wrong += [f"{program.id}: {fault}"] if fault else []

    def fault(self, program: Hostile) -> str:
        """What the sandbox did wrong with a program, or nothing."""
        try:
            verdict = judge(self.sandbox, aimed(program, self.places))
        except SandboxError as error:
            return f"no verdict: {error}"
        right = not verdict.escaped and verdict.passed == ("ok" in program.marks)
        return "" if right else f"passed {verdict.passed}, {verdict.finished}"

    def stretch(self, number: int, jobs: int) -> None:
        """Some jobs from two clients, and then, while nothing runs, what there is of everything."""
        given = [(CLIENTS * number + client, jobs // CLIENTS) for client in range(CLIENTS)]
        threads = [threading.Thread(target=self.work, args=arguments) for arguments in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.5)  # each slot has its next job ready again
        gc.collect()
        own, family = (os.getpid(),), below(os.getpid())
        used = [megabytes(pids, kind="Private_Dirty") for pids in (own, family)]
        self.marks.append((used[0], used[1], len(os.listdir("/proc/self/fd")), len(family)))
        say(f"  soak {self.done}: client {used[0]:.0f} MB, sandbox {used[1]:.1f} MB, {self.marks[-1][2:]}")


def soaked(jobs: int) -> list[Row]:
    """The soak and its goals: growth from the first tenth to the last."""
    start = time.perf_counter()
    with world() as places, Sandbox(limits=SandboxLimits(seconds=2), slots=CLIENTS) as sandbox:
        soak = Soak(sandbox, places)
        for number in range(STRETCHES):
            soak.stretch(number, jobs // STRETCHES)
    seconds = time.perf_counter() - start
    for text in soak.wrong[:10]:
        say("wrong:", text)
    client, family, descriptors, processes = (
        last - first for first, last in zip(soak.marks[0], soak.marks[-1], strict=True)
    )
    left = len(groups_of(os.getpid()))
    return [
        note("soak: jobs", soak.done, unit="jobs"),
        note("soak: hostile jobs", soak.hostile, unit="jobs"),
        note("soak: jobs a second", soak.done / seconds, unit="1/s"),
        row("soak: wrong verdicts", len(soak.wrong), unit="jobs", goal="0", ok=not soak.wrong),
        row("soak: the client's memory grew by", client, unit="MB", goal="< 10", ok=client < 10),
        row("soak: the sandbox's memory grew by", family, unit="MB", goal="< 2", ok=family < 2),
        row("soak: descriptors grew by", descriptors, unit="", goal="<= 0", ok=descriptors <= 0),
        row("soak: processes grew by", processes, unit="", goal="<= 0", ok=processes <= 0),
        row("soak: cgroups left", left, unit="", goal="0", ok=left == 0),
    ]
