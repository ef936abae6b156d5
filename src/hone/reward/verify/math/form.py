r"""Reads the form of an answer: lists, sets, tuples, intervals, unions, matrices, relations and equation chains.

Answers are split at brackets and separators, as text. For each level of nesting the time is linear in the length.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from hone.reward.verify.math.amount import amount, decimal_comma
from hone.reward.verify.math.expression import POINT, VARIABLE, left_name, letters, stated_value, symbols
from hone.reward.verify.math.normalise import normalise

MAX_TEXT, MAX_PARTS, MAX_LEVELS = 1000, 40, 6

_BRACKET = re.compile(r"\\(?:begin|end)\{[a-z]*\}|\\\\|\\[{}]|[()\[\]{}]")
_EQUALS = re.compile(r":?(?<![<>=])=(?!=)")
_APPROXIMATELY = re.compile(r"\\approx(?![a-z])")
_MEMBER = re.compile(rf"({VARIABLE}|{POINT}) ?\\in(?![a-z]) ?(?=\S)")
_BUILDER = re.compile(r"\\\{ ?([A-Za-z]) ?(?:\\in ?\(-\\infty,\\infty\) ?)?(?::|\||\\mid(?![a-z])) ?(.+)\\\}")
_WITHOUT = re.compile(r"\(-\\infty,\\infty\) ?(?:\\setminus(?![a-z])|-) ?\\\{(.+)\\\}")
_OUTSIDE = re.compile(r"\(-\\infty,\\infty\) ?(?:\\setminus(?![a-z])|-) ?([\[(])([^\[\](),;]+),([^\[\](),;]+)([\])])")
_OPTION = re.compile(r"([A-J])\)(?=\s|$)")  # of a choice
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2}) ?([ap])\.? ?m\.?", re.IGNORECASE)
_CONGRUENT = re.compile(r"(.+?)\\equiv(.+?)[({ ]*(?:\\[pb]?mod(?![a-z])|\bmod\b)[{ ]*([^{}()]+)[})]*")
_SEPARATOR = re.compile(
    r",(?!\\!)|;|(?<![A-Za-z0-9\\])(?:or|and)(?![A-Za-z0-9])|(?<=[0-9)\]}])(?:or|and)(?=[A-Z0-9(\[\\ -])|\\quad"
)
_STRONG_SEPARATOR = re.compile(r";|(?<![A-Za-z\\])or(?![A-Za-z])")
_ORDER = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|<=|>=|<|>")
_UNEQUAL = re.compile(r"\\ne(?![a-z])")
_PLAIN = re.compile(r"\s*[+-]?[0-9]+(?:\.[0-9]+)?\s*")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_MONEY = re.compile(r"[+-]?[$\u20ac\u00a3\u00a5\u20b9].*|.*[%\u20ac\u00a3\u00a5\u20b9$]")  # one number with commas
_THOUSANDS = re.compile(r"(?<![0-9^_.])([0-9]{1,3}),(?=[0-9]{3}(?![0-9]))")


@dataclass(frozen=True, slots=True)
class Form:
    """An answer: one expression, or parts that have forms of their own."""

    # one, many, union, matrix, row, or the two brackets of a set, tuple or interval; ":" ratio, "mod" congruence,
    # "order [closed ends]" and "unequal" relations, "chain" of equal values, "about" for a value and its rounding,
    # "system" of equations
    kind: str
    text: str
    parts: tuple["Form", ...] = ()
    name: str = ""  # the x of "x = 5"

    def leaves(self) -> Iterator[str]:
        """Every single expression of the answer."""
        if self.kind == "one":
            yield self.text
        for part in self.parts:
            yield from part.leaves()


@lru_cache(2048)
def form(text: str) -> Form | None:
    """The form of an answer; None where it is empty, too long or not well formed."""
    if len(text) > MAX_TEXT:
        return None
    if _PLAIN.fullmatch(text):  # most answers are plain numbers
        return Form("one", text.strip())
    text = stated_value(normalise(text))
    if text and _is_balanced(text):
        return _read(text, MAX_LEVELS)
    option = _OPTION.match(text)
    return Form("one", option.group(1) if option.end() == len(text) else text) if option else None


def _depth_change(token: str) -> int:
    """+1 for an opening token, -1 for a closing one, 0 for a line break in a matrix."""
    if token in ("(", "[", "{", r"\{") or token.startswith(r"\begin"):
        return 1
    return -1 if token in (")", "]", "}", r"\}") or token.startswith(r"\end") else 0


def _is_balanced(text: str) -> bool:
    """Whether every bracket is closed. Another kind may close it, as in `[0, 1)`."""
    depth = 0
    for token in _BRACKET.finditer(text):
        depth += _depth_change(token.group())
        if depth < 0:
            return False
    return depth == 0


def split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The text split where the pattern matches outside of all brackets and environments; and the separators."""
    tokens = re.compile(rf"(?P<b>{_BRACKET.pattern})|(?P<s>{pattern.pattern})")
    depth, start, parts, seps = 0, 0, list[str](), list[str]()
    for token in tokens.finditer(text):
        if token.lastgroup == "b":
            depth += _depth_change(token.group())
        elif depth == 0:
            parts.append(text[start : token.start()].strip())
            seps.append(token.group())
            start = token.end()
    return [*parts, text[start:].strip()], seps


