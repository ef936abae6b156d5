"""A world of a few kilobytes to break things in: rows of every shape, plain and chat tokenizers, models, rewards."""

from pathlib import Path
from typing import Any

import torch
from places import Place, decoder, write_rows

from hone.algo import ALGORITHMS
from hone.check import suite
from hone.check.report import Report
from hone.config.overrides import Choice, override
from hone.config.recipe import ModelSpec, OptimSpec, Recipe, SampleSpec, TrainSpec
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.launch.job import Run, prepare
from hone.model.formats.save import save_model

BOS = "<bos>"
SYSTEM = {"role": "system", "content": "Be brief."}
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"{a} and {a + 1} make {2 * a + 1}"} for a in range(9)],
    "answers": [{"prompt": f"{a}+{a}=\n", "completion": f"{2 * a}. Yes"} for a in range(9)],
    "pairs": [{"prompt": f"{a}+{a}=\n", "chosen": f"{2 * a}", "rejected": f"{2 * a + 1} no"} for a in range(9)],
    "labels": [{"prompt": f"{a}+{a}=\n", "completion": f"{2 * a + a % 2}", "label": a % 2 == 0} for a in range(9)],
    "scores": [{"prompt": f"{a}+{a}=\n", "completion": f"{2 * a + a % 3}", "score": 1 - a % 3 / 2} for a in range(9)],
    "steps": [{"prompt": f"{a}?\n", "steps": ["one", f"two {a}"], "step_labels": [1, a % 2]} for a in range(9)],
    "problems": [{"prompt": f"{a}+{a}=\n", "answer": str(2 * a)} for a in range(9)],
    "chats": [{"prompt": [SYSTEM, {"role": "user", "content": f"{a}+{a}"}], "answer": str(2 * a)} for a in range(9)],
    "messages": [
        {"messages": [SYSTEM, {"role": "user", "content": f"{a}?"}, {"role": "assistant", "content": f"{a}!"}]}
        for a in range(9)
    ],
}
SINGLE = {
    "pretrain": "text", "sft": "answers", "kto": "labels", "pointwise_reward_model": "scores",
    "process_reward_model": "steps",
}  # fmt: skip


def tags(completion: str, task: Any) -> float:
    """A reward that a model of random weights can earn, and that prefers the right answer."""
    return float(f"<answer>{task.answer}</answer>" in completion) + sum(completion.encode()) % 7 / 70


class World(Place):
    """Where everything is."""


def chat_tokenizer(*, template: str = DEFAULT_TEMPLATE) -> Tokenizer:
    inner = train_bpe([], vocab_size=259 + len(CHAT_SPECIALS), specials=[*CHAT_SPECIALS, BOS])
    return Tokenizer(inner.inner, eos=inner.eos, pad=inner.pad, bos=BOS, chat_template=template)


def make_world(folder: Path) -> World:
    """Data, `plain` and `chat` models with their tokenizers, and a `teacher` of the plain one."""
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    for name, tokenizer in (("plain", train_bpe([], vocab_size=258)), ("chat", chat_tokenizer())):
        save_model(decoder(tokenizer.vocab_size), tokenizer, folder / name)
    save_model(decoder(258, seed=2), train_bpe([], vocab_size=258), folder / "teacher")
    return World(folder)


def rows_for(algo: str) -> str:
    made = ALGORITHMS[algo]()
    return "problems" if made.online else "pairs" if made.unit == 2 else SINGLE[algo]


def recipe(world: World, algo: Any, *settings: str, **fields: Any) -> Recipe:
    """The algorithm on the world's rows, with fields replaced and then strict `a.b=value` changes."""
    name = algo if isinstance(algo, str) else algo.name
    base = {
        "name": "small",
        "seed": 3,
        "out": world / "never",
        "model": ModelSpec(path=world / "plain"),
        "data": world / f"{rows_for(name)}.jsonl",
        "reward": tags,
        "teacher": world / "teacher" if ALGORITHMS[name]().teacher else "",
        "algo": Choice(algo) if isinstance(algo, str) else algo,
        "sample": SampleSpec(group=4, max_tokens=6),
        "train": TrainSpec(steps=4, prompts=4),
        "optim": OptimSpec(lr=1e-3),
    }
    return override(Recipe(**{**base, **fields}), settings)


def job_of(world: World, algo: Any, *settings: str, **fields: Any) -> Run:
    with torch.random.fork_rng():
        return prepare(recipe(world, algo, *settings, **fields))


def with_template(world: World, template: str, folder: Path, *, name: str = "chat") -> str:
    """A copy of the chat model whose tokenizer has another template."""
    tokenizer = chat_tokenizer(template=template)
    save_model(decoder(tokenizer.vocab_size), tokenizer, folder / name)
    return str(folder / name)


def names(report: Report, verdict: str) -> set[str]:
    return {f.name for f in report.findings if f.verdict == verdict}


def failing(job: Run) -> set[str]:
    """What fails of all the checks."""
    return names(suite.examine(job), "fail")


def verdict(job: Run, name: str) -> tuple[str, str]:
    """(verdict, what was seen) of one check."""
    (finding,) = suite.examine(job, only=(name,)).findings
    assert bool(finding.remedy) == (finding.verdict in ("warn", "fail")), finding
    return finding.verdict, finding.seen
