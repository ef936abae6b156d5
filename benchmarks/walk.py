"""How many files must a reader open to follow a step? A walk through the code, traced.

    python -m benchmarks.walk [--quick] [--list NAME]

Traces one GRPO step, one SFT step, a reward, a checkpoint and a served request, on the plain backend and on the default
one. It counts the files of `hone` that are entered, the lines executed, and how often the walk crosses from one folder
into another. The step before it has warmed everything up, and does not count.
`--list` prints the files of one walk in the order in which they are entered, as in `--list "GRPO step, plain"`.
The walk knows hone by `hone.run`, `hone.loop` and the command line alone, so that other trees can be walked too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hone
from benchmarks.form import Row, note, print_result, row, say
from hone import loop

ROOT = Path(__file__).resolve().parent.parent
HOME = str(Path(hone.__file__).parent) + "/"
RECORDS = "types.py"
GOALS = {"GRPO step": (45, 150), "SFT step": (25, None), "reward": (8, None), "checkpoint": (15, None)}
"""Files and crossings, at the most, on the plain backend."""


@dataclass
class Walk:
    """What a piece of work has entered."""

    files: dict[str, None] = field(default_factory=dict[str, None])  # in the order in which they are entered
    lines: int = 0
    crossings: int = 0  # calls from one folder into another

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """For sys.settrace: follows only frames of hone.

        A crossing is a call from a file in another folder. The records of types.py are data that travels with a step,
        so that a call of their methods leads nowhere.
        """
        file = _file(frame)
        if file is None:
            return None
        if event == "call":
            self.files.setdefault(file)
            caller = frame.f_back
            while caller is not None and _file(caller) is None:  # what torch or Python called in between is no crossing
                caller = caller.f_back
            if caller is not None and file != RECORDS:
                self.crossings += _folder(_file(caller)) != _folder(file)
        elif event == "line":
            self.lines += 1
        return self.trace


def _file(frame: FrameType) -> str | None:
    """The path below hone, or None outside of it."""
    name = frame.f_code.co_filename
    return name.removeprefix(HOME) if name.startswith(HOME) else None


def _folder(file: str | None) -> str:
    return (file or "").rpartition("/")[0]


@contextmanager
def traced() -> Iterator[Walk]:
    """The walk of what is done inside, in this thread and in those it starts."""
    walk = Walk()
    threading.settrace(walk.trace)
    sys.settrace(walk.trace)
    try:
        yield walk
    finally:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]


# --- what is walked ---


def model_folder(folder: Path) -> Path:
    """A model of a few kilobytes that chats, as the tests of the server make it."""
    for tests in ("tests", "tests/serve"):
        sys.path.insert(0, str(ROOT / tests))
    import little  # pyright: ignore[reportMissingImports]

    return little.make_folders(folder) / "chatty"


def recipe(folder: Path, *, online: bool) -> "hone.Recipe":
    """Three steps of a tiny model, each as small as it can be: a group of two, two tokens long."""
    common: dict[str, Any] = {"model": hone.ModelSpec(path=str(folder / "chatty")), "out": str(folder / "run")}
    common["train"] = hone.TrainSpec(steps=3, prompts=1, device="cpu")
    if not online:
        rows = [{"prompt": f"What is {a}+1?", "completion": str(a + 1)} for a in range(3)]
        return hone.Recipe(name="sft", data=rows, algo=hone.algo.sft(), **common)
    rows = [{"prompt": f"What is {a}+1?", "answer": str(a + 1)} for a in range(3)]
    sample = hone.SampleSpec(group=2, max_tokens=2)
    return hone.Recipe(
        name="grpo", data=rows, reward={"math": 1.0}, algo=hone.algo.grpo(beta=0.04), sample=sample, **common
    )


def stepped(iterations: Iterator[loop.Iteration], keep: Callable[[Walk], None]) -> Iterator[loop.Iteration]:
    """The iterations; the second one is walked."""
    yield next(iterations)
    with traced() as walk:
        second = next(iterations)
    keep(walk)
    yield second
    yield from iterations


def saving_module() -> Any:
    """The module whose `save` a run calls: that of `hone.run` in older trees, launch.train below it in this one."""
    modules = (sys.modules[name] for name in (hone.run.__module__, "hone.launch.train") if name in sys.modules)
    return next(module for module in modules if hasattr(module, "save"))


def run_walks(folder: Path, *, online: bool) -> dict[str, Walk]:
    """The second step of a run, the reward of a right answer, and the run's last checkpoint."""
    found, runner = dict[str, Walk](), saving_module()
    online_loop, offline_loop, save = loop.online, loop.offline, runner.save

    def rewarded(*args: Any, **rest: Any) -> Iterator[loop.Iteration]:
        for iteration in stepped(online_loop(*args, **rest), lambda walk: found.update({"GRPO step": walk})):
            if iteration.number == 2:
                first = iteration.groups[0][0]
                assert first.task is not None
                one = [[replace(first, outcome=None, text=f"So it is \\boxed{{{first.task.answer}}}.")]]
                with traced() as found["reward"]:
                    args[2](one)
            yield iteration

    def supervised(*args: Any, **rest: Any) -> Iterator[loop.Iteration]:
        return stepped(offline_loop(*args, **rest), lambda walk: found.update({"SFT step": walk}))

    def saved(*args: Any, **rest: Any) -> Any:
        with traced() as found["checkpoint"]:
            return save(*args, **rest)

    loop.online, loop.offline, runner.save = rewarded, supervised, saved
    try:
        hone.run(recipe(folder, online=online))
    finally:
        loop.online, loop.offline, runner.save = online_loop, offline_loop, save
    if not online:
        del found["checkpoint"]
    return found


