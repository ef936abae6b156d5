"""How many files one must open to follow a step: a walk through the code, traced.

    python -m benchmarks.walk [--quick] [--list NAME]

Traces one GRPO step, one SFT step, a served request, a reward and a checkpoint, on the plain backend and on the default
one, and counts the files of `hone` that are entered, in the order in which they are, the lines executed, and how often
the walk crosses from one folder into another. What was done before (building, warming up) does not count.
`--list` prints the files of one walk, as in `--list "GRPO step, plain"`.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hone
from benchmarks.form import Row, note, print_result, row, say

ROOT = Path(__file__).resolve().parent.parent
HOME = str(Path(hone.__file__).parent) + "/"
sys.path.insert(0, str(ROOT / "tests"))
GOALS = {  # files and crossings on the plain backend
    "GRPO step": (45, 150), "SFT step": (25, None), "reward": (8, None), "checkpoint": (15, None), "request": (None, None),
}  # fmt: skip


@dataclass
class Walk:
    """What a piece of work has entered."""

    files: dict[str, None] = field(default_factory=dict[str, None])  # in the order in which they are entered
    lines: int = 0
    crossings: int = 0
    last: str = ""  # the folder that the walk is in

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """For sys.settrace: follows only frames of hone."""
        name = frame.f_code.co_filename
        if not name.startswith(HOME):
            return None
        if event == "call":
            file = name.removeprefix(HOME)
            self.files.setdefault(file)
            folder = file.rpartition("/")[0]
            self.crossings += bool(self.last) and folder != self.last and not self._returns(frame, folder)
            self.last = folder
        elif event == "line":
            self.lines += 1
        elif event == "return":
            back = frame.f_back
            while back is not None and not back.f_code.co_filename.startswith(HOME):
                back = back.f_back
            self.last = back.f_code.co_filename.removeprefix(HOME).rpartition("/")[0] if back is not None else ""
        return self.trace

    def _returns(self, frame: FrameType, folder: str) -> bool:
        """Whether the call stays in its caller's folder: what torch or Python called in between is no crossing."""
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(HOME):
            back = back.f_back
        return back is not None and back.f_code.co_filename.removeprefix(HOME).rpartition("/")[0] == folder


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


def recipe(folder: Path, *, online: bool, steps: int) -> "hone.Recipe":
    """A run of a tiny model on three rows."""
    common: dict[str, Any] = {
        "name": "walk",
        "model": hone.ModelSpec(path=str(folder / "model")),
        "out": str(folder / "run"),
    }
    if online:
        rows = [{"prompt": f"What is {a}+1?", "answer": str(a + 1)} for a in range(3)]
        return hone.Recipe(
            **common, data=rows, reward={"math": 1.0}, algo=hone.algo.grpo(beta=0.04),
            sample=hone.SampleSpec(group=2, max_tokens=4), train=hone.TrainSpec(steps=steps, prompts=3, device="cpu"),
        )  # fmt: skip
    rows = [{"prompt": f"What is {a}+1?", "completion": str(a + 1)} for a in range(3)]
    return hone.Recipe(
        **common, data=rows, algo=hone.algo.sft(), train=hone.TrainSpec(steps=steps, prompts=3, device="cpu")
    )
