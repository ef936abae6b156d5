"""The whole journey on a laptop's CPU: tokenizer, pre-training, SFT, reward model, then GRPO, PPO and DPO."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hone.data.feed.source import read_rows
from hone.data.text.tokenizer import Tokenizer
from hone.demo import stages, summary
from hone.demo.examine import examine, preference_pairs, written_pairs
from hone.demo.stages import FILES, FULL, QUICK, Sizes
from hone.demo.world import make_data, make_tokenizer, write_rows
from hone.engine.params import SampleParams
from hone.errors import HoneError, Interrupted
from hone.launch import feeds
from hone.launch.measure import sample_groups
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.save import save_model
from hone.report.report import write_report
from hone.reward.learned.reward_model import RewardModel
from hone.reward.score import Reward, score
from hone.reward.verify.math.verdict import math_reward
from hone.start import run
from hone.types import Task

HELD_BACK = "preferences_held_back.jsonl"
PROGRESS = "demo.json"  # what is done, so that an interrupted journey goes on


@dataclass(slots=True)
class Journey:
    """Where the journey writes, how large it is, and what has been done so far."""

    out: Path
    sizes: Sizes
    seed: int
    done: dict[str, dict[str, Any]]

    def step(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Do a piece of work unless it is done, and save its result."""
        if name in self.done:
            print(f"{name}: done before", file=sys.stderr)
            return
        start = time.perf_counter()
        result = work()
        self.done[name] = {"seconds": time.perf_counter() - start} | result
        text = json.dumps({"seed": self.seed, "sizes": asdict(self.sizes), "done": self.done}, indent=1)
        (self.out / PROGRESS).write_text(text)


def main(*, seed: int = 0, out: str | Path = "runs/demo", quick: bool = False) -> Path:
    """Run the journey, print its table and write report.html. An interrupted journey goes on where it stopped."""
    start = time.perf_counter()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    journey = begin(Path(out), QUICK if quick else FULL, seed)
    before = sum(done["seconds"] for done in journey.done.values())  # spent by the interrupted command
    try:
        run_stages(journey)
    except Interrupted as interruption:
        interruption.args = (f"interrupted; what was done is saved: `hone demo --out {out}` goes on with it",)
        raise
    rows, machine = summary.rows(journey.done), summary.machine()
    summary.show(rows)
    if quick:
        print("a quick demo is a smoke test: its models have learnt nothing yet", file=sys.stderr)
    report = finish(journey, rows, machine)
    print(f"\nReport: {report} (opens offline)", file=sys.stderr)
    print(summary.time_taken(rows, before + time.perf_counter() - start), file=sys.stderr)
    return report


def finish(journey: Journey, rows: list[dict[str, Any]], machine: dict[str, Any]) -> Path:
    """Write the table as JSON and the report as one page."""
    text = json.dumps({"rows": rows, "machine": machine, "seed": journey.seed, "done": journey.done}, indent=1)
    (journey.out / "table.json").write_text(text)
    answers = [sample for done in journey.done.values() for sample in done.get("samples", ())]
    notes = {name.replace("_", " "): str(value) for name, value in machine.items()}
    notes["seed"] = str(journey.seed)
    notes["reward model"] = (
        f"orders {100 * journey.done['reward']['pair_accuracy']:.0f} % of held-back pairs as the verifier does"
    )
    return write_report(
        journey.out / "report.html",
        title="Hone: from raw tokens to a reinforced model",
        table=rows,
        runs=summary.curves(journey.out),
        samples=answers,
        notes=notes,
    )


def begin(out: Path, sizes: Sizes, seed: int) -> Journey:
    """Go on with an unfinished journey of the same seed and sizes; start anew otherwise."""
    progress = out / PROGRESS
    saved = _read_progress(progress) if progress.is_file() else None
    if saved is None and out.is_dir() and any(out.iterdir()):
        raise HoneError(f"{out} holds something else than a demo: choose an empty folder with --out DIR")
    same = saved is not None and saved["seed"] == seed and saved["sizes"] == asdict(sizes)
    if saved is not None and same and stages.ORDER[-1] not in saved["done"]:
        print(f"going on with the demo in {out}", file=sys.stderr)
        return Journey(out, sizes, seed, saved["done"])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    progress.write_text(json.dumps({"seed": seed, "sizes": asdict(sizes), "done": {}}))
    return Journey(out, sizes, seed, {})