def _read(text: str, levels: int) -> Form | None:
    if not text or not levels or text[0] in ",;":
        return None
    if amount(text) is not None and "=" not in text:
        return Form("one", text)
    if _MONEY.fullmatch(text) and (number := decimal_comma(text)):
        return Form("one", number)
    for find in (_read_list, *_READERS):
        found = find(text, levels)
        if found is not None:
            return found
    return Form("one", _hide_thousands(text).replace("\1", ""))


def _read_list(text: str, levels: int) -> Form | None:
    text = _hide_thousands(text)
    parts, seps = split(text, _SEPARATOR)
    parts = [part.replace("\1", ",") for part in parts if part]
    if len(parts) < 2 or not seps:
        return None
    if {";", "or"} & {*seps} and "," in seps and (found := _read_points(text, levels)):
        return found
    found = _make("many", text, parts, levels)
    if found is not None and set(seps) == {"or"} and _same_variable(found.parts):
        return Form("union", text, found.parts)
    return found


def _read_points(text: str, levels: int) -> Form | None:
    """`p=5, q=2; p=7, q=2` as two points."""
    found = [_read(part.replace("\1", ","), levels - 1) for part in split(text, _STRONG_SEPARATOR)[0]]
    points = [point(part) for part in found if part is not None]
    good = tuple(part for part in points if part is not None)
    return Form("many", text, good) if len(good) == len(found) > 1 else None


def point(found: Form) -> Form | None:
    """A list whose entries have different names, as the tuple of their values in the order of the names; else None."""
    names = [part.name for part in found.parts]
    if found.kind != "many" or not all(names) or len({*names}) < len(names) or len(names) < 2:
        return None
    ordered = sorted(found.parts, key=lambda part: part.name.strip("\\"))
    name = f"({','.join(part.name for part in ordered)})"
    return Form("()", found.text, tuple(replace(part, name="") for part in ordered), name)


def _same_variable(parts: Sequence[Form]) -> bool:
    """Whether all are inequalities of one variable, as in "x < 1 or x > 2"."""
    return len({part.name for part in parts}) == 1 and all(part.name and _ORDER.search(part.text) for part in parts)


def _hide_thousands(text: str, *, bracketed: bool = False) -> str:
    """Marks thousands separators where other commas have a space after them; in brackets, where there are others."""
    hidden = _THOUSANDS.sub("\\1\1", text)
    if re.search(r",\S", hidden):
        return text
    return hidden if re.search(r",\s" if bracketed else r",\s|[-+*/=\\A-Za-z]", hidden) else text


