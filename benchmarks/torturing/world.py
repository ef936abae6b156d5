"""A model of a few thousand numbers, rows for every loop, and one run of each loop that nothing disturbs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.algo import ALGORITHMS
from hone.config.overrides import Choice, override
from hone.config.recipe import ModelSpec, OptimSpec, Recipe, SampleSpec, SaveSpec, TrainSpec
from hone.data.text.tokenizer import train_bpe
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.save import save_model

STEPS = 6
NUMBERS = range(7)
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"{a} and {a + 1} make {2 * a + 1}"} for a in NUMBERS],
    "answers": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a}"} for a in NUMBERS],
    "pairs": [{"prompt": f"{a}+{a}=", "chosen": f"{2 * a}", "rejected": f"{2 * a + 1} no"} for a in NUMBERS],
    "labels": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a + a % 2}", "label": a % 2 == 0} for a in NUMBERS],
    "scores": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a + a % 3}", "score": 1 - a % 3 / 2} for a in NUMBERS],
    "steps": [{"prompt": f"{a}?", "steps": ["one", f"two {a}"], "step_labels": [1, a % 2]} for a in NUMBERS],
    "problems": [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in NUMBERS],
}
SINGLE = {
    "pretrain": "text", "sft": "answers", "kto": "labels", "pointwise_reward_model": "scores",
    "process_reward_model": "steps",
}  # fmt: skip
REWARDS = '''"""Rewards that a model of random weights can earn, and that go wrong on some completions."""

import ctypes
import faulthandler
import math
import os
import time


def bytes_sum(completion, task):
    return sum(completion.encode()) % 7 / 7 - 0.3


def odd(completion):
    return sum(completion.encode()) % 4 == 0


def hangs(completion, task):
    if odd(completion):
        time.sleep(3600)
    return bytes_sum(completion, task)


def dies(completion, task):
    if odd(completion):
        os.kill(os.getpid(), 9)
    return bytes_sum(completion, task)


def crashes(completion, task):
    if odd(completion):
        faulthandler.disable()  # a test would print where it was
        ctypes.string_at(0)
    return bytes_sum(completion, task)


def leaves(completion, task):
    if odd(completion):
        os._exit(0)
    return bytes_sum(completion, task)


def nan(completion, task):
    return math.nan if odd(completion) else bytes_sum(completion, task)
'''
AHEAD = ("train.lag=1", "train.mismatch=truncate")
LEARNS = ("algo.threshold=0.1",)  # of expert iteration: below it nothing is learned from
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo, sampled ahead": ("grpo", AHEAD),
    "dapo, sampled ahead": ("dapo", AHEAD),
    "online_dpo, sampled ahead": ("online_dpo", ("train.lag=1",)),
    "expert_iteration": ("expert_iteration", LEARNS),
    "expert_iteration, sampled ahead": ("expert_iteration", ("train.lag=1", *LEARNS)),
    "ppo, own critic, minibatches": ("ppo", ("critic.kind=own", "train.epochs=2", "train.minibatches=2")),
    "grpo, reference refreshed, KL steered": ("grpo", ("train.reference_refresh=2", "algo.kl_target=0.001")),
    "grpo with a LoRA": ("grpo", ("lora.rank=2",)),
    "sft, moments of one byte": ("sft", ("optim.bits=8",)),
}


@dataclass(frozen=True, slots=True)
class World:
    """Where the rows and models are, and which loops there are to disturb."""

    folder: Path

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)

    def recipe(self, loop: str, out: Path, *settings: str) -> Recipe:
        """A few steps of the loop, saved at every other one."""
        algo, more = VARIANTS.get(loop, (loop, ()))
        made = Recipe(
            name="run",
            seed=3,
            out=str(out),
            model=ModelSpec(path=self / "model"),
            data=self / f"{rows_for(algo)}.jsonl",
            reward=self / "rewards.py:bytes_sum",
            teacher=self / "teacher" if ALGORITHMS[algo]().teacher else "",
            algo=Choice(algo),
            sample=SampleSpec(group=3, max_tokens=5),
            train=TrainSpec(steps=STEPS, prompts=3, threads=1),
            optim=OptimSpec(lr=1e-3),
            save=SaveSpec(every=2, keep=2, minutes=0),
        )
        return override(made, [*more, *settings])


def loops() -> list[str]:
    """Every algorithm, and what a run can be beside it."""
    return list({**ALGORITHMS, **VARIANTS})


def rows_for(algo: str) -> str:
    """Which rows an algorithm reads."""
    made = ALGORITHMS[algo]()
    return "problems" if made.online else "pairs" if made.unit == 2 else SINGLE[algo]


def decoder(seed: int = 0) -> Decoder:
    """About 7,000 numbers."""
    config = DecoderConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config)


def make_world(folder: Path) -> World:
    """Write it all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_bpe([], vocab_size=258)
    save_model(decoder(), tokenizer, folder / "model")
    save_model(decoder(2), tokenizer, folder / "teacher")
    (folder / "rewards.py").write_text(REWARDS)
    return World(folder)


# --- what a run left ---

TIMES = ("seconds", "tokens_per_second")  # how metrics begin that a clock wrote


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def metrics(run: Path) -> list[Mapping[str, Any]]:
    """The log without what a clock wrote."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def temporary(run: Path) -> list[str]:
    """What a write that did not end, or a process that did, would leave."""
    return [str(p.relative_to(run)) for p in run.rglob("*") if p.name.startswith(".") or p.name in ("lock",)]


def differences(one: Path, two: Path, *, steps: int = STEPS) -> list[str]:
    """In what two finished runs differ: the last checkpoint's bits, the log, the samples."""
    name = f"checkpoints/step-{steps:06d}"
    a, b = contents(one / name), contents(two / name)
    found = [f"{name}/{file}" for file in sorted(a.keys() | b.keys()) if a.get(file) != b.get(file)]
    found += ["no checkpoint of the last step"] * (not a)
    found += ["metrics.jsonl"] * (metrics(one) != metrics(two))
    left, right = ((run / "samples.jsonl") for run in (one, two))
    same = left.exists() == right.exists() and (not left.exists() or left.read_bytes() == right.read_bytes())
    return found + ["samples.jsonl"] * (not same)