def _read_progress(progress: Path) -> dict[str, Any]:
    """The seed, sizes and finished stages of a demo."""
    try:
        saved: Any = json.loads(progress.read_text())
    except (OSError, ValueError, RecursionError):
        saved = None
    done = saved.get("done") if isinstance(saved, dict) else None
    facts = list(done.values()) if isinstance(done, dict) else [None]
    if not all(isinstance(fact, dict) and isinstance(fact.get("seconds"), int | float) for fact in facts):
        raise HoneError(f"{progress} is damaged: remove {progress.parent}, or choose another folder with --out DIR")
    return {"seed": None, "sizes": None, **saved}


def run_stages(journey: Journey) -> None:
    """Every stage in turn."""
    out, sizes = journey.out, journey.sizes

    def prepare() -> dict[str, Any]:
        make_data(out / "data", sizes, seed=journey.seed)
        return {"vocabulary": make_tokenizer(out / "data", sizes).vocab_size}

    journey.step("tokenizer", prepare)
    for stage in stages.ORDER:
        if stage == "reward":
            journey.step("preferences", lambda: make_preferences(journey))
        journey.step(stage, lambda stage=stage: train_stage(journey, stage))


def train_stage(journey: Journey, stage: str) -> dict[str, Any]:
    """Run the stage's recipe, keep its model, examine it."""
    recipe = stages.recipe(stage, journey.out, journey.sizes, seed=journey.seed)
    start = time.perf_counter()
    final = run(recipe, resume=True)
    seconds = time.perf_counter() - start
    shutil.copytree(final, stages.model_folder(journey.out, stage), dirs_exist_ok=True)
    if stage == "reward":
        return {"train_seconds": seconds, "pair_accuracy": calibrate(journey)}
    sizes, folder = journey.sizes, stages.model_folder(journey.out, stage)
    sft = stages.model_folder(journey.out, "sft") if stage in stages.STARTS else None
    tasks = load_tasks(journey, "held_out")
    marks, groups = examine(folder, tasks, sft=sft, tokens=sizes.completion, samples=sizes.examined)
    return {"train_seconds": seconds, "marks": asdict(marks), "samples": summary.samples_of(groups, stage)}


def load_tasks(journey: Journey, name: str) -> list[Task]:
    """The problems of a file."""
    rows = read_rows(journey.out / "data" / FILES[name])
    return [Task(prompt=row["prompt"], answer=row["answer"], id=row["problem"]) for row in rows]


def make_preferences(journey: Journey) -> dict[str, Any]:
    """The SFT model answers training problems; a right answer is preferred to a wrong one."""
    folder = stages.model_folder(journey.out, "sft")
    tokenizer, decoder = Tokenizer.load(folder), load_decoder(folder)
    tasks = load_tasks(journey, "problems")[: journey.sizes.preference_problems]
    params = SampleParams(max_tokens=journey.sizes.completion, stop_ids=tokenizer.stop_ids, seed=journey.seed)
    groups = score(sample_groups(decoder, tokenizer, tasks, params=params, samples=16), Reward(math_reward))
    pairs = written_pairs(tasks) if journey.sizes.written_pairs else preference_pairs(groups, seed=journey.seed)
    if len(pairs) < 8:
        raise HoneError(
            f"only {len(pairs)} preference pairs were found, the SFT model is never, or always, right: "
            "try another --seed"
        )
    kept = len(pairs) * 9 // 10  # the last tenth measures the reward model
    write_rows(journey.out / "data" / FILES["preferences"], pairs[:kept])
    write_rows(journey.out / "data" / HELD_BACK, pairs[kept:])
    return {"pairs": len(pairs)}


def calibrate(journey: Journey) -> float:
    """Calibrate the reward model on its pairs; returns the share of held-back pairs that it orders right."""
    folder = stages.model_folder(journey.out, "reward")
    tokenizer, scorer = Tokenizer.load(folder), load_scorer(folder)
    model = RewardModel(score=scorer, pad_id=tokenizer.pad_id)
    pairs = feeds.groups(str(journey.out / "data" / FILES["preferences"]), tokenizer, context=0)
    scorer.normalise(*model.mean_and_std([r for pair in pairs for r in pair]))
    save_model(scorer, tokenizer, folder)
    held_back = feeds.groups(str(journey.out / "data" / HELD_BACK), tokenizer, context=0)
    scores = model([r for pair in held_back for r in pair])
    right = [chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    return sum(right) / len(right)
