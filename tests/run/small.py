"""A world of a few kilobytes: tokenizer, models, rows of every shape, and a wire that stops a run at a step."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from places import Place, decoder, write_rows

from hone.algo import ALGORITHMS
from hone.config.overrides import Choice, override
from hone.config.recipe import ModelSpec, OptimSpec, Recipe, SampleSpec, SaveSpec, TrainSpec
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.model.formats.save import save_model
from hone.model.scorer import Scorer

T = TypeVar("T")
TIMES = ("seconds", "tokens_per_second")  # how names begin that may differ between two runs of one recipe

ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"{a} and {a + 1} make {2 * a + 1}"} for a in range(7)],
    "answers": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a}"} for a in range(7)],
    "pairs": [{"prompt": f"{a}+{a}=", "chosen": f"{2 * a}", "rejected": f"{2 * a + 1} no"} for a in range(7)],
    "labels": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a + a % 2}", "label": a % 2 == 0} for a in range(7)],
    "scores": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a + a % 3}", "score": 1 - a % 3 / 2} for a in range(7)],
    "steps": [{"prompt": f"{a}?", "steps": ["one", f"two {a}"], "step_labels": [1, a % 2]} for a in range(7)],
    "problems": [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(7)],
}
SINGLE = {
    "pretrain": "text", "sft": "answers", "kto": "labels", "pointwise_reward_model": "scores",
    "process_reward_model": "steps",
}  # fmt: skip
REWARDS = '''\
"""Rewards that a model of random weights can earn."""

import math
import sys


def bytes_sum(completion, task):
    return sum(completion.encode()) % 7 / 7 - 0.3


def raises(completion):
    raise RuntimeError("two\\nlines")


def none(completion):
    return None


def nan(completion):
    return math.nan


def infinite(completion):
    return math.inf


def text(completion):
    return "good"


def too_few(completions):
    return [0.0] * (len(completions) - 1)


def no_list(completions):
    return 1.0


def wrong_names(answer, gold):
    return 1.0


async def waits(completion):
    return 1.0


def exits(completion):
    sys.exit(3)


def chatty(completion):
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr)
    return float(len(completion) % 3)
'''
RECIPE = '''\
"""A recipe for tests; every setting comes from the command line."""

import torch

from hone import Recipe

torch.set_num_threads(1)


def recipe():
    return Recipe()
'''


class World(Place):
    """Where everything is."""

    def data(self, name: str) -> str:
        return self / f"{name}.jsonl"

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self / "model")


def make_world(folder: Path) -> World:
    """Data, rewards, a recipe file, `tokenizer`, `model`, another one `teacher` and a reward model `scorer`."""
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    tokenizer = train_bpe([], vocab_size=258)
    tokenizer.save(folder / "tokenizer")
    save_model(decoder(258), tokenizer, folder / "model")
    save_model(decoder(258, seed=2), tokenizer, folder / "teacher")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_model(Scorer(decoder(258, seed=1)), tokenizer, folder / "scorer")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.py").write_text(RECIPE)
    return World(folder)


def rows_for(algo: str) -> str:
    """Which rows an algorithm reads: told by its value, so that a new one is covered."""
    made = ALGORITHMS[algo]()
    return "problems" if made.online else "pairs" if made.unit == 2 else SINGLE[algo]


def recipe(world: World, algo: str, out: Path, *settings: str, **algo_settings: Any) -> Recipe:
    """Four steps of the algorithm on the world's rows, with strict `a.b=value` changes."""
    base = Recipe(
        name="small",
        seed=3,
        out=str(out),
        model=ModelSpec(path=world / "model"),
        data=world.data(rows_for(algo)),
        reward=world / "rewards.py:bytes_sum",
        teacher=world / "teacher" if ALGORITHMS[algo]().teacher else "",
        algo=Choice(algo, algo_settings),
        sample=SampleSpec(group=3, max_tokens=6),
        train=TrainSpec(steps=4, prompts=3, reward_apart="never"),  # starting processes is half of a run this small
        optim=OptimSpec(lr=1e-3),
        save=SaveSpec(keep=9, minutes=0),  # by the clock: what is saved would depend on how busy the machine is
    )
    return override(base, settings)


def arguments(made: Recipe, world: World) -> list[str]:
    """The command line of such a recipe."""
    assert isinstance(made.algo, Choice)
    pairs = {
        "name": made.name, "seed": made.seed, "out": made.out, "model.path": made.model.path, "data": made.data,
        "reward": made.reward, "teacher": made.teacher, "algo": made.algo.name, "sample.group": made.sample.group,
        "sample.max_tokens": made.sample.max_tokens, "train.steps": made.train.steps,
        "train.prompts": made.train.prompts, "optim.lr": made.optim.lr, "save.keep": made.save.keep,
        "save.minutes": made.save.minutes, "train.reward_apart": made.train.reward_apart,
    }  # fmt: skip
    pairs |= {f"algo.{name}": value for name, value in made.algo.settings.items()}
    return ["run", world / "recipe.py", *(f"{name}={value}" for name, value in pairs.items())]


class Wire(io.StringIO):
    """A stderr that acts when a step is reported: a signal, or a crash that runs no more of the program."""

    def __init__(self, step: int, steps: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.sign, self.act = f" {step}/{steps} ", act

    def write(self, s: str, /) -> int:
        written = super().write(s)
        if self.sign in s:
            self.act()
        return written


def watched(call: Callable[[], T], wire: Wire, monkeypatch: pytest.MonkeyPatch) -> T:
    """Call with the wire as stderr."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", wire)
        return call()


class Crash(BaseException):
    """Stands for the power cord: nothing in the package catches it."""


def crash() -> None:
    raise Crash


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def metrics(run: Path) -> list[dict[str, Any]]:
    """The log without what a clock wrote."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def temporary(folder: Path) -> list[str]:
    """What a write that did not end would leave."""
    return [str(p) for p in folder.rglob("*") if p.name.endswith((".tmp", ".part")) or p.name.startswith(".")]


def assert_same_run(one: Path, two: Path, *, step: int) -> None:
    """Two runs left the same bits: weights, moments, counters, cursors, metrics and samples."""
    name = f"checkpoints/step-{step:06d}"
    a, b = contents(one / name), contents(two / name)
    assert a.keys() == b.keys()
    assert {n for n in a if a[n] != b[n]} == set()
    assert metrics(one) == metrics(two)
    assert [row["step"] for row in metrics(one)] == list(range(1, step + 1))
    left, right = one / "samples.jsonl", two / "samples.jsonl"
    assert left.exists() == right.exists()
    if left.exists():
        assert left.read_bytes() == right.read_bytes()


def start_hone(*arguments: str, cwd: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "hone", *arguments],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def hone(*arguments: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the command in a process of its own."""
    process = start_hone(*arguments, **options)
    out, err = process.communicate()
    return process.returncode, out, err
