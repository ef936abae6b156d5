"""Process models against outcomes alone, on the demo's sums with worked steps and three seeds: as judges of whole
completions, in beam search, and as dense rewards and potentials in GRPO and PPO, where the accuracy of what is sampled
while learning and of held-out answers afterwards are compared. Also what labels and scoring cost.

The model to start from is the SFT model of `hone demo` (runs/demo), or one made the same way. Seeds differ in sampled
solutions, labels, heads and training. --quick runs one seed of a model that has learned nothing: does every part work?
"""

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

import hone
from benchmarks.form import Row, main, note, row, say
from hone.config.overrides import Choice
from hone.config.recipe import CriticSpec, ModelSpec, OptimSpec, ProcessSpec, ReadSpec, Recipe, SampleSpec, TrainSpec
from hone.demo import stages
from hone.demo.stages import FULL, QUICK, Sizes
from hone.demo.world import make_data, make_tokenizer
from hone.inference.defaults import Sampling
from hone.inference.label import StepLabels, label_steps
from hone.inference.rank import Rank, evaluate_ranked
from hone.log.limits import LimitSpec

T = TypeVar("T")
torch.set_num_threads(1)  # a model so small gains nothing from more
SEEDS = (0, 1, 2)
SEPARATOR = " "
MADE = Path("runs/demo")  # where `hone demo` leaves its models and data
POINTS = "points of accuracy"
# of each comparison: what it is called, the method, and what it has to beat
CLAIMS = (
    ("best of 8 by the process model", "best of 8, process", "one sample"),
    ("best of 8: process over outcome model", "best of 8, process", "best of 8, outcome"),
    ("beams of 4 by the process model", "beam", "one sample"),
    *(
        (f"{name}, {when}", f"{ours} {when}", f"{peer} {when}")
        for name, ours, peer in (
            ("GRPO: scores of steps and the outcome over outcome alone", "grpo, process", "grpo"),
            ("GRPO in pairs: progress and the outcome over outcome alone", "grpo in pairs, progress", "grpo in pairs"),
            ("GRPO: progress in pairs over outcome alone in fours", "grpo in pairs, progress", "grpo in fours"),
            ("GRPO: progress in pairs over REINFORCE++ by outcome", "grpo in pairs, progress", "reinforce_pp in pairs"),
            ("PPO: scores of steps and the outcome over outcome alone", "ppo, dense", "ppo"),
            ("PPO: potentials and the outcome over outcome alone", "ppo, shaping", "ppo"),
        )
        for when in ("while learning", "afterwards")
    ),
)


@dataclass(frozen=True)
class Schedule:
    """How much is sampled, for which reward, and how often."""

    group: int = 8
    prompts: int = 24
    steps: int = 8
    reward: Mapping[str, float] = field(default_factory=lambda: {"math": 1.0, "format": 0.1})


EIGHTS = Schedule()
# a z-score of two is 1 and -1 whatever they differ in, so that a tidy answer would count as much as a right one
PAIRS = Schedule(group=2, prompts=96, steps=16, reward={"math": 1.0})
FOURS = replace(PAIRS, group=4, prompts=48)


@contextmanager
def base(sizes: Sizes, *, quick: bool) -> Iterator[tuple[Path, Path]]:
    """The SFT model's folder and the data's; the demo's own where it has run."""
    if not quick and (stages.model_folder(MADE, "sft")).is_dir():
        yield stages.model_folder(MADE, "sft"), MADE / "data"
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        make_data(out / "data", sizes, seed=0)
        make_tokenizer(out / "data", sizes)
        for stage in ("pretrain", "sft"):
            left = hone.run(stages.recipe(stage, out, sizes, seed=0))
            left.rename(out / stage / "model")
        yield out / "sft" / "model", out / "data"


