r"""The form of an answer: lists, sets, tuples, intervals, unions, matrices and inequalities down to single expressions.

Only text is taken apart here, by brackets and separators, in time linear in its length for each level.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hone.reward.verify.math_guard import GREEK
from hone.reward.verify.math_number import amount
from hone.reward.verify.math_tidy import tidy

MAX_TEXT, MAX_PARTS, MAX_LEVELS = 1000, 40, 6

_BRACKET = re.compile(r"\\(?:begin|end)\{[a-z]*\}|\\\\|\\[{}]|[()\[\]{}]")
_LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(GREEK.split())})(?![a-z]))"
_VARIABLE = rf"{_LETTER}(?:_\{{?\w{{1,3}}\}}?)?(?:\([A-Za-z0-9]{{1,3}}\))?"  # x, x_1, f(x), f(2)
_MEASURE = r"[A-Z]{2,3}|\|[A-Z]{2}\||\\overline\{[A-Z]{2}\}|(?:m ?)?\\angle ?[A-Z]{1,3}"  # AB, |AB|
_OF = rf"\\(?:sin|cos|tan) ?{_LETTER}"
_POINT = rf"\({_LETTER}(?: ?, ?{_LETTER}){{1,4}}\)"  # (x,y)
_NAME = re.compile(rf"({_VARIABLE}|{_MEASURE}|{_OF}|{_POINT})\s*(?:=|\\in(?![a-z]))\s*(?=\S)")
_BUILDER = re.compile(r"\\\{ ?([A-Za-z]) ?(?:\\in ?\(-\\infty,\\infty\) ?)?(?::|\||\\mid(?![a-z])) ?(.+)\\\}")
_RATIO = re.compile(r"[0-9]{1,20}(?: ?: ?[0-9]{1,20}){1,3}")
_SEPARATOR = re.compile(r",(?!\\!)|;|\b(?:or|and)\b|\\q?quad")
_ORDER = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|<=|>=|<|>")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


@dataclass(frozen=True, slots=True)
class Form:
    """An answer: `one` expression, or a list, set, tuple or interval by its brackets, union or matrix of parts."""

    kind: str  # one, many, union, matrix, or the two brackets
    text: str
    parts: tuple["Form", ...] = ()
    name: str = ""  # the x of "x = 5"

    def leaves(self) -> Iterator[str]:
        """Every single expression in it."""
        if self.kind == "one":
            yield self.text
        for part in self.parts:
            yield from part.leaves()


@lru_cache(2048)
def form(text: str) -> Form | None:
    """The form of an answer, or None of one that is empty, too long or not well formed."""
    if len(text) > MAX_TEXT:
        return None
    text = tidy(text)
    return _form(text, MAX_LEVELS) if text and _balanced(text) else None


def _step(token: str) -> int:
    """+1 for what opens, -1 for what closes; a line break in a matrix does neither."""
    if token in ("(", "[", "{", r"\{") or token.startswith(r"\begin"):
        return 1
    return -1 if token in (")", "]", "}", r"\}") or token.startswith(r"\end") else 0


def _balanced(text: str) -> bool:
    """Every bracket closes, though `[0, 1)` may do so with another one."""
    depth = 0
    for token in _BRACKET.finditer(text):
        depth += _step(token.group())
        if depth < 0:
            return False
    return depth == 0


def split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The text cut where the pattern is found outside of all brackets and environments; and what was cut out."""
    cuts = re.compile(rf"(?P<b>{_BRACKET.pattern})|(?P<s>{pattern.pattern})")
    depth, start, parts, seps = 0, 0, list[str](), list[str]()
    for token in cuts.finditer(text):
        if token.lastgroup == "b":
            depth += _step(token.group())
        elif depth == 0:
            parts.append(text[start : token.start()].strip())
            seps.append(token.group())
            start = token.end()
    return [*parts, text[start:].strip()], seps


def _form(text: str, levels: int) -> Form | None:
    if not text or not levels or text[0] in ",;":
        return None
    if amount(text) is not None and "=" not in text:
        return Form("one", text)
    for find in (_listed, _named, _united, _built, _enclosed, _signs, _matrix, _ratio, _ordered):
        found = find(text, levels)
        if found is not None:
            return found
    return Form("one", text)


def _listed(text: str, levels: int) -> Form | None:
    parts, seps = split(_kept(text), _SEPARATOR)
    parts = [part.replace("\1", ",") for part in parts if part]
    if len(parts) < 2 or not seps:
        return None
    found = _collect("many", text, parts, levels)
    if found is not None and set(seps) == {"or"} and _same_variable(found.parts):
        return Form("union", text, found.parts)
    return found


def _same_variable(parts: Sequence[Form]) -> bool:
    """Whether all are inequalities of one variable, as in "x < 1 or x > 2"."""
    return len({part.name for part in parts}) == 1 and all(part.name and _ORDER.search(part.text) for part in parts)


def _kept(text: str) -> str:
    """Thousands separators hidden where every other comma has a space after it."""
    hidden = _THOUSANDS.sub("\1", text)
    return hidden if re.search(r",\s", hidden) and not re.search(r",\S", hidden) else text


def _collect(kind: str, text: str, parts: list[str], levels: int) -> Form | None:
    """A form of parts, if each has one; parts that are lists themselves are joined on."""
    found = [_form(part, levels - 1) for part in parts] if len(parts) <= MAX_PARTS else [None]
    flat = list[Form]()
    for part in found:
        if part is None:
            return None
        flat += part.parts if part.kind == "many" and kind in ("many", "{}") and not part.name else [part]
    name = flat[0].name if kind == "many" and flat[0].name and not any(part.name for part in flat[1:]) else ""
    if name:
        flat[0] = Form(flat[0].kind, flat[0].text, flat[0].parts)
    return Form(kind, text, tuple(flat), name)


