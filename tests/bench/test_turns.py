"""Two sides in processes of their own take turns, and neither outlives the benchmark."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.learning.turns import Clock, apart, run
from hone.errors import HoneError

TURNS, STRETCH, WARM = 3, 2, 0.4


def note(log: Path, *words: object) -> None:
    with log.open("a") as file:
        print(*words, file=file)


def works(log: Path, name: str, seconds: float, clock: Clock) -> None:
    """Tells what it does, and with which process."""
    times = iter([max(WARM, seconds)] * clock.stretch + [seconds] * clock.iterations)

    def step() -> None:
        note(log, name, os.getpid())
        time.sleep(next(times))

    run(step, clock)
    note(log, name, "ends")


def fails(clock: Clock) -> None:
    clock.begin()
    raise RuntimeError("no more tokens\nand a second line")


def dies(clock: Clock) -> None:
    clock.begin()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[float, float]], list[list[str]]]:
    """The times of two sides, and what they noted."""
    log = tmp_path_factory.mktemp("turns") / "log"
    sides = {"a": partial(works, log, "a", 0.01), "b": partial(works, log, "b", 0.03)}
    taken = apart(sides, turns=TURNS, stretch=STRETCH)
    return taken, [line.split() for line in log.read_text().splitlines()]


def test_turns_are_of_equal_stretches_and_nobody_works_in_anothers(played):
    names = [name for name, what in played[1] if what != "ends"]
    assert names == (["a"] * STRETCH + ["b"] * STRETCH) * (TURNS + 1)
    assert sorted(played[1][-2:]) == [["a", "ends"], ["b", "ends"]]  # after the last turn of all


def test_each_side_has_a_process_of_its_own(played):
    pids = {(name, what) for name, what in played[1] if what != "ends"}
    assert len(pids) == 2
    assert len({pid for _, pid in pids} | {str(os.getpid())}) == 3


def test_times_are_of_one_iteration_without_the_turn_that_warms_up_and_the_wait(played):
    (a, a_cpu), (b, b_cpu) = played[0]
    assert 0.01 <= a < WARM > a_cpu  # so long was the first turn's
    assert 0.03 <= b < WARM > b_cpu


def test_a_side_that_fails_is_named_in_one_line_with_its_traceback_on_stderr(capfd, tmp_path):
    with pytest.raises(HoneError, match=r"^b failed: RuntimeError: no more tokens$"):
        apart({"a": partial(works, tmp_path / "log", "a", 0.01), "b": fails}, turns=1)
    assert 'raise RuntimeError("no more tokens' in capfd.readouterr().err


def test_a_process_that_is_killed_is_told():
    with pytest.raises(HoneError, match="b failed: its process ended with -9"):
        apart({"b": dies}, turns=1)


ENDLESS = """
import os, sys
from functools import partial
from pathlib import Path
from test_turns import works
from benchmarks.learning.turns import apart

if __name__ == "__main__":
    from benchmarks.form import main, note  # loads torch

    def measure(quick):
        yield note("a number", 1.5, unit="ms")
        apart({"a": partial(works, Path(os.environ["LOG"]), "a", 60.0)}, turns=1)

    sys.exit(main(measure, ""))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_side_at_work_ends_with_the_benchmark(how: signal.Signals, tmp_path):
    program, log = tmp_path / "endless.py", tmp_path / "log"
    program.write_text(ENDLESS)
    found = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": found, "LOG": str(log)}
    run = subprocess.Popen([sys.executable, str(program)], env=environment, stdout=subprocess.PIPE, text=True)
    until(lambda: log.is_file() and log.read_text().endswith("\n"))
    run.send_signal(how)
    out, _ = run.communicate()
    assert run.returncode == {signal.SIGTERM: 1, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -signal.SIGKILL}[how]
    assert ("a number" in out) is (how is signal.SIGTERM)
    until(lambda: not alive(int(log.read_text().split()[1])))


def until(reached) -> None:
    while not reached():
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc").is_dir() else True
    )
