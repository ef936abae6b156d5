r"""Mathematical answers: found where the completion states them, taken apart, and compared without floats.

Equal text and numbers are settled here in microseconds. Only expressions that are neither go to SymPy, in a process
that is ended when it takes too long (`math_workers`), past a guard that keeps out what would hang it (`math_guard`).
docs/verifiers.md has the rules.
"""

import re
from functools import lru_cache

from hone.errors import HoneError
from hone.reward.outcome import invalid
from hone.reward.verify import math_units, math_workers
from hone.reward.verify.math_extract import MAX_PLACES, final_answer, places
from hone.reward.verify.math_form import Form, form, same
from hone.reward.verify.math_guard import FUNCTIONS, Refused, admitted, symbols
from hone.reward.verify.math_number import amount
from hone.types import Outcome, Task

_BASE = re.compile(r"([0-9]+)_\{?([0-9]{1,2})\}?")
_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]{2,}(?:[' -]+[A-Za-z]+)*")
_ARITHMETIC = re.compile(r"(?:[0-9.,()*+\s/-]|\\times|\\cdot|\\div)+")
_FRACTIONS = re.compile(r"(?:[0-9.,()*+\s/{}\[\]-]|\\times|\\cdot|\\div|\\frac)+")
# a sign between two numbers, or nothing between two groups or a number and a group
_OPERATION = re.compile(
    r"(?<=[0-9)}\]])\s?(?:[-+*]|\\times|\\cdot|\\div|\\frac)|(?<=[0-9)\]])\s?[(\[{]|[)}\]]\s?[0-9(\[]"
    r"|(?<!\\frac)(?<!\})\{[^{}]*\}\s?\{"
)
_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")  # one between two digits says that they are two numbers
_UNIT = re.compile(r"(.*\S)(?:\s|(?<=[^A-Za-z\\\s]))((?:[A-Za-z]{2,}|°)(?:\^\{?[23]\}?)?)", re.DOTALL)
_PROSE = re.compile(r"(?<![\\A-Za-z])([a-z]{3,})\s+([a-z]{3,})(?![A-Za-z])")
_WORDLIKE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


class Unusable(Exception):
    """The gold answer can be compared with nothing, for this reason."""


@lru_cache(4096)
def gold_form(answer: str) -> Form:
    """The gold answer's form: of the text itself, or of the final answer of a worked solution; Unusable if neither."""
    stated = answer if amount(answer) is not None else final_answer(answer)
    found = form(answer if stated is None else stated)
    if found is None:
        raise Unusable("it is empty, too long or not well formed")
    for leaf in found.leaves():
        if amount(leaf) is None and not _BASE.fullmatch(leaf) and not _is_text(leaf):
            _admitted_gold(leaf)
    return found


def _is_text(leaf: str) -> bool:
    """A word, as in "east": compared as text."""
    return leaf in (r"\ldots", r"\emptyset") or _WORDS.fullmatch(leaf) is not None


def _admitted_gold(leaf: str) -> None:
    if (prose := _PROSE.search(leaf)) and not {*prose.groups()} & {*FUNCTIONS.split()}:
        raise Unusable(f"it has words beside numbers: {prose.group()}")
    try:
        for side in leaf.split("="):
            admitted(_measured(side)[0])
    except Refused as refused:
        raise Unusable(str(refused)) from refused


def _measured(leaf: str) -> tuple[str, str]:
    r"""An expression and its unit: `\frac{\pi}{2}` and "cm" of `\frac{\pi}{2} cm`."""
    found = _UNIT.fullmatch(leaf)
    if found is None or math_units.size(found.group(2)) is None:
        return leaf, ""
    return found.group(1), found.group(2)


def equal(gold: str, answer: str) -> bool:
    """Whether two single expressions are the same; Unusable if the gold one cannot be read, Failed without verdict."""
    if _SPACE.sub("", gold) == _SPACE.sub("", answer):
        return True
    numbers = amount(gold), amount(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return math_units.same(*numbers[0], *numbers[1])
    based = [_BASE.fullmatch(text) for text in (gold, answer)]
    if any(based):
        return _same_base(gold, answer, based)
    if _is_text(gold):
        return gold.casefold() == answer.casefold()
    known = numbers[0] is not None
    (gold, unit), (answer, other) = _measured(gold), _measured(answer)
    if known and _unworked(answer):
        return False
    if unit and other and math_units.size(unit) != math_units.size(other):
        return False
    return _by_symbols(gold, answer)


def _unworked(answer: str) -> bool:
    """Whether it is a sum or product of plain numbers, left to be worked out."""
    return _ARITHMETIC.fullmatch(answer) is not None or (
        _FRACTIONS.fullmatch(answer) is not None and _OPERATION.search(answer) is not None
    )


def _same_base(gold: str, answer: str, based: list[re.Match[str] | None]) -> bool:
    """Digits in a base: a base that only one of them names is set aside."""
    digits = [match.group(1) if match else text for match, text in zip(based, (gold, answer), strict=True)]
    bases = {match.group(2) for match in based if match}
    return digits[0] == digits[1] and len(bases) == 1


def _by_symbols(gold: str, answer: str) -> bool:
    if not symbols(answer) <= symbols(gold) or _WORDLIKE.search(
        re.sub(r"\b(?:sin|cos|tan|log|ln|exp|pi)\b", "", answer)
    ):
        return False
    kind = "equation" if "=" in gold and "=" in answer else "value"
    if answer.count("=") != gold.count("=") or answer.count("=") > 1:
        return False
    try:
        sides = ["=".join(admitted(side) for side in text.split("=")) for text in (gold, answer)]
    except Refused:
        return False
    absent = math_workers.missing()
    if absent and amount(gold) is not None:  # without the library a number has to be written as one
        return False
    if absent:
        raise HoneError(f"the gold answer {gold[:60]!r} is no number, and {absent}")
    return _asked(kind, *sides)


@lru_cache(8192)
def _asked(kind: str, gold: str, answer: str) -> bool:
    said = math_workers.WORKERS.ask({"kind": kind, "gold": gold, "answer": answer})
    if "equal" not in said:
        reason = "the parser cannot read it" if "unreadable" in said else None
        raise Unusable(reason) if reason else math_workers.Failed(f"crashed: {said.get('failed')}")
    return said["equal"] is True


def _rejoined(found: Form) -> Form:
    """`y = 2x + 3` as an equation again, to be compared with one that is not solved for y."""
    return Form("one", f"{found.name}={found.text}") if found.name and found.kind == "one" else found


def right(gold: Form, answer: str) -> bool:
    """Whether an answer, as a completion states it, is the gold one."""
    found = form(answer)
    if found is None:
        return False
    if "=" in found.text + gold.text and found.kind == gold.kind == "one":
        gold, found = _rejoined(gold), _rejoined(found)
    return same(gold, found, equal)


def math_reward(completion: str, task: Task) -> Outcome:
    """1 where every answer the completion settles on equals the gold one, else 0; invalid where that is unusable."""
    answers = places(completion)
    try:
        gold = gold_form(task.answer or "")
        value = 0 < len(answers) <= MAX_PLACES and all(right(gold, answer) for answer in answers)
    except Unusable as unusable:
        return invalid(f"the gold answer {str(task.answer)[:60]!r} is unusable: {unusable}")
    except math_workers.Failed as failed:
        return invalid(str(failed))
    return Outcome(value=float(value))
