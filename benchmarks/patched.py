"""Tests on a copy of the source tree in which some files are replaced: a snapshot is taken once, so that work going
on in the tree changes nothing, and each run has a tree of its own."""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
PARTS = ("src", "tests", "examples", "benchmarks", "conftest.py", "pyproject.toml")
WORKERS = os.cpu_count() or 2

PASSED, NO_TESTS = 0, 5  # pytest's exit codes
ENDS = {-1: "timed out", -2: "died", 1: "red", 2: "does not import", 3: "pytest broke", 4: "does not import"}

T = TypeVar("T")
Patch = Mapping[str, str]  # path below src -> the whole new text


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said of one patched tree."""

    red: bool
    how: str  # "green", "red", "timed out", "died", "does not import"
    by: str  # the first test that failed
    why: str  # its message
    seconds: float


class Zygote:
    """The other end of benchmarks.zygote; one job at a time."""

    def __init__(self) -> None:
        command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.zygote"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a job, or an error where the process is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the zygote ended with {self.process.wait()}: is pytest installed?")
        return json.loads(line)

    def close(self) -> None:
        """End of input ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Bench:
    """A snapshot of the repository and the zygotes that run tests on patched copies of its source."""

    def __init__(self, folder: Path, zygotes: Sequence[Zygote]) -> None:
        self.folder, self.root, self.zygotes = folder, folder / "snapshot", zygotes
        self.free: queue.SimpleQueue[Zygote] = queue.SimpleQueue()
        for zygote in zygotes:
            self.free.put(zygote)
        self.lock, self.count = threading.Lock(), 0

    def source(self, path: str) -> str:
        """A file below src, as it was when the snapshot was taken."""
        return (self.root / "src" / path).read_text(encoding="utf-8")

    @contextmanager
    def tree(self, patch: Patch) -> Iterator[Path]:
        """A folder with the whole patched source in src, for as long as it is needed."""
        with self.lock:
            self.count += 1
            place = self.folder / f"tree{self.count}"
        # times are kept, so that byte code of what is not patched stays valid
        shutil.copytree(self.root / "src", place / "src")
        try:
            for path, text in patch.items():
                file = place / "src" / path
                file.write_text(text, encoding="utf-8")
                for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                    stale.unlink()
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def verdict(self, patch: Patch, tests: Sequence[str], *, limit: float = 120, first: Sequence[str] = ()) -> Verdict:
        """Run the tests, paths below the repository, until the first is red."""
        with self.tree(patch) as place:
            job = {
                "tree": str(place / "src"),
                "scratch": str(place),
                "root": str(self.root),
                "tests": list(tests),
                "first": list(first),
                "limit": limit,
            }
            zygote = self.free.get()
            try:
                said = zygote.ask(job)
            finally:
                self.free.put(zygote)
        if said["code"] == NO_TESTS or (said["code"] == PASSED and not said["passed"]):
            raise RuntimeError(f"there is no test in {' '.join(tests)}")
        red = said["code"] != PASSED
        how = ENDS.get(said["code"], "red") if red else "green"
        return Verdict(red=red, how=how, by=said["by"], why=said["why"], seconds=said["seconds"])

    def each(self, work: Callable[[T], Any], items: Iterable[T]) -> Iterator[tuple[T, Any]]:
        """Every item with its result, as they are done, as many at a time as there are zygotes."""
        with ThreadPoolExecutor(len(self.zygotes)) as threads:
            waiting = {threads.submit(work, item): item for item in items}
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            finally:
                for future in waiting:
                    future.cancel()


@contextmanager
def bench(workers: int = WORKERS, *, root: Path = ROOT) -> Iterator[Bench]:
    """A snapshot of the repository at `root`, with its zygotes started."""
    with tempfile.TemporaryDirectory(prefix="patched-") as folder:
        for name in PARTS:
            source, target = root / name, Path(folder) / "snapshot" / name
            if source.is_dir():
                shutil.copytree(source, target)
            elif source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        zygotes = [Zygote() for _ in range(workers)]
        try:
            yield Bench(Path(folder), zygotes)
        finally:
            for zygote in zygotes:
                zygote.close()
