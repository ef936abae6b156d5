"""What a checkpoint costs the training loop: how long it is held up, and what the step beside the writing loses.

A float32 model is fine-tuned in full, the case with the most to save: weights and two moments. Steps take turns: one
with nothing beside it, a save, one while the files are written, a save that is waited for.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.form import Row, main, note, row, say
from hone import Choice, ModelSpec, OptimSpec, Recipe, TrainSpec
from hone.data.tokenizer import train_bpe
from hone.job import Run, prepare, save
from hone.loop import offline

ROWS, LENGTH = 8, 256  # of a step
SHAPE = ModelSpec(hidden_size=384, intermediate_size=1024, layers=6, heads=6, kv_heads=6, context=LENGTH + 8)


def job_of(folder: Path) -> Run:
    """A run of pre-training on made-up text, ready for its first step."""
    train_bpe([], vocab_size=258).save(folder / "tokenizer")
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (64, LENGTH), generator=generator).tolist()
    return prepare(
        Recipe(
            name="saving",
            out=str(folder / "run"),
            model=replace(SHAPE, tokenizer=f"{folder}/tokenizer"),
            data=[{"text": bytes(row).decode()} for row in letters],
            algo=Choice("pretrain"),
            train=TrainSpec(steps=1000, prompts=ROWS),
            optim=OptimSpec(lr=1e-4),
        )
    )


def measure(quick: bool) -> Sequence[Row]:
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
