r"""Compares an answer's form with the gold one's, part by part. A `Comparer` compares single expressions.

Parts are compared in order in tuples, intervals and matrices, in any order in lists, sets and unions. An answer's
equation chain counts only if it is true. The gold answer says what is asked for: `m + n = 73` is 73 where that is a
number.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hone.reward.verify.math.amount import CHANGING, amount, decimal_comma
from hone.reward.verify.math.arithmetic import evaluate_arithmetic
from hone.reward.verify.math.expression import FUNCTIONS, VARIABLE, left_name, letters
from hone.reward.verify.math.form import Form, point
from hone.reward.verify.math.normalise import normalise

_INTERVALS = ("()", "[]", "[)", "(]")
_DOMAIN = re.compile(r"[ZNQRC](?:\^?\{?[*+]\}?|_\{?(?:[+>0-9]|\\ge ?0)\}?)?")


@dataclass(frozen=True, slots=True)
class Comparer:
    """How single expressions are compared."""

    equal: Callable[[str, str], bool]  # the gold one and the answer
    true: Callable[[str, str], bool]  # a step of a chain: both sides have the same value
    near: Callable[[str, str], bool]  # the second is the first, rounded
    related: Callable[[str, str], bool]  # two inequalities or two "not equal", one the other times a number

    def of_one_text(self) -> "Comparer":
        """For members of one chain. None is the gold answer, so a member that cannot be read is just not equal."""
        return replace(self, equal=lambda last, member: self.true(member, last), related=lambda _, __: False)


def same(gold: Form, answer: Form, comparer: Comparer) -> bool:
    """Whether the answer is the gold one."""
    gold, answer = _in_one_kind(gold, answer)
    if not _names_agree(gold.name, answer.name):
        return False
    if answer.kind in ("chain", "about"):
        return true(answer, comparer) and any(same(gold, value, comparer) for value in values(answer))
    if gold.kind in ("chain", "about"):
        return any(same(value, answer, comparer) for value in values(gold))
    if {gold.kind, answer.kind} == {"one"}:
        return comparer.equal(gold.text, answer.text)
    if {gold.kind, answer.kind} in ({"()", "many"}, {"()", "{}"}):
        gold, answer = _as_point(gold), _as_point(answer)
        return gold.kind == answer.kind and same(gold, answer, comparer)
    if {gold.kind, answer.kind} <= {"many", "{}", "one"}:
        return _same_lists(gold.parts or (gold,), answer.parts or (answer,), comparer)
    if {"()", "matrix"} == {gold.kind, answer.kind}:
        gold, answer = _entries_as_tuple(gold), _entries_as_tuple(answer)
    if _is_relation(gold) or _is_relation(answer):
        return _same_relation(gold, answer, comparer)
    if gold.kind != answer.kind or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind in ("union", "system"):
        return _same_in_any_order(gold.parts, answer.parts, comparer)
    if gold.kind == "mod":
        return _same_congruence(gold, answer, comparer)
    return all(same(g, a, comparer) for g, a in zip(gold.parts, answer.parts, strict=True))


def _in_one_kind(gold: Form, answer: Form) -> tuple[Form, Form]:
    """Both forms in the same kind, where times, intervals or matrices are written in two ways."""
    kinds = {gold.kind, answer.kind}
    if kinds == {":"} and ("am" in (gold.name, answer.name)) + ("pm" in (gold.name, answer.name)) == 1:
        return _time_of_24_hours(gold, answer), _time_of_24_hours(answer, gold)
    if kinds == {"matrix", "[]"}:
        return _matrix_of_lists(gold), _matrix_of_lists(answer)
    if kinds == {"union", "many"}:
        closed = gold.kind == "union" or any(part.kind != "()" or r"\infty" in part.text for part in gold.parts)
        # (1,2) may be a point
        return (_union_of_intervals(gold), _union_of_intervals(answer)) if closed else (gold, answer)
    if "many" in kinds and not kinds.isdisjoint(_INTERVALS):
        return _intersection(gold), _intersection(answer)
    return gold, answer


def _time_of_24_hours(form: Form, other: Form) -> Form:
    """A time with "am" or "pm" as one of 24 hours, where the other time can only be such a time."""
    hours = [amount(time.parts[0].text) for time in (form, other)]
    found = [int(hour[0]) for hour in hours if hour is not None]
    if form.name not in ("am", "pm") or other.name or len(found) < 2 or not 1 <= found[0] <= 12:
        return form
    if 1 <= found[1] <= 12:
        return form
    hour = replace(form.parts[0], text=str(found[0] % 12 + 12 * (form.name == "pm")))
    return replace(form, parts=(hour, *form.parts[1:]), name="")


def _matrix_of_lists(form: Form) -> Form:
    """`[[1,2],[3,4]]` as a matrix."""
    if form.kind != "[]" or any(row.kind != "[]" or len(row.parts) != len(form.parts[0].parts) for row in form.parts):
        return form
    return replace(form, kind="matrix", parts=tuple(replace(row, kind="row") for row in form.parts))


def _union_of_intervals(form: Form) -> Form:
    """A list of intervals as their union. Other forms stay, such as `x < 1 and x > 2`."""
    united = all(part.kind in _INTERVALS and len(part.parts) == 2 and not part.name for part in form.parts)
    return replace(form, kind="union") if united and form.kind == "many" else form


def _intersection(form: Form) -> Form:
    """`x >= 0 and x <= 1` as one interval."""
    names = {part.name for part in form.parts}
    if form.kind != "many" or len(form.parts) != 2 or len(names) != 1 or "" in names:
        return form
    below = [part for part in form.parts if part.kind in _INTERVALS and part.parts[0].text == r"-\infty"]
    above = [part for part in form.parts if part.kind in _INTERVALS and part.parts[-1].text == r"\infty"]
    if len(below) != 1 or len(above) != 1 or below == above:
        return form
    ends = above[0].parts[0], below[0].parts[-1]
    low, high = (amount(end.text) for end in ends)
    if low is None or high is None or low[0] >= high[0]:
        return form
    return Form(above[0].kind[0] + below[0].kind[1], form.text, ends, names.pop())


def _as_point(form: Form) -> Form:
    """Named entries, or a set of one point, as a point; any other form as it is."""
    if form.kind == "{}" and len(form.parts) == 1:
        return form.parts[0]
    return point(form) or form


def values(chain: Form) -> list[Form]:
    """The values that a chain states: its last member, and the rounding of that where there is one."""
    if chain.kind not in ("chain", "about"):
        return [replace(chain, name="")]
    rounded = [chain.parts[1]] if chain.kind == "about" else []
    return values(chain.parts[0 if rounded else -1]) + rounded


def true(chain: Form, comparer: Comparer) -> bool:
    """Whether every member equals the last. A member with other letters, the r^2 of `A = r^2 = 9`, is not checked."""
    if chain.kind == "about":
        exact = values(chain.parts[0])[0]
        return true(chain.parts[0], comparer) and exact.kind == "one" and comparer.near(exact.text, chain.parts[1].text)
    if chain.kind != "chain":
        return True
    last = chain.parts[-1]
    for member in chain.parts[:-1]:
        found = letters(member.text)
        if found - letters(last.text):
            if not chain.name or chain.name in found:
                return False
        elif not same(last, member, comparer.of_one_text()):
            return False
    return True


def _names_agree(name: str, other: str) -> bool:
    """Whether both name the same quantity. One may have no name, x may be x_1, and y may be f(x)."""
    if not name or not other or name == other:
        return True
    plain = [re.sub(r"_.*", "", text) for text in (name, other)]
    if plain[0] == plain[1]:
        return "_" not in name or "_" not in other
    return "y" in (name, other) and any(re.fullmatch(r"[A-Za-z]\([a-z]\)", text) for text in (name, other))


def _same_lists(gold: Sequence[Form], answer: Sequence[Form], comparer: Comparer) -> bool:
    """Compares lists in any order. Where only the gold list names its entries, in the order of the names."""
    declared = [any(map(_declares_domain, parts)) for parts in (gold, answer)]
    if declared[0] != declared[1]:  # the "k in Z" that one leaves out
        gold, answer = ([part for part in parts if not _declares_domain(part)] for parts in (gold, answer))
    names = [[part.name for part in parts] for parts in (gold, answer)]
    if len(gold) == len(answer) > 1 and all(names[0]) and len({*names[0]}) > 1 and not any(names[1]):
        return all(same(g, a, comparer) for g, a in zip(gold, answer, strict=True))
    return _same_in_any_order(gold, answer, comparer)


def _declares_domain(part: Form) -> bool:
    return bool(part.name) and part.kind == "one" and _DOMAIN.fullmatch(part.text) is not None


def _entries_as_tuple(form: Form) -> Form:
    """A matrix of one row or column as the tuple of its entries."""
    if form.kind != "matrix" or 1 not in (len(form.parts), len(form.parts[0].parts)):
        return form
    return replace(form, kind="()", parts=tuple(entry for row in form.parts for entry in row.parts))


def _is_relation(form: Form) -> bool:
    return form.kind.startswith("order") or form.kind == "unequal"


def _same_relation(gold: Form, answer: Form, comparer: Comparer) -> bool:
    """Compares relations side by side, then as a whole: `-x > -1` is the interval `x < 1`."""
    if gold.kind == answer.kind and len(gold.parts) == len(answer.parts):
        both = zip(gold.parts, answer.parts, strict=True)
        if all(g.kind == a.kind == "one" and comparer.equal(g.text, a.text) for g, a in both):
            return True
    return comparer.related(gold.text, answer.text)


def _same_congruence(gold: Form, answer: Form, comparer: Comparer) -> bool:
    """The same modulus, and remainders that differ by a multiple of it."""
    numbers = [amount(part.text) for part in (gold.parts[1], answer.parts[1], gold.parts[2])]
    found = [number[0] for number in numbers if number is not None]
    rests = len(found) == 3 and found[2] != 0 and (found[0] - found[1]) % found[2] == 0
    others = [0, 2] if rests else [0, 1, 2]
    return all(same(gold.parts[i], answer.parts[i], comparer) for i in others)


def _same_in_any_order(gold: Sequence[Form], answer: Sequence[Form], comparer: Comparer) -> bool:
    """Whether the parts match one to one. Equal texts are paired first, because that costs nothing."""
    if len(gold) != len(answer):
        return False
    left, rest = list(answer), list[Form]()
    for part in gold:
        equal = next((other for other in left if other.text == part.text and other.name == part.name), None)
        if equal is None:
            rest.append(part)
        else:
            left.remove(equal)
    for part in rest:
        partner = next((other for other in left if same(part, other, comparer)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


MAX_REWRITTEN = 200  # characters of an answer that is rewritten

_NAMED_TOTAL = re.compile(r"([A-Za-z](?: ?[-+]? ?[A-Za-z]){1,5}) ?= ?(?=\S)")  # m + n = 73, xy = 6
_LEFT_SIDE = re.compile(r"((?:[^={}]|\{(?:[^={}]|\{[^={}]*\})*\}){1,80}?) ?= ?(?=[^=\s])")
_OPERATORS = re.compile(rf"\\(?:frac|cdot|times|sqrt|{FUNCTIONS.replace(' ', '|')})(?![a-z])")
_NAMES = re.compile(rf"[A-Z]{{2,4}}(?![A-Za-z])|{VARIABLE}")
_PLAIN_LEFT = re.compile(r"[-+*/^ {}()0-9,]*")  # what may stand beside names
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[a-z]{3,}|[A-Z][a-z]+|is|of|if|or|no|in|at|to|so|we|by|an|as)(?![A-Za-z])")
_GROUP = re.compile(r"\([^(){}]*\)|\{[^(){}]*\}")
_REMAINDER = re.compile(
    r"(?:(?P<left>[^=<>]{1,80}?) ?(?P<sign>\\equiv|=) ?)?(?:\\equiv ?)?(?P<rest>[0-9]{1,9}) ?[({]? ?"
    r"(?:\\[pb]?mod(?![a-z])|mod\b)[{ ]*(?P<of>[0-9]{1,9})[})]*"
)
_POWER = re.compile(r"([0-9]{1,9}) ?\^ ?\{? ?([0-9]{1,9}) ?\}?")
_NAMED_POINT = re.compile(
    r"(?<![A-Za-z0-9\\)}'])([A-Z]'?(?:_\{?[A-Za-z0-9]{1,3}\}?)?) ?(?=\([^()]+,[^()]+\))"
)  # P(1,2)

_HOUR = re.compile(r"([0-9]{1,2}) ?([ap])m", re.IGNORECASE)  # 7 am; 7am is a product where no time is asked for
_WHOLE_HOUR = re.compile(r"([0-9]{1,2}):00 ?([ap]m)", re.IGNORECASE)


def answer_for(gold: Form, answer: str) -> str:
    """The answer rewritten for the gold answer's kind: without the quantity that it names before a value."""
    if len(answer) > MAX_REWRITTEN:
        return answer
    if gold.kind == ":" and (hour := _HOUR.fullmatch(normalise(answer))):
        return f"{hour[1]}:00 {hour[2]}m"
    if gold.kind == "one" and _HOUR.fullmatch(gold.text) and " " in gold.text:
        return _WHOLE_HOUR.sub(r"\1 \2", normalise(answer))
    if gold.kind == "one":
        return _value_asked_for(answer, gold) if re.search(r"[,=]|mod", answer) else answer
    if gold.kind in ("()", "many") and any(part.kind == "()" for part in (gold, *gold.parts)):
        return _NAMED_POINT.sub(r"\1=", answer)
    return answer


