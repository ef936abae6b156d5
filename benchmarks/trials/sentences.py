"""Closing sentences that published evaluation prompts ask for, on every gold answer of MATH-500 and GSM8K.

Each form has to score 1 with the gold answer, and 0 with one of its digits changed or with the answer of another
problem. HONE_DATA names the folder of the datasets; without one a few answers of our own are used.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from benchmarks.trials.case import Case
from benchmarks.trials.closings import PUBLISHED, VARIANTS
from hone.reward.verify.math.verdict import math_reward
from hone.types import Task

TITLE = "Right answers that score 0: the sentences that state them"

OWN = (
    "5", "-3", "1,234", "0.5", r"\frac{3}{4}", r"2\sqrt{3}", "(1,2)", "x=5", r"\text{east}", r"90^\circ", "[2,5)",
)  # fmt: skip
DATA = Path(os.environ.get("HONE_DATA") or Path(__file__).parents[3] / "shared" / "data")


def reward(completion: str, gold: str) -> float | None:
    """Of the tree on trial."""
    return math_reward(completion, Task(prompt="q", answer=gold)).value


@lru_cache(1)
def golds() -> dict[str, list[str]]:
    """Gold answers by dataset."""
    found = {name: _rows(DATA / name / "test.jsonl") for name in ("math500", "gsm8k")}
    return {name: rows for name, rows in found.items() if rows} or {"answers of our own": list(OWN)}


def _rows(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [str(json.loads(line)["answer"]).rpartition("####")[2].strip() for line in lines]


def perturbed(gold: str) -> str:
    """The answer with its first digit changed, or another word."""
    changed = re.sub(r"[0-9]", lambda digit: str((int(digit.group()) + 1) % 10), gold, count=1)
    return changed if changed != gold else "7777"


def right(form: str, answers: Sequence[str]) -> str | None:
    """How many gold answers the form does not score 1 with, and the first of them."""
    bad = [gold for gold in answers if reward(form.replace("@", gold), gold) != 1.0]
    return f"{len(bad)} of {len(answers)} do not score 1, the first {bad[0]!r}" if bad else None


def wrong(form: str, answers: Sequence[str]) -> str | None:
    """How many wrong answers the form does not score 0 with, and the first of them."""
    pairs = [(perturbed(gold), gold) for gold in answers]
    pairs += [(other, gold) for other, gold in zip(answers[1:], answers, strict=False) if _value(other) != _value(gold)]
    bad = [pair for pair in pairs if reward(form.replace("@", pair[0]), pair[1]) != 0.0]
    return f"{len(bad)} of {len(pairs)} do not score 0, the first {bad[0][0]!r} for {bad[0][1]!r}" if bad else None


def _value(answer: str) -> str:
    """What two answers have in common that differ in their dress only: `x=5` and `5`."""
    return re.sub(r"^[a-z]=|[\s,$\\!]", "", answer)


def cases(quick: bool) -> Iterator[Case]:
    """Every form on every gold answer; quick: on every 25th."""
    forms = [(prompt, form, "published") for prompt, form, _ in PUBLISHED] + [
        (form, form, "variants of") for form in VARIANTS
    ]
    for verdict, check in (("right", right), ("wrong", wrong)):
        for name, form, kind in forms:
            for dataset, answers in golds().items():
                some = answers[:: 25 if quick else 1]
                group = f"{kind} closing forms, {verdict} answers"
                yield Case(group, f"{name} on {dataset}", lambda c=check, f=form, a=some: c(f, a))