def _make(kind: str, text: str, parts: list[str], levels: int, name: str = "") -> Form | None:
    """A form of parts, if each part has a form. A list within a list is merged into it."""
    found = [_read(part, levels - 1) for part in parts] if len(parts) <= MAX_PARTS else [None]
    flat = list[Form]()
    for part in found:
        if part is None:
            return None
        flat += part.parts if part.kind == "many" and kind in ("many", "{}") and not part.name else [part]
    if kind == "many" and flat[0].name and not any(part.name for part in flat[1:]):
        name, flat[0] = flat[0].name, replace(flat[0], name="")  # the n of "n = 1, 2"
    return Form(kind, text, tuple(flat), name)


def _read_rounded(text: str, levels: int) -> Form | None:
    r"""`x = \frac{1}{3} \approx 0.33`: a value and its rounding."""
    parts, seps = split(text, _APPROXIMATELY)
    if len(seps) != 1 or not parts[1] or split(parts[1], _EQUALS)[1]:
        return None
    rounded = _read(parts[1], levels - 1)
    name = left_name(parts[0]) if parts[0] else ""
    if rounded is None or rounded.kind != "one":
        return None
    if name is not None:
        return replace(rounded, name=name)
    exact = _read(parts[0], levels - 1)
    return None if exact is None else Form("about", text, (exact, rounded), exact.name)


def _read_equation(text: str, levels: int) -> Form | None:
    """A named value, `x = 5`; a chain of values, `x = 2 + 3 = 5`; or several equations, `x/2 = y/3 = z`."""
    members, seps = split(text, _EQUALS)
    if not seps or split(text, _ORDER)[1] or split(text, _UNEQUAL)[1] or not all(members[1:]):
        return None
    names = list[str]()
    while len(members) > 1 and (name := left_name(members[0]) if members[0] else "") is not None:
        names.append(name)
        members.pop(0)
    name = next(filter(None, names), "")
    if len(members) == 1:
        rest = _read(members[0], levels - 1)
        if rest is None or (name[:1] == "(" and rest.kind == "()" and len(rest.parts) != name.count(",") + 1):
            return None
        return replace(rest, name=name) if name or not rest.name else rest
    found = [letters(member) for member in members]
    if len(members) == 2 and not names and any(found):
        return None  # an equation
    if found[-1] and any(others != found[-1] for others in found):
        return _make("system", text, split(text, _EQUALS)[0], levels)
    return _make("chain", text, members, levels, name)


def _read_membership(text: str, levels: int) -> Form | None:
    r"""`x \in [0, 1)`."""
    member = _MEMBER.match(text)
    rest = _read(text[member.end() :].strip(), levels - 1) if member else None
    return None if member is None or rest is None else replace(rest, name=re.sub(r"[ {}]", "", member.group(1)))


def _read_union(text: str, levels: int) -> Form | None:
    parts, seps = split(text, re.compile(r"\\cup(?![a-z])"))
    found = _make("union", text, parts, levels) if seps else None
    if found is None or any(part.kind != "{}" for part in found.parts):
        return found
    return Form("{}", text, tuple(entry for part in found.parts for entry in part.parts))


def _read_set_builder(text: str, levels: int) -> Form | None:
    r"""`\{x \mid 0 < x < 5\}` as the interval of x."""
    builder = _BUILDER.fullmatch(text)
    inner = _read(builder.group(2).strip(), levels - 1) if builder else None
    if builder is None or inner is None or not _same_variable(inner.parts if inner.kind == "union" else [inner]):
        return None
    if builder.group(1) not in (inner.name, *(part.name for part in inner.parts)):
        return None
    parts = tuple(replace(part, name="") for part in inner.parts)  # the set has no variable of its own
    return replace(inner, name="", parts=parts)


