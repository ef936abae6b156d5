"""GRPO with a process model as the value of each step, against GRPO and REINFORCE++ by the outcome alone and the same
with a constant value, on answers of eight steps of which any spoils the whole (benchmarks/careless.py). Three seeds,
each with a table, a start, labels and a process model of its own, and the mean of several runs of each method.

python -m benchmarks.credit [--quick]: one seed of a model that has learned nothing: does every part work?
"""

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

import hone
from benchmarks.careless import TOKENS, World
from benchmarks.form import Row, main, note, say
from benchmarks.process import SEEDS, each, gained, logged, values
from hone.config.overrides import Choice
from hone.config.recipe import ModelSpec, OptimSpec, ProcessSpec, Recipe, SampleSpec, TrainSpec
from hone.inference.defaults import Sampling
from hone.inference.label import StepLabels, label_steps
from hone.log.limits import LimitSpec

torch.set_num_threads(1)  # a model so small gains nothing from more
RUNS, ITERATIONS = 6, 24  # of each method on a seed; of a run
METHODS = ("grpo", "reinforce_pp", "grpo, constant", "grpo, values")
PEERS = {
    "GRPO by the outcome alone": "grpo",
    "REINFORCE++ by the outcome alone": "reinforce_pp",
    "the same with a constant in its place": "grpo, constant",  # what a baseline gains that knows nothing of steps
}


@dataclass
class Seed:
    """One table with everything that is made for it."""

    number: int
    out: Path
    quick: bool
    found: dict[str, float] = field(default_factory=dict[str, float])  # points
    sampled: float = 0.0  # tokens of continuations, for the labels
    start: Path = Path()
    judges: dict[str, Path] = field(default_factory=dict[str, Path])

    def run(self) -> None:
        World(self.number).write(self.out / "data", answers=12_000, problems=4_000, held_out=500)
        self.start = self.trained("sft", "answers", 400, algo=Choice("sft"), lr=3e-3, warmup=20)
        self.label()
        heads = Choice("process_reward_model")
        self.judges = {
            "values": self.trained("process", "steps", 800, algo=heads, lr=1e-3, warmup=10),
            "constant": self.trained("constant", "means", 200, algo=heads, lr=1e-3, warmup=10),
        }
        for method in METHODS:
            runs = [self.learned(method, number) for number in range(1 if self.quick else RUNS)]
            for when, points in zip(("while learning", "afterwards"), zip(*runs, strict=True), strict=True):
                self.found[f"{method} {when}"] = statistics.mean(points)
        say(self.number, {name: round(value, 1) for name, value in self.found.items()})

    def trained(self, name: str, data: str, steps: int, *, algo: Choice, lr: float, warmup: int) -> Path:
        """A model or a head: from nothing for the first, from the first for the second."""
        shape = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 4, "context": 96}
        fresh = ModelSpec(tokenizer=str(self.out / "data" / "tokenizer"), **shape)  # pyright: ignore[reportArgumentType]
        steps = 2 if self.quick else steps
        return hone.run(
            Recipe(
                name=name,
                seed=self.number,
                out=str(self.out / "{name}"),
                model=fresh if name == "sft" else ModelSpec(path=str(self.start)),
                data=str(self.out / "data" / f"{data}.jsonl"),
                algo=algo,
                train=TrainSpec(steps=steps, prompts=64, micro_rows=64),
                optim=OptimSpec(lr=lr, warmup=min(warmup, steps), schedule="cosine"),
            )
        )

    def label(self) -> None:
        """1,200 solutions, and the share of four continuations of each beginning that verify; and the mean of them all,
        for a head to learn that knows nothing of steps."""
        steps = self.out / "data" / "steps.jsonl"
        found = label_steps(
            self.start,
            str(self.out / "data" / "problems.jsonl"),
            steps,
            reward="exact",
            labels=StepLabels(k=4, separator=" "),
            how=Sampling(samples=4, max_tokens=TOKENS, seed=100 + self.number),
            limit=8 if self.quick else 300,
        )
        self.sampled = found["tokens sampled"]
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        mean = statistics.mean(label for row in rows for label in row["step_labels"])
        blind = [{**row, "step_labels": [mean] * len(row["step_labels"])} for row in rows]
        steps.with_name("means.jsonl").write_text("".join(json.dumps(row) + "\n" for row in blind))

    def learned(self, method: str, number: int) -> tuple[float, float]:
        """Accuracy of what is sampled while learning, and of held-out answers afterwards."""
        name, *judge = method.split(", ")
        own = {"beta": 0.03, **({"lam": 1.0} if judge else {})} | ({"kl": "loss:k3"} if name != "grpo" else {})
        folder = hone.run(
            Recipe(
                name=f"{method.replace(', ', '-')}-{number}",
                seed=1_000 * self.number + number,
                out=str(self.out / "{name}"),
                model=ModelSpec(path=str(self.start)),
                data=str(self.out / "data" / "problems.jsonl"),
                eval_data=str(self.out / "data" / "held_out.jsonl"),
                reward={"exact": 1.0},
                algo=Choice(name, own),
                process=ProcessSpec(path=str(self.judges[judge[0]])) if judge else ProcessSpec(),
                sample=SampleSpec(group=8, max_tokens=TOKENS),
                train=TrainSpec(steps=2 if self.quick else ITERATIONS, prompts=4, eval_samples=2),
                optim=OptimSpec(lr=1e-3, warmup=3 if not self.quick else 1),
                limits=LimitSpec(ref_kl_warn=None, ref_kl_stop=None),
            )
        )
        return logged(folder, "reward/exact")


def measure(quick: bool) -> list[Row]:
    """All seeds."""
    with tempfile.TemporaryDirectory() as folder:
        done = each(ran, [Seed(n, Path(folder) / str(n), quick) for n in SEEDS[: 1 if quick else None]])
    rows = list[Row]()
    for peer, method in PEERS.items():
        for when in ("while learning", "afterwards"):
            gains = [seed.found[f"grpo, values {when}"] - seed.found[f"{method} {when}"] for seed in done]
            rows.append(gained(f"GRPO with a process model as value over {peer}, {when}", gains))
    sampled = statistics.mean(seed.sampled for seed in done)
    return [
        *rows,
        *values([seed.found for seed in done]),
        note("tokens sampled for labels, a seed", sampled, unit="tokens"),
    ]


def ran(seed: Seed) -> Seed:
    """What a process of its own does."""
    seed.out.mkdir()
    seed.run()
    return seed


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
