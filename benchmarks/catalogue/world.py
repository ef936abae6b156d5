"""A user's project of a few kilobytes in which `hone check` finds nothing wrong: rows, rewards and recipes to spoil."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.save import save_model

NUMBERS = range(10, 34)  # all answers have two digits, so that length tells nothing
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>")
REWARDS = '''"""The reward of the recipes: right or wrong, and a little for how it is written."""


def right(completion, task):
    return float(task.answer in completion) + 0.01 * (sum(completion.encode()) % 7)
'''
RECIPES = '''"""The recipes of the project."""

import torch

from hone import Choice, ModelSpec, OptimSpec, Recipe, SampleSpec, TrainSpec

torch.set_num_threads(1)
COMMON = dict(model=ModelSpec(path="model"), optim=OptimSpec(lr=1e-3), out="out")
ONLINE = dict(data="problems.jsonl", reward="rewards.py:right", sample=SampleSpec(group=4, max_tokens=8))


def grpo():
    return Recipe(algo=Choice("grpo"), train=TrainSpec(steps=20, prompts=4), **ONLINE, **COMMON)


def sft():
    return Recipe(data="chats.jsonl", algo=Choice("sft"), train=TrainSpec(steps=20, prompts=4), **COMMON)


def dpo():
    return Recipe(data="pairs.jsonl", algo=Choice("dpo"), train=TrainSpec(steps=20, prompts=4), **COMMON)
'''


def _chat(a: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Add the numbers"}, {"role": "user", "content": f"{a - 5} and 5"}]


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _two_turns(a: int) -> list[dict[str, str]]:
    return [*_chat(a), _answer(f"It is {a}"), {"role": "user", "content": "Sure"}, _answer(f"Yes, {a}")]


ROWS: dict[str, list[dict[str, Any]]] = {
    "problems": [{"prompt": _chat(a), "answer": str(a)} for a in NUMBERS],
    "held_out": [{"prompt": _chat(a), "answer": str(a)} for a in range(60, 64)],
    "chats": [{"messages": _two_turns(a)} for a in NUMBERS],
    "pairs": [{"prompt": _chat(a), "chosen": [_answer(f"{a}")], "rejected": [_answer(f"{a + 1}")]} for a in NUMBERS],
}


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_world(folder: Path) -> None:
    """Write the project into an existing folder."""
    for name, rows in ROWS.items():
        _write_rows(folder / f"{name}.jsonl", rows)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    (folder / "recipes.py").write_text(RECIPES, encoding="utf-8")
    plain = train_bpe([], vocab_size=256 + 2 + len(SPECIALS), specials=SPECIALS)
    tokenizer = Tokenizer(plain.inner, eos=plain.eos, pad=plain.pad, bos="<|bos|>", chat_template=TEMPLATE)
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    save_model(Decoder(shape), tokenizer, folder / "model")