def _value_asked_for(answer: str, gold: Form) -> str:
    """The answer as one value: `m + n = 73` as 73, and `3,5` as 3.5."""
    number = amount(gold.text) is not None
    if not number and (letters(gold.text) or "=" in gold.text):
        return answer
    text = normalise(answer)
    total = None if gold.name else _value_start(text)
    text = text[total:] if total else text
    if number and not gold.name and (remainder := _remainder_of(text)):
        return remainder
    name = re.match(r"[A-Za-z] ?= ?", text)
    start = name.end() if name else 0
    point = decimal_comma(text[start:]) if number else None
    return answer if point is None and not total else text[:start] + (point or text[start:])


def _value_start(text: str) -> int:
    """The index at which the value after a quantity of several names begins; 0 without such a quantity."""
    total = _NAMED_TOTAL.match(text)
    if total and not {*total.group(1).lower().split(), total.group(1)} & {*CHANGING, *FUNCTIONS.split()}:
        return total.end()
    left = _LEFT_SIDE.match(text) if "=" in text[1:] else None
    return left.end() if left and is_quantity(left.group(1)) else 0


def is_quantity(text: str) -> bool:
    """Whether the text is a quantity of two names or more, `a^2+b^2`, and not a multiple or power: `2ab`, `(a+b)^2`.

    An equation for a multiple is a step on the way to the answer, as `2x = 5` is.
    """
    if _WORD.search(text) or re.search(r"\{ ?[0-9]+ ?\}$|/ ?[0-9]+$", re.sub(r"[\^_] ?\{[^{}]*\}", "", text)):
        return False
    bare = re.sub(r"_ ?([A-Za-z0-9])", r"_{\1}", _OPERATORS.sub(" ", text))
    names = {re.sub(r"[ {}]", "", name) for name in _NAMES.findall(bare)} - {"e", "i"}
    if len(names) < 2 or not _PLAIN_LEFT.fullmatch(_NAMES.sub(" ", bare)):
        return False
    for _ in range(4):
        text = _GROUP.sub("", text)
    terms = re.split(r"(?=[-+])", text.replace(" ", "").removeprefix("+"))
    terms = [term for term in terms if term]
    factors = [int(found.group()) if (found := re.match(r"[0-9]+", term.lstrip("+-"))) else 1 for term in terms]
    one = len(terms) == 1 and re.search(r"\^|\\(?!frac|cdot|times)", terms[0]) is not None
    return bool(terms) and not one and math.gcd(*factors) == 1 and any(term[0] != "-" for term in terms)


def _remainder_of(text: str) -> str:
    r"""The 3 of `3 \pmod 7` and `x \equiv 3 \pmod 7`; "" where the left side is neither a name nor such a number."""
    found = _REMAINDER.fullmatch(text)
    if found is None or int(found["rest"]) >= int(found["of"]):
        return ""
    left = (found["left"] or "").strip()
    if not left or (found["sign"] != "=" and left_name(left)):
        return found["rest"]
    power, value = _POWER.fullmatch(left), evaluate_arithmetic(left)
    if power is not None:
        rest = pow(int(power[1]), int(power[2]), int(found["of"]))
    else:
        rest = value % int(found["of"]) if value is not None and value.denominator == 1 else -1
    return found["rest"] if rest == int(found["rest"]) else ""