def only_plain() -> None:
    """From here on every decoder is computed as it is defined."""
    os.environ["HONE_BACKENDS"] = "plain"


# --- a served request: the server runs in a process of its own, and is told by signals what to walk ---


def server() -> None:
    """`hone serve` under the tracer; SIGUSR1 begins a walk, SIGUSR2 writes it to the file that WALK names."""
    walk = Walk()

    def begin(*_: object) -> None:
        walk.files.clear()
        walk.lines = walk.crossings = 0

    def end(*_: object) -> None:
        about = {"files": list(walk.files), "lines": walk.lines, "crossings": walk.crossings}
        path = Path(os.environ["WALK"])
        path.with_suffix(".part").write_text(json.dumps(about))
        path.with_suffix(".part").rename(path)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    threading.settrace(walk.trace)
    sys.settrace(walk.trace)
    from hone.cli import main as command

    sys.exit(command())


def request_walk(folder: Path, *, plain: bool) -> Walk:
    """The second request of a server's life."""
    begin = "from benchmarks import walk; " + ("walk.only_plain(); " if plain else "") + "walk.server()"
    path = folder / f"request-{plain}.json"
    environment = {**os.environ, "WALK": str(path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", begin, "serve", str(folder / "chatty"), "--port", "0"],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        url, token = (
            next(w for w in line if w.startswith("http")),
            line[line.index("token") + 1] if "token" in line else "",
        )
        _ask(url, token)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        _ask(url, token)
        process.send_signal(signal.SIGUSR2)
        for _ in range(100):
            time.sleep(0.1)
            with suppress(FileNotFoundError):
                about = json.loads(path.read_text())
                return Walk(dict.fromkeys(about["files"]), lines=about["lines"], crossings=about["crossings"])
        raise RuntimeError("the server did not tell its walk")
    finally:
        process.kill()
        process.wait()


def _ask(url: str, token: str) -> None:
    body = json.dumps({"model": "chatty", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body.encode(), headers), timeout=60):
        pass


# --- what was found ---


def walks(*, plain: bool) -> dict[str, Walk]:
    """Every walk on one backend, by name."""
    found = dict[str, Walk]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model_folder(folder)
        for online in (True, False):
            say(f"{'GRPO' if online else 'SFT'}, {'plain' if plain else 'default'} backend")
            found |= run_walks(folder, online=online)
            (folder / "run").rename(folder / f"run-{online}")
        say("a served request")
        found["request"] = request_walk(folder, plain=plain)
    return found


def rows_of(name: str, walk: Walk, *, plain: bool) -> Iterator[Row]:
    """Files, crossings and lines of one walk; only the plain backend has goals."""
    files, crossings = GOALS.get(name, (None, None)) if plain else (None, None)
    title = f"{name}, {'plain' if plain else 'default'}"
    for what, number, goal in (("files", len(walk.files), files), ("crossings", walk.crossings, crossings)):
        if goal is None:
            yield note(f"{title}: {what}", number, unit=what)
        else:
            yield row(f"{title}: {what}", number, unit=what, goal=f"<= {goal}", ok=number <= goal)
    yield note(f"{title}: lines executed", walk.lines, unit="lines")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the plain backend only")
    parser.add_argument("--list", metavar="NAME", default="", help="print the files of this walk, on stderr")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[Row]()
    for plain in (True,) if args.quick else (False, True):  # what is plain stays so
        if plain:
            only_plain()
        for name, walk in walks(plain=plain).items():
            rows += rows_of(name, walk, plain=plain)
            if args.list in (name, f"{name}, {'plain' if plain else 'default'}"):
                say("\n".join(walk.files))
    return print_result(rows)


if __name__ == "__main__":
    sys.exit(main())
