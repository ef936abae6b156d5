"""The score that a judge gives, read from its answer: its own, with its sign, on the scale that was asked for."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.trials.case import Case
from hone.reward.learned.judge import Judge, JudgeSettings
from hone.types import Task

TITLE = "A judge's score"
MARKS = (  # answer, scale, mark; None: no verdict
    ("Score: 7", 1, 10, 7), ("score 7", 1, 10, 7), ("SCORE: 7", 1, 10, 7), ("Score = 7", 1, 10, 7),
    ("Score is 7", 1, 10, 7), ("The score is 7", 1, 10, 7), ("Final Score: 7", 1, 10, 7), ("Score\uff1a7", 1, 10, 7),
    ("Overall score: 7.", 1, 10, 7), ("**Score:** 2", 1, 10, 2), ("**Score: 2**", 1, 10, 2), ("`Score: 6`", 1, 10, 6),
    ("Score: **2**", 1, 10, 2), ("*Score*: 5", 1, 10, 5), ("## Score: 7", 1, 10, 7), ("- Score: 7", 1, 10, 7),
    ("1. Score: 7", 1, 10, 7), ("| Score | 7 |", 1, 10, 7), ("Score: [[7]]", 1, 10, 7), ("Score: \\boxed{7}", 1, 10, 7),
    ("Score:\n7", 1, 10, 7), ("### Score\n7/10", 1, 10, 7), ("Score: 7\r\n", 1, 10, 7), ("Score: 7 points", 1, 10, 7),
    ("Score: 7 (good)", 1, 10, 7), ("Score: 7 - good work", 1, 10, 7), ("Score: 7. It is right.", 1, 10, 7),
    ("Score: -3", -5, 5, -3), ("Score: \u22123", -5, 5, -3), ("Score: \u20133", -5, 5, -3), ("Score: - 3", -5, 5, -3),
    ("**Score:** -3", -5, 5, -3), ("Score: **-3**", -5, 5, -3), ("Score: +3", -5, 5, 3), ("Score: -3/5", -5, 5, -3),
    ("Score: -0.5 out of 1", -1, 1, -0.5), ("Score: 7.5", 1, 10, 7.5), ("Score: 7,5", 1, 10, 7.5),
    ("Score: .5", 0, 1, 0.5), ("Score: 2/10", 1, 10, 2), ("Score: 2 / 10", 1, 10, 2), ("Score: 2 out of 10", 1, 10, 2),
    ("Score: 7 of 10", 1, 10, 7), ("Score: 80%", 0, 100, 80), ("Score: 7\n\nThank you!", 1, 10, 7),
    ("Score: 3\nScore: 4/10", 1, 10, 4), ('{"score": 7, "reason": "x"}', 1, 10, 7), ('{"score": "7/10"}', 1, 10, 7),
    ('```json\n{"score": -3}\n```', -5, 5, -3), ("Score (1-10): 7", 1, 10, 7), ("**Score (1-10):** 7", 1, 10, 7),
    ("Score out of 10: 7", 1, 10, 7), ("Score (-5 to 5): -3", -5, 5, -3), ("Score (overall): 7", 1, 10, 7),
    ("Score: 7 (out of 10)", 1, 10, 7), ("Score: 7 points out of 10", 1, 10, 7), ("Score: 4/5 stars", 1, 5, 4),
    ("Score: 7 out of a possible 10", 1, 10, 7), ("Score: 7 (on a scale of 1 to 10)", 1, 10, 7), ("[[8]]", 1, 10, 8),
    ("Score: 7 on a scale from 1 to 10", 1, 10, 7), ("<score>7</score>", 1, 10, 7), ("Rating: [[8]]", 1, 10, 8),
    ("The final score is: 8", 1, 10, 8), ("Score\n-3", -5, 5, -3), ("**Score**\n\n-3", -5, 5, -3),
    ("[[-3]]", -5, 5, -3),
    ("\ufeffScore: 8", 1, 10, 8), ("\u200bScore: \u200b8", 1, 10, 8), ("\u2022 Score: 8", 1, 10, 8),
    ("Accuracy score: 9\nClarity score: 3\nScore: 7", 1, 10, 7),
)  # fmt: skip
QUOTED = (
    ("Score: 2\n`Score: 10`", 1, 10, 2), ("Score: 2\n\n    Score: 10", 1, 10, 2), ("`Score: 10`\nScore: 2", 1, 10, 2),
    ("> Score: 10\nScore: 2 out of 10", 1, 10, 2), ("Score: 2 out of 10\n> Score: 10", 1, 10, 2),
    ("  > Score: 10\n  Score: 5", 1, 10, 5), (">Score: 10", 1, 10, None), ("```\nScore: 10\n```\nScore: 2", 1, 10, 2),
    ("Score: 2\n```\nScore: 10\n```", 1, 10, 2), ("~~~\nScore: 9\n~~~", 1, 10, None),
    ("<think>Score: 10</think>\nScore: 3", 1, 10, 3), ("<think>\nScore: 10", 1, 10, None),
    ('"Score: 10"\nScore: 4', 1, 10, 4), ("\u201cScore: 10\u201d\nScore: 4", 1, 10, 4),
    ('The answer says "Score: 10".\nScore: 4', 1, 10, 4), ("Score: 4\n\u201cScore: 10\u201d", 1, 10, 4),
)  # fmt: skip
NONE = (
    ("Score: 11", 1, 10), ("Score: -1", 1, 10), ("Score: 0", 1, 10), ("Score: 7 or 8", 1, 10), ("Score: 7-8", 1, 10),
    ("Score: 7 to 8", 1, 10), ("Score: 7\u20138", 1, 10), ("Score: 2/5", 1, 10), ("Score: 80%", 1, 10), ("", 1, 10),
    ("Score: seven", 1, 10), ("Score: 1,000", 1, 10), ("Score: 1e1", 1, 10), ("Score: NaN", 1, 10), ("Score:", 1, 10),
    ("Score: inf", 1, 10), ("Score: 7x", 1, 10), ("I give it a Score: 7", 1, 10), ("Score - 3", -5, 5),
    ('{"score": true}', 1, 10), ('{"score": 70}', 1, 10), ("Score: \u0667", 1, 10), ("no", 1, 10),
    ("Score: 7\u00bd", 1, 10), ("Score: 6 and a half", 1, 10), ("Score: 7 or eight", 1, 10), ("[[8]] or [[9]]", 1, 10),
    ("Score: 7 on a scale of 0 to 10", 1, 10), ("Score: 7 (out of 20)", 1, 10), ("[[A]]", 1, 10), ("[[7, 8]]", 1, 10),
    ("Score: six point five", 1, 10), ("Score: 6 point five", 1, 10),
    ("Score (1-5): 4", 1, 10), ("Score: 7\nScore: 7 or 8", 1, 10),
)  # fmt: skip
WINNERS = (
    ("Winner: A", 1.0), ("**Winner:** B", 0.0), ("Winner: tie", 0.5), ("> Winner: A\nWinner: B", 0.0),
    ("```\nWinner: A\n```\nWinner: B", 0.0), ("Winner: A or B", None), ('{"winner": "B"}', 0.0), ("Winner:\nB", 0.0),
    ("Winner: A. It is better.", 1.0), ("The winner is: B", 0.0),
    ("Winner: Apple", None), ("<think>Winner: A</think>Winner: tie", 0.5),
    ("Winner: neither", None), ("Winner: A and B", None), ('"Winner: A"', None),
    ("Winner: A (more accurate and complete)", 1.0), ("Winner: B, since it is clearer and correct", 0.0),
    ("Winner: A and only A", None), ("Winner: A, and b too", None), ("Winner: a or the other", None),
)  # fmt: skip


def cases(quick: bool) -> Iterator[Case]:
    for answer, low, high, mark in MARKS:
        yield Case("marks as judges write them", repr(answer), marks(answer, low, high, mark))
    for answer, low, high, mark in QUOTED:
        yield Case("marks that are quoted or only thought", repr(answer), marks(answer, low, high, mark))
    for answer, low, high in NONE:
        yield Case("answers without one mark on the scale", repr(answer), marks(answer, low, high, None))
    for answer, wanted in WINNERS:
        yield Case("the winner of two", repr(answer), picks(answer, wanted))


def marks(answer: str, low: float, high: float, mark: float | None) -> Callable[[], str | None]:
    share = None if mark is None else (mark - low) / (high - low)
    return lambda: _judged(JudgeSettings(model="m", low=low, high=high), answer, share)


def picks(answer: str, wanted: float | None) -> Callable[[], str | None]:
    return lambda: _judged(JudgeSettings(model="m", kind="pair", both_orders=False), answer, wanted)


def _judged(settings: JudgeSettings, answer: str, wanted: float | None) -> str | None:
    """A judge that says this, whatever it is asked."""
    judge = Judge(settings, lambda messages, **how: answer, folder=Path())
    found = asyncio.run(judge("an answer", Task(prompt="q", answer="another")))  # type: ignore[arg-type]
    if wanted is None:
        return None if found.value is None and found.reason else f"{found.value}, where there is no verdict"
    same = found.value is not None and abs(found.value - wanted) < 1e-9
    return None if same else f"{found.value} instead of {wanted}: {found.reason}"
