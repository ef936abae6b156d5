"""Fuzzing: `python -m tests.fuzz.run [NAMES] --seconds 60`, a process for each target.

With atheris installed it is guided by coverage of Hone's own code, and libFuzzer makes the inputs; without, or with
--plain, inputs are made by chance from the corpus. An input that breaks a target is left in runs/fuzz: mend the fault,
then move the input to tests/fuzz/corpus/NAME.
"""

import argparse
import hashlib
import importlib.util
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patience import patience

ROOT = Path(__file__).parents[2]
CORPUS, BROKEN = Path(__file__).parent / "corpus", ROOT / "runs" / "fuzz"
PATIENCE = 20  # seconds for one input
MEMORY = 4096  # MiB of a process


class TooSlow(BaseException):
    """One input took too long."""


def tried(target: Callable[[bytes], None], data: bytes) -> BaseException | None:
    """What came out that may not."""

    def late(number: int, frame: object) -> None:
        raise TooSlow(f"took more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(math.ceil(patience(PATIENCE)))
    try:
        target(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return None


def by_chance(name: str, seconds: float, *, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> int:
    """The corpus as it is, then inputs made from it until the time is up; how many. What breaks is raised."""
    from tests.fuzz.mutate import mutated
    from tests.fuzz.targets import TARGETS, corpus

    seeds, chance, count, until = corpus(name), random.Random(seed), 0, clock() + seconds
    while count < len(seeds) or clock() < until:
        data = seeds[count] if count < len(seeds) else mutated(chance.choice(seeds), seeds, chance)
        error = tried(TARGETS[name], data)
        count += 1
        if error is not None:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}; the input is {kept(name, data)}") from error
    return count


def kept(name: str, data: bytes) -> Path:
    """The file that holds an input which broke a target."""
    path = BROKEN / f"{name}-{hashlib.sha1(data).hexdigest()[:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def guided(name: str, seconds: int) -> None:
    """By coverage; does not return."""
    import atheris  # pyright: ignore[reportMissingImports]

    with atheris.instrument_imports(include=["hone"]):
        from tests.fuzz.targets import TARGETS

    def one(data: bytes) -> None:
        if (error := tried(TARGETS[name], data)) is not None:
            print(f"FAULT {name}: {type(error).__name__}: {error}; the input is {kept(name, data)}", flush=True)
            raise error

    with tempfile.TemporaryDirectory() as found:
        words = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY}", "-timeout=60", "-max_len=65536"]
        words += [f"-artifact_prefix={BROKEN}/", "-verbosity=0", "-print_final_stats=1", "-detect_leaks=0"]
        BROKEN.mkdir(parents=True, exist_ok=True)
        atheris.Setup([sys.argv[0], *words, found, str(CORPUS / name)], one)
        atheris.Fuzz()


def main() -> int:
    names = sorted(path.name for path in CORPUS.iterdir())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each (60)")
    parser.add_argument("--plain", action="store_true", help="without coverage, though atheris is installed")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    plain = given.plain or importlib.util.find_spec("atheris") is None
    if given.one and not plain:
        guided(given.names[0], given.seconds)
    if given.one:
        print(f"{given.names[0]}: {by_chance(given.names[0], given.seconds, seed=int(time.time()))} inputs")
        return 0
    broken = [name for name in given.names or names if fuzzed(name, given) != 0]
    print(f"broken: {', '.join(broken)}" if broken else "nothing broke")
    return bool(broken)


def fuzzed(name: str, given: Any) -> int:
    """A process for one target; its exit code."""
    words = [sys.executable, "-m", "tests.fuzz.run", name, "--one", f"--seconds={given.seconds}"]
    words += ["--plain"] if given.plain else []
    print(f"--- {name}", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(words, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