def _read_complement(text: str, levels: int) -> Form | None:
    r"""`\mathbb{R} \setminus \{3\}` as two intervals. Several numbers are put in order."""
    if (outside := _OUTSIDE.fullmatch(text)) is not None:  # of an interval
        left, low, high, right = outside.groups()
        numbers = [read[0] for part in (low, high) if (read := amount(part)) is not None]
        ends = [rf"(-\infty,{low}{')]'[left == '(']}", rf"{'(['[right == ')']}{high},\infty)"]
        return _make("union", text, ends, levels) if len(numbers) == 2 and numbers[0] < numbers[1] else None
    found = _WITHOUT.fullmatch(text)
    left = found.group(1).split(",") if found else []
    numbers = [read[0] for part in left if (read := amount(part)) is not None]
    if not left or (len(left) > 1 and len(numbers) < len(left)):
        return None
    left = [left[i] for i in sorted(range(len(left)), key=lambda i: numbers[i])] if len(left) > 1 else left
    ends = [r"-\infty", *left, r"\infty"]
    parts = [f"({a},{b})" for a, b in pairwise(ends)]
    return _make("union", text, parts, levels)


def _read_ratio(text: str, levels: int) -> Form | None:
    if (clock := _CLOCK.fullmatch(text)) is not None:  # the half of the day is kept as a name: it may be missing
        found = _make(":", text, [*clock.groups()[:2]], levels)
        return found and replace(found, name=f"{clock.group(3).lower()}m")
    parts, seps = split(text, re.compile(r"(?: ?: ?)|(?<=[0-9]) to (?=[0-9])"))
    return _make(":", text, parts, levels) if seps and all(parts) and len(parts) <= 4 else None


def _read_congruence(text: str, levels: int) -> Form | None:
    found = _CONGRUENT.fullmatch(text)
    return _make("mod", text, [part.strip() for part in found.groups()], levels) if found else None


def _read_plus_minus(text: str, levels: int) -> Form | None:
    if len(_PLUS_MINUS.findall(text)) != 1:
        return None
    both = [re.sub(r"^\+\s*", "", _PLUS_MINUS.sub(sign, text)) for sign in ("+", "-")]
    return _make("many", text, both, levels)


def _read_brackets(text: str, levels: int) -> Form | None:
    if text[0] == "{" and _is_bracketed(text):  # a group of TeX
        return _read(text[1:-1].strip(), levels - 1)
    start, end = re.match(r"\\\{|[(\[]", text), re.search(r"\\\}$|[)\]]$", text)
    if start is None or end is None or not _is_bracketed(text):
        return None
    inside = text[start.end() : end.start()].strip()
    kind = start.group()[-1] + end.group()[-1]
    parts, seps = split(inside, re.compile(";"))
    if seps:  # semicolons separate the entries, so a comma may be decimal
        parts = [decimal_comma(part) or part for part in parts]
    else:
        parts, seps = split(_hide_thousands(inside, bracketed=True), re.compile(","))
        parts = [part.replace("\1", ",") for part in parts]
    if seps or (kind == "{}" and inside != r"\emptyset"):
        return _make(kind, text, parts, levels)
    return _read(inside, levels - 1) if kind == "()" else None


def _is_bracketed(text: str) -> bool:
    """Whether the last character closes the bracket that the text begins with."""
    depth = 0
    for token in _BRACKET.finditer(text):
        depth += _depth_change(token.group())
        if depth == 0:
            return token.end() == len(text)
    return False


def _read_matrix(text: str, levels: int) -> Form | None:
    inner = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if inner is None or r"\begin" in inner.group(1):
        return None
    lines = [line for line in re.split(r"\\\\", inner.group(1)) if line.strip()]
    rows = [_make("row", line, [cell.strip() for cell in line.split("&")], levels - 1) for line in lines]
    good = [row for row in rows if row is not None]
    if not good or len(good) < len(rows) or len({len(row.parts) for row in good}) != 1:
        return None
    return Form("matrix", text, tuple(good))


