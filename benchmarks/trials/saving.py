"""E 1 and 2: a run as it is by default outlives a kill, and an invalid reward has a reason that can be found."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.trials.case import Case, hone
from benchmarks.trials.small_runs import REWARD, World, make_world, settings

TITLE = "A kill loses little by default, and an invalid reward says why"
KINDS = {
    "pretrain": (), "sft": (), "dpo": (), "kto": (), "reward_model": (), "ppo": (), "grpo": (), "rloo": (),
    "grpo ahead": ("train.lag=1", "train.mismatch=truncate"), "sft with a LoRA": ("lora.rank=2",), "dapo": (),
}  # fmt: skip
QUICK = ("grpo ahead",)
SECONDS = 90  # for a run to have saved itself


def cases(quick: bool) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        world = make_world(folder / "world")
        for name in QUICK if quick else KINDS:
            yield Case("a SIGKILL of a run with default settings", name, partial(outlives, world, folder, name))
        functions, ways = ("raises", "deep", "none", "nan", "text", "waits", "batch"), ("auto", "never")
        for function, way in [("deep", "auto")] if quick else product(functions, ways):
            told = partial(says_why, world, folder / f"{function}-{way}", function, way)
            yield Case("why a reward is invalid", f"{function}, train.reward_apart={way}", told)
        if not quick:
            yield Case("why a reward is invalid", "hone eval", partial(eval_says_why, world))


def outlives(world: World, folder: Path, name: str) -> str | None:
    """Start a run with no setting of saving, kill it, resume it: it must not begin anew."""
    out = folder / name.replace(" ", "-")
    algo = name.split()[0]
    words = ["run", world.recipe, *settings(world, algo, out), *KINDS[name], "train.steps=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hone", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        why = _saved(process, out)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    if why:
        return why
    step = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))
    done = hone("resume", str(out), f"train.steps={step + 2}")
    if done.returncode:
        return f"hone resume: {done.stderr.splitlines()[-1]}"
    logged = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return None if logged == list(range(1, step + 3)) else f"the log has the steps {logged}"


def _saved(process: "subprocess.Popen[bytes]", out: Path) -> str | None:
    """Wait until a checkpoint is there: the older code has none however long one waits, so 200 steps are enough."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if (out / "checkpoints" / "latest").exists():
            return None
        if process.poll() is not None:
            return f"the run ended with {process.returncode}"
        log = out / "metrics.jsonl"
        if log.exists() and log.read_bytes().count(b"\n") > 400:
            return "no checkpoint after 400 steps"
        time.sleep(0.05)
    return f"no checkpoint within {SECONDS} s"


def says_why(world: World, out: Path, function: str, way: str) -> str | None:
    """The reason with the user's line: on stderr once, with the samples, in the report's table."""
    line = REWARD.lines[function]
    place = f"{world.folder / 'rewards.py'}:{line}"
    given = [f"reward={world.folder / 'rewards.py'}:{function}", f"train.reward_apart={way}", "train.max_invalid=1"]
    limits = ["train.steps=3", "limits.invalid_stop=none", "limits.truncated_stop=none"]
    run = hone("run", world.recipe, *settings(world, "grpo", out), *given, *limits)
    if run.returncode:
        return f"hone run: {run.stderr.splitlines()[-1]}"
    if place not in run.stderr:
        return f"stderr does not name {place}"
    samples = [json.loads(text) for text in (out / "samples.jsonl").read_text().splitlines()]
    if not any(place in str(sample.get("reason", "")) for sample in samples):
        return "no sample keeps the reason"
    if (report := hone("report", str(out))).returncode:
        return f"hone report: {report.stderr.splitlines()[-1]}"
    return None if f":{line}" in (out / "report.html").read_text() else "the report does not show it"


def eval_says_why(world: World) -> str | None:
    """hone eval names every kind of reason with its line."""
    found = hone("eval", world.model, world.data("problems"), "--reward", f"{world.folder / 'rewards.py'}:deep")
    line = REWARD.lines["deep"]
    return None if f"rewards.py:{line}" in found.stderr else f"stderr does not name line {line}: {found.stderr[-150:]}"