def _named(text: str, levels: int) -> Form | None:
    name = _NAME.match(text)
    if name is None or text.count("=") > 1 or _ORDER.search(text):
        return None
    letters = [letter.strip("\\ ") for letter in name.group(1).strip("()").split(",")]
    if letters != sorted(letters):  # (y,x)=(1,2) says another thing than (1,2)
        return None
    rest = _form(text[name.end() :].strip(), levels - 1)
    if rest is None or (len(letters) > 1 and rest.kind == "()" and len(rest.parts) != len(letters)):
        return None
    return Form(rest.kind, rest.text, rest.parts, name.group(1).replace(" ", ""))


def _united(text: str, levels: int) -> Form | None:
    parts, seps = split(text, re.compile(r"\\cup(?![a-z])"))
    return _collect("union", text, parts, levels) if seps else None


def _built(text: str, levels: int) -> Form | None:
    r"""`\{x \mid 0 < x < 5\}` as what it says of x."""
    builder = _BUILDER.fullmatch(text)
    said = _form(builder.group(2).strip(), levels - 1) if builder else None
    if builder is None or said is None or not _same_variable(said.parts if said.kind == "union" else [said]):
        return None
    return said if builder.group(1) in (said.name, *(part.name for part in said.parts)) else None


def _ratio(text: str, levels: int) -> Form | None:
    return _collect(":", text, text.split(":"), levels) if _RATIO.fullmatch(text) else None


def _signs(text: str, levels: int) -> Form | None:
    if text.count(r"\pm") != 1:
        return None
    both = [re.sub(r"^\+\s*", "", text.replace(r"\pm", sign)) for sign in ("+", "-")]
    return _collect("many", text, both, levels)


def _enclosed(text: str, levels: int) -> Form | None:
    if text[0] == "{" and _wraps(text):  # a group of TeX
        return _form(text[1:-1].strip(), levels - 1)
    start, end = re.match(r"\\\{|[(\[]", text), re.search(r"\\\}$|[)\]]$", text)
    if start is None or end is None or not _wraps(text):
        return None
    inside = text[start.end() : end.start()].strip()
    kind = start.group()[-1] + end.group()[-1]
    parts, seps = split(inside, re.compile(","))
    if seps or (kind == "{}" and inside != r"\emptyset"):
        return _collect(kind, text, parts, levels)
    return _form(inside, levels - 1) if kind == "()" else None


def _wraps(text: str) -> bool:
    """Whether the bracket at the start is closed by the one at the end."""
    depth = 0
    for token in _BRACKET.finditer(text):
        depth += _step(token.group())
        if depth == 0:
            return token.end() == len(text)
    return False


def _matrix(text: str, levels: int) -> Form | None:
    inner = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if inner is None or r"\begin" in inner.group(1):
        return None
    lines = [line for line in re.split(r"\\\\", inner.group(1)) if line.strip()]
    rows = [_collect("row", line, [cell.strip() for cell in line.split("&")], levels - 1) for line in lines]
    good = [row for row in rows if row is not None]
    if not good or len(good) < len(rows) or len({len(row.parts) for row in good}) != 1:
        return None
    return Form("matrix", text, tuple(good))


def _ordered(text: str, levels: int) -> Form | None:
    r"""`a \le x < b` and `x > a` as intervals."""
    parts, seps = split(text, _ORDER)
    if not seps or len(seps) > 2 or not all(parts):
        return None
    up = ["<" in sep or "le" in sep for sep in seps]
    closed = ["=" in sep or "\\" in sep for sep in seps]
    if not all(up) and any(up):
        return None
    if not up[0]:
        parts, closed = parts[::-1], closed[::-1]
    if len(parts) == 2:
        low = not re.fullmatch(r"[A-Za-z]", parts[0])  # 5 < x, or x < 5
        parts = [*parts, r"\infty"] if low else [r"-\infty", *parts]
        closed = [*closed, False] if low else [False, *closed]
    if not re.fullmatch(r"[A-Za-z]", parts[1]):
        return None
    kind = "(["[closed[0]] + ")]"[closed[1]]
    found = _collect(kind, text, [parts[0], parts[2]], levels)
    return None if found is None else Form(kind, text, found.parts, parts[1])


Equal = Callable[[str, str], bool]


def same(gold: Form, answer: Form, equal: Equal) -> bool:
    """Part by part: in order in tuples, intervals and matrices, in any order in lists, sets and unions."""
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if {gold.kind, answer.kind} == {"one"}:
        return equal(gold.text, answer.text)
    if {gold.kind, answer.kind} <= {"many", "{}", "one"}:
        return _matched(gold.parts or (gold,), answer.parts or (answer,), equal)
    if gold.kind != answer.kind or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind == "union":
        return _matched(gold.parts, answer.parts, equal)
    return all(same(g, a, equal) for g, a in zip(gold.parts, answer.parts, strict=True))


def _matched(gold: tuple[Form, ...], answer: tuple[Form, ...], equal: Equal) -> bool:
    """Every part has a partner of its own; equal texts are paired first, for that costs nothing."""
    if len(gold) != len(answer):
        return False
    left, rest = list(answer), list[Form]()
    for part in gold:
        twin = next((other for other in left if other.text == part.text and other.name == part.name), None)
        if twin is None:
            rest.append(part)
        else:
            left.remove(twin)
    for part in rest:
        partner = next((other for other in left if same(part, other, equal)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True