class Bench:
    """One seed: labels, models, judges, training."""

    def __init__(self, start: Path, data: Path, out: Path, *, seed: int, quick: bool) -> None:
        self.start, self.data, self.out, self.seed, self.quick = start, data, out, seed, quick
        self.found: dict[str, float] = {}  # accuracy in points
        self.costs: dict[str, float] = {}

    def run(self) -> None:
        """Everything, in order."""
        self.label()
        process, outcome = self.judge("process", "steps"), self.judge("outcome", "outcomes")
        self.rank(process, outcome)
        scores = ProcessSpec(path=str(process), separator=SEPARATOR)
        self.train("grpo", ProcessSpec())
        self.train("grpo, process", scores, process=True)
        self.train("grpo in pairs", ProcessSpec(), PAIRS)
        self.train("grpo in fours", ProcessSpec(), FOURS)
        self.train("reinforce_pp in pairs", ProcessSpec(), PAIRS, kl="loss:k3")  # its baseline is the iteration's mean
        self.train("grpo in pairs, progress", scores, PAIRS, lam=0.7)
        self.train("ppo", ProcessSpec())
        self.train("ppo, dense", replace(scores, weight=0.5))
        self.train("ppo, shaping", replace(scores, use="shaping"))

    def label(self) -> None:
        """Steps with the share of their continuations that verify, and whole solutions with their verdicts."""
        steps = self.out / "steps.jsonl"
        found = label_steps(
            self.start,
            str(self.data / "problems.jsonl"),
            steps,
            labels=StepLabels(k=2 if self.quick else 8, separator=SEPARATOR),
            how=Sampling(samples=2 if self.quick else 4, max_tokens=44, seed=100 + self.seed),
            limit=16 if self.quick else 200,
        )
        self.costs = {name: found[name] for name in ("rows", "steps", "tokens sampled", "seconds")}
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        whole = [{**r, "steps": ["".join(r["steps"])], "step_labels": r["step_labels"][-1:]} for r in rows]
        (self.out / "outcomes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in whole))

    def judge(self, name: str, data: str) -> Path:
        """A head trained on the labels of every step, or of whole solutions."""
        steps = 2 if self.quick else 50
        return hone.run(
            Recipe(
                name=name,
                seed=self.seed,
                out=str(self.out / "{name}"),
                model=ModelSpec(path=str(self.start)),
                data=str(self.out / f"{data}.jsonl"),
                read=ReadSpec(overlong="truncate"),  # what a model wrote that has learned nothing can be longer as text
                algo=Choice("process_reward_model"),
                train=TrainSpec(steps=steps, prompts=64),
                optim=OptimSpec(lr=5e-4, warmup=min(5, steps), schedule="cosine"),
            )
        )

    def rank(self, process: Path, outcome: Path) -> None:
        """One of eight completions, by either head; and as many steps at a time, by the process model."""
        how = Sampling(samples=8, max_tokens=44, seed=self.seed)
        for name, judge, by, beams in (
            ("best of 8, process", process, "min", 0),
            ("best of 8, outcome", outcome, "last", 0),
            ("beam", process, "min", 4),
        ):
            start = time.perf_counter()
            rank = Rank(judge=str(judge), by=by, separator=SEPARATOR, beams=beams)
            found = evaluate_ranked(
                self.start, str(self.data / "held_out.jsonl"), rank, how=how, limit=16 if self.quick else 0
            )
            self.found[name] = 100 * found["beam" if beams else "best_of_8"]
            self.costs[f"seconds of {name}"] = time.perf_counter() - start
            if not beams:
                self.found["one sample"] = 100 * found["reward"]

    def train(self, name: str, spec: ProcessSpec, schedule: Schedule = EIGHTS, **settings: float | str) -> None:
        """The demo's GRPO or PPO with the verifier as reward, and perhaps a process model beside it."""
        algo = name.split(",")[0].split()[0]
        own = {"beta": 0.02, "value_clip": None} if algo == "ppo" else {"beta": 0.01, **settings}
        steps, prompts = (2, 8) if self.quick else (schedule.steps, schedule.prompts)
        start = time.perf_counter()
        folder = hone.run(
            Recipe(
                name=name.replace(", ", "-").replace(" ", "-"),
                seed=self.seed,
                out=str(self.out / "{name}"),
                model=ModelSpec(path=str(self.start)),
                data=str(self.data / "problems.jsonl"),
                eval_data=str(self.data / "held_out.jsonl"),
                reward=dict(schedule.reward),
                algo=Choice(algo, own),
                process=spec,
                critic=CriticSpec(kind="own" if algo == "ppo" else "none"),
                sample=SampleSpec(group=schedule.group, max_tokens=44),
                train=TrainSpec(steps=steps, prompts=prompts, minibatches=4, eval_samples=1 if self.quick else 8),
                optim=OptimSpec(lr=1e-4, critic_lr=5e-4, warmup=10),
                limits=LimitSpec(ref_kl_warn=None, ref_kl_stop=None),
            )
        )
        self.found[f"{name} while learning"], self.found[f"{name} afterwards"] = logged(folder, "reward/math")
        self.costs[f"seconds of {name}"] = time.perf_counter() - start


def logged(folder: Path, accuracy: str) -> tuple[float, float]:
    """Of a run's last checkpoint: points of what was sampled while learning, and of held-out answers afterwards."""
    lines = [json.loads(line) for line in (folder.parent.parent / "metrics.jsonl").read_text().splitlines()]
    return 100 * statistics.mean(step[accuracy] for step in lines), 100 * lines[-1]["eval/pass@1"]


def claims(benches: list[Bench]) -> list[Row]:
    """Each method against its baseline."""
    return [gained(name, [b.found[ours] - b.found[peer] for b in benches]) for name, ours, peer in CLAIMS]


def gained(name: str, gains: list[float]) -> Row:
    """The mean difference over seeds, and what they have to show together."""
    mean, spread = statistics.mean(gains), statistics.stdev(gains) if len(gains) > 1 else 0.0
    ok = mean > 2.92 * spread / len(gains) ** 0.5 if len(gains) > 1 else True  # t, one-sided, 95 %, 2 degrees
    goal = "> 2.92 standard errors of the seeds' mean" if len(gains) > 1 else None
    found = {**row(name, mean, unit=POINTS, goal="", ok=ok), "goal": goal}
    return found | {"seeds": [round(g, 2) for g in gains], "standard_error": spread / len(gains) ** 0.5}


def ran(bench: Bench) -> Bench:
    """What a process of its own does."""
    bench.out.mkdir()
    bench.run()
    say(bench.seed, json.dumps(bench.found), json.dumps(bench.costs))
    return bench


def each(run: Callable[[T], T], seeds: list[T]) -> list[T]:
    """One here, several two at a time in processes of their own; not forked, for torch has begun its work."""
    if len(seeds) == 1:
        return [run(seeds[0])]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(run, seeds))


def values(found: Sequence[Mapping[str, float]]) -> list[Row]:
    """What was found on every seed, name by name."""
    rows = list[Row]()
    for name in found[0]:
        seeds = [one[name] for one in found]
        rows.append({**note(name, statistics.mean(seeds), unit=POINTS), "seeds": [round(v, 2) for v in seeds]})
    return rows


def measure(quick: bool) -> list[Row]:
    """All seeds."""
    with base(QUICK if quick else FULL, quick=quick) as (start, data), tempfile.TemporaryDirectory() as folder:
        seeds = SEEDS[: 1 if quick else None]
        benches = each(ran, [Bench(start, data, Path(folder) / str(seed), seed=seed, quick=quick) for seed in seeds])
    rows = [*claims(benches), *values([b.found for b in benches])]
    for name in benches[0].costs:
        rows.append(note(f"{name}, a seed", statistics.mean(b.costs[name] for b in benches), unit=""))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
