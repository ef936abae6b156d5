"""Forms of one answer: what is equal scores 1, what only looks like it 0; an unreadable gold answer is said.

forms.json has the pairs by kind, each the answer in the box and the gold answer.
"""

import json
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from benchmarks.trials import math_verify
from benchmarks.trials.case import Case, expect, hone
from hone.reward.verify.math.verdict import math_reward
from hone.types import Outcome, Task

TITLE = "Forms of an answer"
PAIRS = Path(__file__).with_suffix(".json")
FRACTIONS = [chr(c) for c in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))]  # one half, two thirds, seven eighths, ..
RAISED = dict(zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", range(10), strict=True))
UNREADABLE = (  # as gold answers
    *(r"\foo", r"\sum_{k=1}^{n} k", r"\int_0^1 x dx", "9^{9^{9}}", r"\frac{1}{2", "see page 4", "2+2=5", r"\boxed{}"),
    *(r"\lim_{x\to0} x", "x = 1 = 2", r"2 \star 3", "\u25b3 5", r"f'''''(x) @ 3", "?", "1" * 2000),
)


def judged(answer: str, gold: str) -> Outcome:
    """An answer in a box."""
    return math_reward(f"so \\boxed{{{answer}}}", Task(prompt="q", answer=gold))


def pairs() -> dict[str, dict[str, list[tuple[str, str]]]]:
    """{kind: {"right" or "wrong": [(answer, gold)]}}"""
    return json.loads(PAIRS.read_text(encoding="utf-8"))


def unicode_pairs() -> Iterator[tuple[str, str, float]]:
    """Every fraction and raised digit that Unicode has, alone and behind a number: (answer, gold, verdict)."""
    for fraction in FRACTIONS:
        top, bottom = unicodedata.normalize("NFKC", fraction).split("\u2044")
        yield fraction, f"{top}/{bottom}", 1.0
        yield f"3{fraction}", rf"3\frac{{{top}}}{{{bottom}}}", 1.0
        yield f"-{fraction}", rf"-\frac{{{top}}}{{{bottom}}}", 1.0
        yield fraction, f"{bottom}/{top}" if top != "0" else "5", 0.0
        yield f"3{fraction}", f"{3 * int(top)}/{bottom}" if top != "0" else "5", 0.0
    for digit, value in RAISED.items():
        yield f"x{digit} + x", f"x^{{{value}}} + x", 1.0
        yield f"2{digit}", str(2**value), 1.0
        yield f"2{digit}", str(2**value + 1), 0.0


def _verdict(answer: str, gold: str, wanted: float) -> str | None:
    found = judged(answer, gold)
    why = expect(found.value, wanted)
    return why and f"{why} {found.reason}"


def _agrees(pair: math_verify.Pair) -> str | None:
    found = math_verify.verdict(pair)
    return None if pair.name in math_verify.DISAGREEMENTS else expect(found, float(pair.expected))


def _unreadable(gold: str) -> str | None:
    found = judged("5", gold)
    return None if found.value is None and "gold" in found.reason else f"{found.value} {found.reason}"


def _told() -> str | None:
    """By the command, with the row and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"prompt": f"q{i}", "answer": answer} for i, answer in enumerate(("4", r"\foo{5}", "6"))]
        Path(folder, "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = hone("rewards", "test", "data.jsonl", folder=folder)
    said = "row 2" in run.stdout and "is unusable: it has the command \\foo" in run.stdout
    return None if run.returncode == 2 and said else f"exit {run.returncode}: {run.stdout[-100:]} {run.stderr[-100:]}"


def cases(quick: bool) -> Iterator[Case]:
    """Pairs by kind, right ones and wrong ones; Unicode; Math-Verify's own cases; gold answers that are no answers."""
    for kind, both in pairs().items():
        for side, wanted in (("right", 1.0), ("wrong", 0.0)):
            group = f"{kind}: {side} answers"
            for answer, gold in both[side][:: 8 if quick else 1]:
                yield Case(group, f"{answer} for {gold}", lambda a=answer, g=gold, w=wanted: _verdict(a, g, w))
    for answer, gold, wanted in list(unicode_pairs())[:: 8 if quick else 1]:
        name = f"{answer} for {gold}"
        yield Case("fractions and powers of Unicode", name, lambda a=answer, g=gold, w=wanted: _verdict(a, g, w))
    for pair in math_verify.pairs()[:: 8 if quick else 1]:
        yield Case("Math-Verify's own test cases, but for those below", pair.name, lambda p=pair: _agrees(p))
    for gold in UNREADABLE:
        yield Case("gold answers that cannot be read are said", gold[:40], lambda g=gold: _unreadable(g))
    yield Case("gold answers that cannot be read are said", "hone rewards test", _told)


def section() -> list[str]:
    """Of the page, below the tables."""
    return math_verify.section()
