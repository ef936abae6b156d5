"""A world of a few kilobytes for trials of runs: a tokenizer, a model, rows of every shape, and rewards that fail.

It is made with what both trees have: a command line, and functions that have not changed between them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.data.text.tokenizer import train_bpe
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.save import save_model

ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"{a} and {a + 1} make {2 * a + 1}"} for a in range(7)],
    "answers": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a}"} for a in range(7)],
    "pairs": [{"prompt": f"{a}+{a}=", "chosen": f"{2 * a}", "rejected": f"{2 * a + 1} no"} for a in range(7)],
    "labels": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a + a % 2}", "label": a % 2 == 0} for a in range(7)],
    "problems": [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(7)],
}
READS = {"pretrain": "text", "sft": "answers", "kto": "labels", "dpo": "pairs", "reward_model": "pairs"}


@dataclass(frozen=True)
class Reward:
    """A file of rewards, and on which line each of them fails."""

    text: str
    lines: Mapping[str, int]


def _rewards() -> Reward:
    pieces = {
        "good": "def good(completion, task):\n    return sum(completion.encode()) % 7 / 7",
        "slow": "def slow(completion, task):\n    time.sleep(0.02)\n    return good(completion, task)",
        "raises": "def raises(completion, task):\n    return 1 / (len(task.prompt) - 4)  # FAILS",
        "deep": "def deep(completion, task):\n    return json.loads(completion + '{')  # FAILS",
        "none": "def none(completion, task):  # FAILS\n    return None if completion else 1.0",
        "nan": "def nan(completion, task):  # FAILS\n    return float('nan')",
        "text": "def text(completion, task):  # FAILS\n    return 'good'",
        "waits": "async def waits(completion, task):\n    await asyncio.sleep(0)\n    return task.extra['x']  # FAILS",
        "batch": "def batch(completions, tasks):\n    return [t.extra['hint'] for t in tasks]  # FAILS",
    }
    text = "import asyncio\nimport json\nimport time\n\n\n" + "\n\n\n".join(pieces.values()) + "\n"
    failing = [number for number, line in enumerate(text.splitlines(), 1) if "# FAILS" in line]
    return Reward(text, dict(zip([name for name, piece in pieces.items() if "# FAILS" in piece], failing, strict=True)))


REWARD = _rewards()


@dataclass(frozen=True)
class World:
    """Where everything is."""

    folder: Path

    @property
    def recipe(self) -> str:
        return str(self.folder / "recipe.py")

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def data(self, name: str) -> str:
        return str(self.folder / f"{name}.jsonl")


def make_world(folder: Path) -> World:
    """Data, rewards, a recipe file and a model of 7,000 numbers."""
    folder.mkdir(parents=True)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD.text)
    (folder / "recipe.py").write_text("from hone import Recipe\n\n\ndef recipe():\n    return Recipe()\n")
    tokenizer = train_bpe([], vocab_size=258)
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=48,
    )  # fmt: skip
    save_model(Decoder(config), tokenizer, folder / "model")
    return World(folder)


def settings(world: World, algo: str, out: Path) -> list[str]:
    """Of a run of the algorithm on the world's rows, with nothing said of saving."""
    return [
        "name=trial", f"out={out}", f"model.path={world.model}", f"data={world.data(READS.get(algo, 'problems'))}",
        f"reward={world.folder / 'rewards.py'}:good", f"algo={algo}", "sample.group=3", "sample.max_tokens=6",
        "train.steps=6", "train.prompts=3", "limits.truncated_stop=none", "limits.repetition_stop=none",
        "limits.varied_stop=none", "limits.ess_stop=none", "limits.entropy_stop=none",
    ]  # fmt: skip
