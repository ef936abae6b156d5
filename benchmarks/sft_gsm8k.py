"""SFT of the real 135M model on GSM8K: training loss, held-out log-likelihood and accuracy, before and after.

The whole measurement wants a GPU (some minutes); --quick is two steps on a few short rows, and promises only that
the loss on them falls. HONE_DATA names the folder of datasets, HONE_HOME that of the fetched model.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hone
from benchmarks.form import Row, main, row, say
from hone.config.load import load_recipe
from hone.config.overrides import override
from hone.config.recipe import Recipe
from hone.data.feed.locate import Reading
from hone.launch import feeds, job
from hone.launch.measure import evaluate_rows

NAME, UNIT = "smollm2-135m", "nats a token"


def held_out_nll(made: Recipe) -> float:
    """Nats a token of the test split's solutions, before any step."""
    ready = job.prepare(made)
    return evaluate_rows(ready.learner, ready.held_rows, ready.algo)["nll"]


def accuracy(model: str | Path, problems: Any) -> float:
    """Share of problems that one greedy answer solves."""
    found = hone.evaluate(model, problems, temperature=0.0, max_tokens=256)
    say(f"{model}: {found}")
    return found["pass@1"]


def measure(quick: bool) -> Sequence[Row]:
    """Before, the run, after."""
    with tempfile.TemporaryDirectory() as folder:
        made = override(load_recipe("sft_gsm8k")(), [f"out={folder}/run"])
        problems: Any = "gsm8k:test"
        if quick:
            rows = feeds.load_rows("gsm8k:test", Reading(chat=True))
            few = sorted(rows, key=lambda r: len(json.dumps(r)))[:2]
            made = replace(override(made, ["train.steps=2", "train.prompts=2"]), data=few, eval_data=few)
            problems = few[:1]
        before, right = held_out_nll(made), accuracy(NAME, problems)
        start = time.perf_counter()
        model = hone.run(made)
        seconds = time.perf_counter() - start
        logged = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        return rows_of(logged, before, (right, accuracy(model, problems)), seconds, quick=quick)


def rows_of(
    logged: list[dict[str, float]], before: float, right: tuple[float, float], seconds: float, *, quick: bool
) -> list[Row]:
    """ours: after; peer: before."""
    tenth = max(1, len(logged) // 10)
    first = sum(step["nll"] for step in logged[:tenth]) / tenth
    last = sum(step["nll"] for step in logged[-tenth:]) / tenth
    after = logged[-1]["eval/nll"]
    speed = sum(step["tokens_per_second"] for step in logged[-tenth:]) / tenth
    return [
        row("training NLL, last tenth against first", last, peer=first, unit=UNIT, goal="falls", ok=last < first),
        row("held-out NLL, after against before", after, peer=before, unit=UNIT, goal="falls", ok=after < before),
        row("held-out accuracy, after", right[1], unit="share", goal="above before", ok=quick or right[1] > right[0]),
        row("held-out accuracy, before", right[0], unit="share", goal="stated", ok=True),
        row("training speed", speed, unit="trained tokens a second", goal="stated", ok=True),
        row("training", seconds, unit="seconds", goal="stated", ok=True),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