def _read_order(text: str, levels: int) -> Form | None:
    r"""`a \le x < b` and `x > a` as intervals, `x \ne a` as two; between other expressions a relation of them."""
    parts, seps = split(text, _ORDER)
    if not seps:
        return _read_unequal(text, levels)
    if len(seps) > 3 or not all(parts):
        return None
    up = ["<" in sep or "le" in sep for sep in seps]
    closed = ["=" in sep or "\\" in sep for sep in seps]
    if not all(up) and any(up):
        return None
    if not up[0]:
        parts, closed = parts[::-1], closed[::-1]
    if len(parts) > 3:
        return _make(f"order {closed}", text, parts, levels)
    if len(parts) == 2 and (size := _read_modulus(parts, closed[0], text, levels)):
        return size
    sides = (
        parts
        if len(parts) == 3
        else [parts[0], parts[1], r"\infty"]
        if _is_variable(*parts[::-1])
        else [r"-\infty", *parts]
    )
    middle = sides[1]
    if not _is_variable(middle, sides[0] + sides[2]):
        return _make(f"order {closed}", text, parts, levels)
    inside = closed if len(parts) == 3 else [*closed, False] if sides[2] == r"\infty" else [False, *closed]
    kind = "(["[inside[0]] + ")]"[inside[1]]
    found = _make(kind, text, [sides[0], sides[2]], levels)
    return found and replace(found, name=re.sub(r"[ {}]", "", middle))


def _read_modulus(sides: list[str], closed: bool, text: str, levels: int) -> Form | None:
    """`|x| < 3` as an interval, `|x| > 3` as two; z and w may be complex."""
    found = [re.fullmatch(r"\| ?([a-vxy]) ?\|", side) for side in sides]
    if found[0] and not letters(sides[1]):
        made = _make("[]" if closed else "()", text, [f"-({sides[1]})", sides[1]], levels)
        return made and replace(made, name=found[0].group(1))
    if found[1] and not letters(sides[0]):
        left, right = ("]", "[") if closed else (")", "(")
        ends = [rf"(-\infty,-({sides[0]}){left}", rf"{right}{sides[0]},\infty)"]
        made = _make("union", text, ends, levels)
        return made and replace(made, name=found[1].group(1))
    return None


def _is_variable(variable: str, other: str) -> bool:
    """Whether the text is a variable that does not occur on the other side."""
    return re.fullmatch(VARIABLE, variable) is not None and not symbols(variable) & symbols(other)


def _read_unequal(text: str, levels: int) -> Form | None:
    sides, seps = split(text, _UNEQUAL)
    if len(seps) != 1 or not all(sides):
        return None
    sides = sides if _is_variable(*sides) else sides[::-1]
    if not _is_variable(*sides):
        return _make("unequal", text, sides, levels)
    found = _make("union", text, [rf"(-\infty,{sides[1]})", rf"({sides[1]},\infty)"], levels)
    return found and replace(found, name=re.sub(r"[ {}]", "", sides[0]))


_READERS = (
    _read_rounded, _read_equation, _read_membership, _read_union, _read_complement, _read_set_builder,
    _read_brackets, _read_plus_minus, _read_matrix, _read_congruence, _read_order, _read_ratio,
)  # fmt: skip


def relation(text: str) -> tuple[str, str, str] | None:
    """One relation of two sides as ("<", "<=" or "unequal", smaller side, larger side); None of anything else."""
    for pattern in (_ORDER, _UNEQUAL):
        sides, seps = split(text, pattern)
        if len(seps) == 1 and all(sides):
            what = "unequal" if pattern is _UNEQUAL else "<=" if "=" in seps[0] or "\\" in seps[0] else "<"
            small, large = sides if "<" in seps[0] or "le" in seps[0] else sides[::-1]
            return what, small, large
    return None
