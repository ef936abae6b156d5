r"""The maths verifier: finds the answers that a completion states, and compares them with the gold one without floats.

Equal texts and numbers are compared here in microseconds. Only other expressions go to SymPy, in a process that is
ended when it takes too long (`workers`). `expression` refuses what would hang it. docs/verifiers.md has the rules.
"""

import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm

from hone.errors import HoneError
from hone.reward.outcome import as_task, invalid
from hone.reward.verify import choice
from hone.reward.verify.answers import boxes
from hone.reward.verify.math import workers
from hone.reward.verify.math.amount import PERCENT, amount, same_amount, unit_ratio, unit_sizes
from hone.reward.verify.math.arithmetic import evaluate_arithmetic
from hone.reward.verify.math.expression import FUNCTIONS, Refused, safe_for_parser, symbols, words
from hone.reward.verify.math.extract import MAX_PLACES, places
from hone.reward.verify.math.form import Form, form, relation
from hone.reward.verify.math.match import Comparer, answer_for, same, true
from hone.reward.verify.math.normalise import normalise
from hone.types import Outcome, Task

_BASE = re.compile(r"\(?([0-9A-F]*[0-9][0-9A-F]*)\)?(?:_\{?\s?\(?([0-9]{1,2}|[a-z]{3,8})\)?\s?\}?| base ([0-9]{1,2}))")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BASES |= {"ten": "10", "twelve": "12", "sixteen": "16"}
_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]{2,}(?:[' -]+[A-Za-z]+)*")
_ARITHMETIC = re.compile(r"(?:[0-9.,()*+\s/-]|\\times|\\cdot|\\div)+")
_FRACTIONS = re.compile(r"(?:[0-9.,()*+\s/{}\[\]-]|\\times|\\cdot|\\div|\\frac)+")
# a sign between two numbers, or nothing between two groups or a number and a group
_OPERATION = re.compile(
    r"(?<=[0-9)}\]])\s?(?:[-+*]|\\times|\\cdot|\\div|\\frac)|(?<=[0-9)\]])\s?[(\[{]|[)}\]]\s?[0-9(\[]"
    r"|(?<!\\frac)(?<!\})\{[^{}]*\}\s?\{"
)
_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")  # one between two digits says that they are two numbers
_UNIT = re.compile(
    r"(.*\S)(?:\s|(?<=[^A-Za-z\\\s]))((?:[A-Za-z]{2,}|[\u00b0$\u20ac\u00a3%])(?:\^\{?[23]\}?)?|[A-Za-z]+/[A-Za-z]+)",
    re.DOTALL,
)
# words of three letters or more after an expression, as in `9\\pi square units`
_WITH_UNIT_WORDS = re.compile(r"(.*?[0-9)}\]A-Za-z])\s((?:[A-Za-z]{3,}\s)*[A-Za-z]{3,}(?:\^\{?[23]\}?)?)", re.DOTALL)
_OR = re.compile(r",?\s*(?:\\text\s?\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z]))")
# 1/2 (or 0.5), 18 (9 * 2): an answer and the same in brackets
_REPEATED_IN_BRACKETS = re.compile(
    r"([^()]*[0-9}$])\s+\((?:(?:or|i\.e\.,?|that is,?|=|\\approx|\u2248)\s*)?([^()]*[0-9][^()]*)\)\.?"
)
_OPTION = re.compile(r"[A-J]")
_UNIT_WITHOUT_SPACE = re.compile(r"[-+0-9.,/]*[0-9][A-Za-z]")
_PROSE = re.compile(r"(?<![\\A-Za-z])([a-z]{3,})\s+([a-z]{3,})(?![A-Za-z])")
_BETWEEN_BOXES = re.compile(r"[^A-Za-z]{0,40}|.{0,40}?(?:[,;]|(?<![A-Za-z])and(?![A-Za-z])).{0,40}", re.DOTALL)


_DIVISORS = re.compile(r"\\(gcd|lcm|max|min) ?(?:\(|\\\{) ?([0-9]{1,12}(?: ?, ?[0-9]{1,12}){1,5}) ?(?:\)|\\\})")
_PERCENT = re.compile(r"[\s$)\\]*(?:%|per ?cent\b|pct\b)")


class Unusable(Exception):
    """The gold answer cannot be compared with anything, for this reason."""


class TooCostly(Exception):
    """Comparing needs more than a worker may have, and the answer is the cause, not the gold one."""


@lru_cache(4096)
def gold_form(answer: str) -> Form:
    """The form of the gold answer, or of the final answer of a worked solution; Unusable where it cannot be read."""
    found = form(answer if amount(answer) is not None else _answer_of_solution(answer))
    if found is None:
        raise Unusable("it is empty, too long or not well formed")
    for leaf in found.leaves():
        if amount(leaf) is None and not _BASE.fullmatch(leaf) and not _is_text(leaf):
            _check_gold_leaf(leaf)
    try:
        if _chains_are_true(found):
            return found
    except TooCostly as costly:
        raise Unusable(str(costly)) from costly
    raise Unusable("its equation chain is not true")


def _answer_of_solution(answer: str) -> str:
    """The last answer of a worked solution, or all of its boxes where commas or "and" join them."""
    spans = sorted(boxes(answer))
    found = places(answer[spans[0][0] :] if spans and "<answer>" not in answer else answer)
    if len(spans) == len(found) > 1 and all(_BETWEEN_BOXES.fullmatch(answer[a[1] : b[0]]) for a, b in pairwise(spans)):
        return ", ".join(found)
    percent = "%" if spans and found and _PERCENT.match(answer, spans[-1][1]) else ""
    return found[-1] + percent if found else answer


def _chains_are_true(found: Form) -> bool:
    return (found.kind not in ("chain", "about") or true(found, COMPARER)) and all(map(_chains_are_true, found.parts))


def _is_text(leaf: str) -> bool:
    """Whether it is a word such as "east", which is compared as text."""
    return leaf in (r"\ldots", r"\emptyset") or _WORDS.fullmatch(leaf) is not None


def _check_gold_leaf(leaf: str) -> None:
    if (prose := _PROSE.search(_split_unit(leaf)[0])) and not {*prose.groups()} & {*FUNCTIONS.split()}:
        raise Unusable(f"it has words beside numbers: {prose.group()}")
    try:
        for side in leaf.split("="):
            safe_for_parser(_split_unit(side)[0])
    except Refused as refused:
        raise Unusable(str(refused)) from refused


def _split_unit(leaf: str) -> tuple[str, str]:
    r"""An expression and its unit: `\frac{\pi}{2}` and "cm" of `\frac{\pi}{2} cm`."""
    if leaf[:1] in ("$", "\u20ac", "\u00a3") and len(leaf) > 1:
        return leaf[1:], leaf[0]
    counted = _WITH_UNIT_WORDS.fullmatch(leaf)
    stated = amount(f"1 {counted.group(2)}") if counted else None
    if counted and stated and stated[0] == 1 and not {*counted.group(2).lower().split()} & {*FUNCTIONS.split()}:
        return counted.group(1), stated[1]
    found = _UNIT.fullmatch(leaf)
    if found is None or not (found.group(2) == PERCENT or unit_sizes(found.group(2))):
        return leaf, ""
    return found.group(1), found.group(2)


def equal(gold: str, answer: str) -> bool:
    """Whether two expressions are equal; Unusable if the gold one cannot be read, NoVerdict if a worker fails."""
    if _SPACE.sub("", gold) == _SPACE.sub("", answer):
        return True
    numbers = amount(gold), amount(answer)
    if (
        numbers[0] is not None and numbers[0][1] and _UNIT_WITHOUT_SPACE.fullmatch(answer)
    ):  # where a unit is asked for, the m of 5m is one
        numbers = numbers[0], amount(f"{answer[:-1]} {answer[-1]}")
    if numbers[0] is not None and numbers[1] is not None:
        return same_amount(*numbers[0], *numbers[1])
    based = [_BASE.fullmatch(text) for text in (gold, answer)]
    if any(based):
        return _same_base(gold, answer, based)
    if _is_text(gold):
        return _plain_word(gold) == _plain_word(answer) or _letters_of_product(answer) == sorted(gold)
    if _OPTION.fullmatch(gold) and gold in answer and choice.letter(answer) == gold:
        return True
    if numbers[0] is not None and _is_unevaluated(_split_unit(answer)[0]):
        return False
    return _same_measure(gold, answer)


def _plain_word(word: str) -> str:
    """The word in lower case, without quotes and article."""
    return re.sub(r"^(?:an?|the) (?=[a-z])", "", word.strip("\"'`\u201c\u201d\u2018\u2019").casefold())


def _letters_of_product(answer: str) -> list[str]:
    r"""The letters of a product such as `a b c` or `a \cdot b \cdot c`, in order; [] of anything else."""
    found = re.split(r"\s*(?:\\cdot|\\times|\*|\s)\s*", answer)
    return sorted(found) if all(len(letter) == 1 and letter.isalpha() for letter in found) else []


def _same_measure(gold: str, answer: str) -> bool:
    """Two expressions with their units, by the rules of `same_amount`."""
    (gold, unit), (answer, other) = _split_unit(gold), _split_unit(answer)
    if PERCENT in (unit, other) and unit != other:
        if unit:
            return not other and (_by_symbols(gold, answer) or _by_symbols(rf"\frac{{{gold}}}{{100}}", answer))
        return _by_symbols(gold, rf"\frac{{{answer}}}{{100}}")
    size = unit_ratio(unit, other) if unit and other else 1
    return bool(size) and _by_symbols(
        gold, answer if size == 1 else rf"\frac{{{size.numerator}({answer})}}{{{size.denominator}}}"
    )


def _is_unevaluated(answer: str) -> bool:
    """Whether it is a sum or product of plain numbers that is not worked out."""
    return _ARITHMETIC.fullmatch(answer) is not None or (
        _FRACTIONS.fullmatch(answer) is not None and _OPERATION.search(answer) is not None
    )


def _same_base(gold: str, answer: str, based: list[re.Match[str] | None]) -> bool:
    """Whether the digits are equal and the bases too. Only one of the two needs to name its base."""
    digits = [match.group(1) if match else text.strip("()") for match, text in zip(based, (gold, answer), strict=True)]
    names = [match.group(2) or match.group(3) for match in based if match]
    bases = {_BASES.get(name, name) for name in names}
    if len(bases) != 1 or digits[0] != digits[1] or not (base := bases.pop()).isdigit():
        return False
    return all(int(digit, 16) < int(base) for digit in digits[0])  # 5_2 is no number


def _by_symbols(gold: str, answer: str, kind: str = "") -> bool:
    letters = symbols(gold)
    if not symbols(answer) <= letters:
        return False
    if any(not {*word} <= letters for word in words(answer)):
        return False
    if answer.count("=") != gold.count("=") or answer.count("=") > 1:
        return False
    try:
        sides = ["=".join(safe_for_parser(side) for side in text.split("=")) for text in (gold, answer)]
    except Refused:
        return False
    absent = workers.missing()
    if absent and amount(gold) is not None:  # without the library a number has to be written as one
        return False
    if absent:
        raise HoneError(f"the gold answer {gold[:60]!r} is no number, and {absent}")
    return _ask_worker(kind or ("equation" if "=" in gold else "value"), *sides)


@lru_cache(8192)
def _ask_worker(kind: str, gold: str, answer: str) -> bool:
    """A worker's verdict. Too much work is TooCostly if the answer causes it, Unusable if the gold answer does."""
    try:
        said = workers.WORKERS.ask({"kind": kind, "gold": gold, "answer": answer})
    except workers.Exhausted as exhausted:
        if answer and _affordable(kind, gold):
            raise TooCostly(str(exhausted)) from exhausted
        raise Unusable(str(exhausted)) from exhausted
    if "unreadable" in said:
        raise Unusable("the parser cannot read it")
    return said["equal"] is True


@lru_cache(4096)
def _affordable(kind: str, gold: str) -> bool:
    """Whether the gold answer alone leaves enough processor time and memory for an answer like it."""
    try:
        return not _ask_worker(kind, gold, "")
    except Unusable:
        return False


def _number_of(text: str) -> Fraction | None:
    """The value of a number or of arithmetic with numbers, without their units."""
    stated = amount(text)
    if stated is not None:
        return stated[0]
    text = _DIVISORS.sub(_evaluate_divisor, text)
    plain = re.sub(r"(?<![\\A-Za-z])[A-Za-z]+(?![A-Za-z])", lambda m: "" if unit_sizes(m[0]) else m[0], text)
    return evaluate_arithmetic(re.sub(r"[$\u20ac\u00a3\u00a5\u20b9\u00b0]", "", plain))


def _evaluate_divisor(match: re.Match[str]) -> str:
    r"""The value of `\gcd(10,15)`."""
    numbers = [int(number) for number in match.group(2).split(",")]
    return str({"gcd": gcd, "lcm": lcm, "max": max, "min": min}[match.group(1)](*numbers))


def _is_true_step(left: str, right: str) -> bool:
    """Whether both sides of a chain's equals sign have the same value. A side that cannot be read has not."""
    with suppress(Unusable):
        if equal(right, left):
            return True
    amounts = amount(left), amount(right)
    if amounts[0] is not None and amounts[1] is not None and PERCENT not in (amounts[0][1], amounts[1][1]):
        return same_amount(*amounts[0], *amounts[1])
    values = _number_of(left), _number_of(right)
    if values[0] is not None and values[1] is not None:
        return values[0] == values[1]
    with suppress(Unusable):
        return _by_symbols(_split_unit(right)[0], _split_unit(left)[0])
    return False


def _is_rounding(exact: str, rounded: str) -> bool:
    """Whether a decimal is the exact value, rounded to its last digit or cut off after it."""
    stated, value = amount(rounded), _number_of(exact)
    if stated is None:
        return False
    digits = re.search(r"\.([0-9]+)", rounded)
    unit = Fraction(1, 10 ** len(digits.group(1)) if digits else 1) / (100 if stated[1] == PERCENT else 1)
    if value is not None:
        cut = 0 <= abs(value) - abs(stated[0]) < unit and value * stated[0] >= 0
        return cut or abs(value - stated[0]) <= unit / 2
    try:
        return not workers.missing() and _ask_worker(
            "rounded", safe_for_parser(_split_unit(exact)[0]), f"{stated[0]}={unit}"
        )
    except (Refused, Unusable):
        return False


def _same_relation(gold: str, answer: str) -> bool:
    """Two inequalities, or two "not equal", of which one is the other times a number."""
    first, second = relation(gold), relation(answer)
    if first is None or second is None or first[0] != second[0]:
        return False
    sides = [f"{small}={large}" for _, small, large in (first, second)]
    return _by_symbols(*sides, kind="equation" if first[0] == "unequal" else "order")


COMPARER = Comparer(equal=equal, true=_is_true_step, near=_is_rounding, related=_same_relation)


def _as_equation(found: Form) -> Form:
    """`y = 2x + 3` as an equation, for comparison with one that is not solved for y."""
    return Form("one", f"{found.name}={found.text}") if found.name and found.kind == "one" else found


def is_right(gold: Form, answer: str) -> bool:
    """Whether an answer of a completion is the gold one."""
    number = gold.kind == "one" and amount(gold.text) is not None
    answer = answer_for(gold, answer)
    found = form(answer)
    if found is None:
        return False
    if gold.kind == "one" and found.kind == "many" and len(ways := _OR.split(answer)) == len(found.parts):
        return all(is_right(gold, way) for way in ways)  # one value, written in several ways
    if number and found.kind == "one" and (again := _REPEATED_IN_BRACKETS.fullmatch(answer)):
        return is_right(gold, again.group(1)) and _same_in_brackets(gold.text, again.group(2))
    if "=" not in found.text + gold.text or not found.kind == gold.kind == "one":
        return same(gold, found, COMPARER)
    try:
        return same(_as_equation(gold), _as_equation(found), COMPARER)
    except Unusable:
        if gold.name:  # only the gold one's name cannot be read, which other answers do not need
            return False
        raise


def _same_in_brackets(gold: str, brackets: str) -> bool:
    """Whether the text in brackets after an answer is the same number, or a rounding of it."""
    text = normalise(brackets)
    return (
        is_right(Form("one", gold), text) or evaluate_arithmetic(text) == _number_of(gold) or _is_rounding(gold, text)
    )


def _all_right(gold: Form, answers: list[str]) -> bool:
    """Whether every answer is right, or all of them together are the gold list."""
    if len(answers) == len(gold.parts) > 1 and gold.kind in ("many", "{}") and is_right(gold, ", ".join(answers)):
        return True
    return 0 < len(answers) <= MAX_PLACES and all(is_right(gold, answer) for answer in answers)


def math_reward(completion: str, task: Task | str) -> Outcome:
    r"""1 where every answer the completion settles on equals the gold one, else 0; invalid where that is unusable.

    task: a task with a gold answer, or the gold answer itself. Read are answer tags, else boxes, else "the answer is"
    and its like (docs/verifiers.md has them all): a bare number is no answer.

    >>> math_reward(r"Half of 3 is \boxed{\frac{3}{2}}.", "1.5").value, math_reward("The answer is 2.", "1.5").value
    (1.0, 0.0)
    """
    task = as_task(task)
    try:
        gold = gold_form(task.answer or "")
        return Outcome(value=float(_all_right(gold, places(completion, task.prompt))))
    except Unusable as unusable:
        return invalid(f"the gold answer {(task.answer or '')[:60]!r} is unusable: {unusable}")
    except TooCostly as costly:
        return Outcome(value=0.0, reason=f"the answer is not accepted: {costly}")
    except workers.NoVerdict as failed:
        return invalid(str(failed))
