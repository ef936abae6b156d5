"""Compares a completion's final answer with the gold one: by a number's distance, by words, or by reasoning-gym.

Of several answers the last one of the strongest kind counts: answer tag, box, "answer is", text outside of thoughts.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from hone.errors import HoneError
from hone.reward.outcome import as_task, invalid
from hone.reward.verify.answers import (
    WORD,
    after_phrase,
    answer_tag,
    answer_text,
    boxes,
    is_not_stated,
    phrases,
    spoken_text,
)
from hone.reward.verify.math.amount import PERCENT, amount
from hone.reward.verify.math.extract import stated_answer
from hone.types import Outcome, Task

MAX_ANSWER = 5000  # characters
SIGNS = frozenset("$\u20ac\u00a3\u00a5\u20b9%")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def final_answer(completion: str, prompt: object = "") -> str:
    """The completion's last answer of the strongest kind."""
    text = spoken_text(completion, prompt)
    tagged = answer_tag(text)
    if tagged is not None:
        text = tagged
    found = boxes(text)
    if found:
        return text[max(found, key=lambda box: box[0])[2]]  # the one that begins last
    phrase = after_phrase(text) if tagged is None else None
    return text if phrase is None else phrase


def final_number(completion: str, prompt: object = "") -> tuple[Fraction, str] | None:
    """The number of the final answer. After "answer is", more words or sentences may follow on the line."""
    found, text = number(final_answer(completion, prompt)), spoken_text(completion, prompt)
    if found is not None or answer_tag(text) is not None or boxes(text) or not (led := phrases(text)):
        return found
    lead, start = led[-1]
    answer, denied = stated_answer(text[start : start + MAX_ANSWER])
    return None if denied or is_not_stated(text[:lead]) else number(answer)


def number(text: str) -> tuple[Fraction, str] | None:
    """The number that a text is, and its sign: 1,234.5, -3e-4, $2, 50% as 1/2, 1/3; None for any other text."""
    found = amount(text)
    return found if found and found[1] in {"", *SIGNS} else None


def numeric(tolerance: str) -> Callable[[str, Task | str], Outcome]:
    """A reward: 1 where the number is within the tolerance of the gold one, "0.01" apart or "1%" of it; else 0.

    >>> numeric("1%")("about <answer>3.14</answer>", "3.1416").value, numeric("0.001")("3.14", "3.1416").value
    (1.0, 0.0)
    """
    share = tolerance.endswith("%")
    limit = number(tolerance)
    if limit is None or limit[0] < 0:
        raise HoneError(f"numeric:{tolerance} is no tolerance: write numeric:0.01, or numeric:1% of the gold answer")

    def numeric_reward(completion: str, task: Task | str) -> Outcome:
        task = as_task(task)
        gold = number(task.answer or "")
        if gold is None:
            return invalid(f"the gold answer {(task.answer or '')[:60]!r} is not a number")
        found = final_number(completion, task.prompt)
        if found is None or (found[1] and gold[1] and found[1] != gold[1]):
            return Outcome(value=0.0)
        most = limit[0] * abs(gold[0]) if share else limit[0]
        values = [found[0], found[0] / 100] if gold[1] == PERCENT and not found[1] else [found[0]]  # as maths does
        return Outcome(value=float(any(abs(value - gold[0]) <= most for value in values)))

    return numeric_reward


def words(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles; the characters of scripts without spaces.

    >>> words("The Eiffel-Tower, “Paris”!"), words("北京。")
    (['eiffeltower', 'paris'], ['北', '京'])
    """
    lowered = unicodedata.normalize("NFKC", text[:MAX_ANSWER]).lower()
    plain = "".join(c for c in lowered if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    return WORD.findall(_ARTICLES.sub(" ", plain))


def f1_reward(completion: str, task: Task | str) -> Outcome:
    """F1 = 2 p r / (p + r) over the words of the answer and of the gold one, with their counts (SQuAD).

    >>> f1_reward("<answer>the tower of Paris</answer>", "Eiffel tower").value
    0.4
    """
    task = as_task(task)
    gold = words(task.answer or "")
    if not gold:
        return invalid("the task has no gold answer with a word in it")
    found = words(final_answer(completion, task.prompt))
    shared = (Counter(gold) & Counter(found)).total()
    return Outcome(value=2 * shared / (len(gold) + len(found)))


MAX_GYM_ANSWER = 100_000  # characters


@cache
def _gym_scorer(name: str) -> Any:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise HoneError('tasks of reasoning-gym need the package: pip install "hone[gym]"') from error
    return reasoning_gym.get_score_answer_fn(name)


def gym_reward(completion: str, task: Task) -> Outcome:
    """The package's own score, from 0 to 1, of the answer tag, or without one of the text outside of thoughts.

    0 for an answer on which the package raises, if it reads the gold one: `prime_factorization` raises on words.
    """
    task = as_task(task)
    name, entry = task.extra.get("gym"), task.extra.get("metadata")
    if not isinstance(name, str) or entry is None:
        return invalid("the task is not of reasoning-gym: it has no columns gym and metadata")
    answer = answer_text(completion, task.prompt)[:MAX_GYM_ANSWER]
    row = {"question": task.extra.get("question", ""), "answer": task.answer, "metadata": entry}
    score = _gym_scorer(name)
    try:
        return Outcome(value=float(score(answer, row)))
    except Exception:
        if task.answer is None or score(task.answer, row) != 1:
            raise
        return Outcome(value=0.0)
