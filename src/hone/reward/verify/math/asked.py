r"""What an answer says of the thing that was asked for: `a^2+b^2 = 5`, `3 \pmod 7` and `P(1,2)`.

The gold answer says what kind of thing that is. Only text is rewritten here; what is left is compared as any answer is.
"""

import math
import re

from hone.reward.verify.math.arithmetic import worked_out
from hone.reward.verify.math.form import Form
from hone.reward.verify.math.guard import FUNCTIONS
from hone.reward.verify.math.name import VARIABLE, letters, named
from hone.reward.verify.math.number import CHANGING, amount, decimal_comma
from hone.reward.verify.math.tidy import tidy

MAX_ASKED = 200  # characters of an answer that is rewritten

_TOTAL = re.compile(r"([A-Za-z](?: ?[-+]? ?[A-Za-z]){1,5}) ?= ?(?=\S)")  # m + n = 73, xy = 6
_LEFT = re.compile(r"((?:[^={}]|\{(?:[^={}]|\{[^={}]*\})*\}){1,80}?) ?= ?(?=[^=\s])")
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
_LETTERED = re.compile(r"(?<![A-Za-z0-9\\)}'])([A-Z]'?(?:_\{?[A-Za-z0-9]{1,3}\}?)?) ?(?=\([^()]+,[^()]+\))")  # P(1,2)

_HOUR = re.compile(r"([0-9]{1,2}) ?([ap])m", re.IGNORECASE)  # 7 am; 7am is a product where no time is asked for
_WHOLE_HOUR = re.compile(r"([0-9]{1,2}):00 ?([ap]m)", re.IGNORECASE)


def asked(gold: Form, answer: str) -> str:
    """The answer as the gold one's kind lets it be read: without the quantity that it names before a value."""
    if len(answer) > MAX_ASKED:
        return answer
    if gold.kind == ":" and (hour := _HOUR.fullmatch(tidy(answer))):
        return f"{hour[1]}:00 {hour[2]}m"
    if gold.kind == "one" and _HOUR.fullmatch(gold.text) and " " in gold.text:
        return _WHOLE_HOUR.sub(r"\1 \2", tidy(answer))
    if gold.kind == "one":
        return _value(answer, gold) if re.search(r"[,=]|mod", answer) else answer
    if gold.kind in ("()", "many") and any(part.kind == "()" for part in (gold, *gold.parts)):
        return _LETTERED.sub(r"\1=", answer)
    return answer


def _value(answer: str, gold: Form) -> str:
    """Where one value is asked for: `m + n = 73` says what was asked for, and the comma of a number may be decimal."""
    number = amount(gold.text) is not None
    if not number and (letters(gold.text) or "=" in gold.text):
        return answer
    text = tidy(answer)
    total = None if gold.name else _total(text)
    text = text[total:] if total else text
    if number and not gold.name and (remainder := _remainder(text)):
        return remainder
    name = re.match(r"[A-Za-z] ?= ?", text)
    start = name.end() if name else 0
    point = decimal_comma(text[start:]) if number else None
    return answer if point is None and not total else text[:start] + (point or text[start:])


def _total(text: str) -> int:
    """Where the value behind a quantity of several names begins; 0 where there is none."""
    total = _TOTAL.match(text)
    if total and not {*total.group(1).lower().split(), total.group(1)} & {*CHANGING, *FUNCTIONS.split()}:
        return total.end()
    left = _LEFT.match(text) if "=" in text[1:] else None
    return left.end() if left and quantity(left.group(1)) else 0


def quantity(text: str) -> bool:
    """Whether it is made of two names or more, `a^2+b^2`; not a multiple or a power of such a thing, `2ab`, `(a+b)^2`.

    Those are equations on the way to the answer, as `2x = 5` is.
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


def _remainder(text: str) -> str:
    r"""The 3 of `3 \pmod 7` and `x \equiv 3 \pmod 7`; "" where the left side is neither a name nor a number with it."""
    found = _REMAINDER.fullmatch(text)
    if found is None or int(found["rest"]) >= int(found["of"]):
        return ""
    left = (found["left"] or "").strip()
    if not left or (found["sign"] != "=" and named(left)):
        return found["rest"]
    power, value = _POWER.fullmatch(left), worked_out(left)
    if power is not None:
        rest = pow(int(power[1]), int(power[2]), int(found["of"]))
    else:
        rest = value % int(found["of"]) if value is not None and value.denominator == 1 else -1
    return found["rest"] if rest == int(found["rest"]) else ""
