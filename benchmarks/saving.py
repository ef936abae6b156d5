"""What checkpoints cost the training loop: how long one holds it up, what the steps beside the writing lose, and what
share of an hour those take that every run writes by default.

A float32 model is fine-tuned in full, the case with the most to save: weights and two moments. Steps take turns: one
with nothing beside it, a save, one while the files are written, a save that is waited for.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.form import Row, main, note, row, say
from hone import Choice, ModelSpec, OptimSpec, Recipe, TrainSpec
from hone.checkpoint.saver import Timer
from hone.config.recipe import SaveSpec
from hone.data.text.tokenizer import train_bpe
from hone.launch.job import Run, prepare, save
from hone.loop import Iteration, offline

ROWS, LENGTH = 8, 256  # of a step
SHAPE = ModelSpec(hidden_size=384, intermediate_size=1024, layers=6, heads=6, kv_heads=6, context=LENGTH + 8)
SMALL = replace(SHAPE, hidden_size=128, intermediate_size=512, layers=4, heads=4, kv_heads=4)  # about the demo's
LARGE = replace(SHAPE, hidden_size=576, intermediate_size=1536, layers=30, heads=9, kv_heads=3, vocab_size=49152)
HOUR = 3600.0


def job_of(folder: Path, shape: ModelSpec = SHAPE, *, rows: int = ROWS) -> Run:
    """A run of pre-training on made-up text, ready for its first step."""
    train_bpe([], vocab_size=258).save(folder / "tokenizer")
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (64, LENGTH), generator=generator).tolist()
    (folder / "run").mkdir(parents=True, exist_ok=True)
    return prepare(
        Recipe(
            name="saving",
            out=str(folder / "run"),
            model=replace(shape, tokenizer=f"{folder}/tokenizer"),
            data=[{"text": bytes(row).decode()} for row in letters],
            algo=Choice("pretrain"),
            train=TrainSpec(steps=1000, prompts=rows),
            optim=OptimSpec(lr=1e-4),
        )
    )


def by_default(folder: Path, shape: ModelSpec, *, rows: int, rounds: int) -> Iterator[Row]:
    """What the saves of the default's clock take of a run's first hour, by what one was measured to take."""
    job = job_of(folder, shape, rows=rows)
    size = sum(p.numel() for p in job.policy.parameters()) / 1e6
    iterations = offline(job.source, job.learner, job.algo, size=rows)
    next(iterations)  # the moments are made in the first step
    save(job, folder / "run")
    quiet, lost, counted = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        quiet += [_seconds(iterations) for _ in range(2)]
        begin, steps = time.perf_counter(), 0
        save(job, folder / "run", wait=False)
        while job.saver.busy or not steps:
            next(iterations)
            steps += 1
        lost.append(time.perf_counter() - begin - steps * statistics.median(quiet))
        counted.append(job.saver.cost)
        job.saver.wait()
    step, measured, cost = statistics.median(quiet), max(0.0, statistics.median(lost)), statistics.median(counted)
    saves = _saves(step, cost=cost)
    say(f"{size:.1f}M: a step {step:.2f} s, a save takes {measured:.2f} s by the clock, {cost:.2f} s by its own count")
    share = len(saves) * max(measured, cost) / HOUR
    yield row(f"CPU {size:.1f}M: share of an hour that the saves of the default take", share, unit="", goal="< 1%",
              ok=share < 0.01)  # fmt: skip
    yield note(f"CPU {size:.1f}M: saves in that hour", len(saves), unit="saves")
    yield note(f"CPU {size:.1f}M: the first of them after", saves[0], unit="s")


def _seconds(iterations: Iterator[Iteration]) -> float:
    begin = time.perf_counter()
    next(iterations)
    return time.perf_counter() - begin


def _saves(step: float, *, cost: float) -> list[float]:
    """When a run whose steps and saves take so long is saved in its first hour, by the timer of the default."""
    now, found = [0.0], list[float]()
    timer = Timer(60 * SaveSpec().minutes, clock=lambda: now[0])
    while now[0] < HOUR:
        now[0] += step
        if timer.due(cost):
            found.append(now[0])
            now[0] += cost
            timer.saved()
    return found


def measure(quick: bool) -> Iterator[Row]:
    """One save looked at closely, then the default's of an hour for models of several sizes."""
    yield from one_save(quick)
    sizes = [(SMALL, ROWS, 3 if quick else 9), (SHAPE, ROWS, 2 if quick else 5)]
    for shape, rows, rounds in sizes if quick else [*sizes, (LARGE, 1, 3)]:
        with tempfile.TemporaryDirectory() as place:
            yield from by_default(Path(place), shape, rows=rows, rounds=rounds)


def one_save(quick: bool) -> Sequence[Row]:
    """Medians over rounds in which each case has its turn."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = job_of(folder)
        size = sum(p.numel() for p in job.policy.parameters()) / 1e6
        say(f"{size:.1f}M parameters, {ROWS} rows of {LENGTH} tokens a step")
        iterations = offline(job.source, job.learner, job.algo, size=ROWS)
        cases = {"quiet": lambda: next(iterations), "held": lambda: save(job, folder, wait=False)}
        cases |= {"beside": lambda: next(iterations), "rest": job.saver.wait, "in front": lambda: save(job, folder)}
        next(iterations)  # the moments are made in the first step
        save(job, folder)
        seconds, work = ({name: list[float]() for name in cases} for _ in range(2))
        for _ in range(3 if quick else 9):
            for name, case in cases.items():
                start, begun = time.perf_counter(), time.process_time()
                case()
                seconds[name].append(time.perf_counter() - start)
                work[name].append(time.process_time() - begun)
            say({name: round(found[-1], 3) for name, found in seconds.items()})
        files = sum(p.stat().st_size for p in save(job, folder).rglob("*") if p.is_file())
    mid, cpu = ({name: statistics.median(found) for name, found in every.items()} for every in (seconds, work))
    share, slower = mid["held"] / mid["quiet"], mid["beside"] / mid["quiet"] - 1
    return [
        row(
            f"CPU {size:.1f}M, float32: share of a step of {ROWS * LENGTH} tokens that a save holds the loop up",
            share,
            unit="",
            goal="<= 5%",
            ok=share <= 0.05,
        ),
        note("a save that is waited for, share of a step", mid["in front"] / mid["quiet"], unit=""),
        note("the step beside the writing, on cores that both share: longer by", slower, unit=""),
        note("processor time of a save, share of a step's", cpu["in front"] / cpu["quiet"], unit=""),
        note(f"a step of {ROWS * LENGTH} tokens", mid["quiet"], unit="s"),
        note("a checkpoint", files / 2**20, unit="MiB"),
        note("a parameter in a checkpoint", files / (size * 1e6), unit="bytes"),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__ or ""))
