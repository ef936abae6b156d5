"""The sandbox: latency cold and warm, programs a second, memory a slot, and a soak of which a fifth is hostile.

Beside it a plain subprocess (no protection at all).
`cold` builds a slot (namespaces, root, cgroup, fork) for the program; `from nothing` starts the interpreter too.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.form import Row, main, note, row, say
from benchmarks.hostile.soak import below, megabytes, soaked
from hone.reward.sandbox.limits import BackendOptions, interpreter
from hone.reward.sandbox.native import NativeSandbox
from hone.reward.sandbox.protocol import JobOutput, frame
from hone.reward.sandbox.sandbox import Call, Program, Returned, Sandbox, SandboxLimits

SOURCE = "def add(a, b): return a + b"
PROGRAM = Program(source=SOURCE, calls=[Call("add", (1, 2))])
CLIENTS = (1, 2, 4, 16)


def quantile(taken: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return 1000 * sorted(taken)[min(int(len(taken) * share), len(taken) - 1)]


def timed(run: Callable[[], None], times: int) -> list[float]:
    """Seconds of each run, one after the other."""
    taken = list[float]()
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def once(sandbox: Sandbox) -> None:
    """One small program, whose answer must be right."""
    if sandbox.run(PROGRAM).results != (Returned(3),):
        raise AssertionError("a wrong answer")


def plain() -> None:
    """The same program in a plain interpreter, its printed answer believed."""
    done = subprocess.run([interpreter(), "-I", "-S", "-c", f"{SOURCE}\nprint(add(1, 2))"], capture_output=True)
    assert done.stdout == b"3\n"


def rate(run: Callable[[], None], clients: int, times: int) -> float:
    """Runs a second of this many clients together."""
    threads = [threading.Thread(target=timed, args=(run, times // clients)) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times // clients * clients / (time.perf_counter() - start)


def cold(times: int) -> list[float]:
    """A slot built for one program, the sandbox being open."""
    limits = SandboxLimits()
    pool = NativeSandbox(BackendOptions(limits=limits, slots=1, python=interpreter(), packages=()))
    order = {"source": SOURCE, "stdin": None, "file": "", "build": [], "run": []}
    request = frame(order) + frame({"name": "add", "args": [1, 2], "kwargs": {}})
    taken = list[float]()
    for _ in range(times):
        start = time.perf_counter()
        slot = pool.open_slot()
        job_output = JobOutput(output=1000, result=1000, most=2)
        slot.run(request, job_output, seconds=5)
        taken.append(time.perf_counter() - start)
        assert job_output.records[-1] == {"value": 3}
        slot.close()
    pool.close()
    return taken


def from_nothing() -> None:
    """Everything: the server's interpreter, a slot, one program."""
    with Sandbox(slots=1) as sandbox:
        once(sandbox)


def memory(slots: int) -> float:
    """Megabytes of a server with this many slots, each with a job that waits."""
    others = set(below(os.getpid()))
    limits = SandboxLimits()
    pool = NativeSandbox(BackendOptions(limits=limits, slots=1, python=interpreter(), packages=()))
    opened = [pool.open_slot() for _ in range(slots - 1)]
    for slot in opened:
        slot.ready()
    used = megabytes([pid for pid in below(os.getpid()) if pid not in others])
    for slot in opened:
        slot.close()
    pool.close()
    return used


def processor(times: int) -> float:
    """Milliseconds of CPU a run, client, slot and job together: what a busy machine does not blur."""
    with Sandbox(slots=1) as sandbox:
        timed(lambda: once(sandbox), 10)
        before = _ticks()
        timed(lambda: once(sandbox), times)
        return (_ticks() - before) / times


def _ticks() -> float:
    """Milliseconds of CPU that this process and its descendants, living and reaped, have used."""
    total = 0
    for pid in (os.getpid(), *below(os.getpid())):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        total += sum(map(int, fields[11:15]))
    return 1000 * total / os.sysconf("SC_CLK_TCK")


def measure(quick: bool, soak: int) -> Sequence[Row]:
    """All of it; --quick has fewer runs and a short soak; --soak N is N jobs of that and nothing else."""
    if soak:
        return soaked(soak)
    times = 100 if quick else 400
    rows = list[Row]()
    with Sandbox(slots=2) as sandbox:
        timed(lambda: once(sandbox), 10)
        warm = timed(lambda: once(sandbox), times)
    p50, p99 = quantile(warm, 0.5), quantile(warm, 0.99)
    rows.append(row("warm p50", p50, unit="ms", goal="<= 8", ok=p50 <= 8))
    rows.append(row("warm p99", p99, unit="ms", goal="<= 50", ok=p99 <= 50))
    built = cold(times // 4)
    rows.append(row("cold p50", quantile(built, 0.5), unit="ms", goal="<= 25", ok=quantile(built, 0.5) <= 25))
    rows.append(note("cold p99", quantile(built, 0.99), unit="ms"))
    rows.append(note("from nothing p50", quantile(timed(from_nothing, 10), 0.5), unit="ms"))
    rates = {}
    for clients in CLIENTS:
        with Sandbox(slots=min(clients, 4)) as sandbox:
            timed(lambda s=sandbox: once(s), 8)
            rates[clients] = rate(lambda s=sandbox: once(s), clients, times)
            say(f"{clients} clients: {rates[clients]:.0f} a second")
        timed(plain, 8)
        peer = rate(plain, clients, times)
        rows.append(note(f"runs a second, {clients} clients", rates[clients], unit="1/s", peer=peer))
    best = max(rates.values())
    rows.append(row("runs a second, at best", best, unit="1/s", goal=">= 150", ok=best >= 150))
    rows.append(note("CPU a run", processor(times), unit="ms"))
    rows.append(note("memory a slot", (memory(9) - memory(1)) / 8, unit="MB"))
    rows.append(note("plain subprocess p50", quantile(timed(plain, times // 4), 0.5), unit="ms"))
    return [*rows, *soaked(400 if quick else 10_000)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__ or "", counts={"soak": "only the soak, of this many jobs"}))
