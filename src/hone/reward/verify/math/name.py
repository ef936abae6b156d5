"""Names in answers: the x of `x = 5`, the AB/CD of a ratio, "The area is", and the letters of an expression."""

import re

from hone.reward.verify.math.guard import FUNCTIONS, GREEK, symbols
from hone.reward.verify.math.number import CHANGING, amount
from hone.reward.verify.math.units import sizes
from hone.reward.verify.negation import DENIES

_LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(GREEK.split())})(?![a-z]))"
_INDEX = r"(?: ?_ ?(?:\{[^{}=]{1,20}\}|[A-Za-z0-9]{1,3}))?"
# x, x_1, f(x), f'(2), P(A), f(g(2))
VARIABLE = rf"{_LETTER}'{{0,2}}{_INDEX}(?:\^\{{-1\}})?(?: ?\((?:[^()=<>]|\([^()=<>]{{1,20}}\)){{1,20}}\))?"
_MEASURE = rf"[A-Z]{{2,4}}{_INDEX}|\|[A-Z]{{2}}\||\\overline\{{[A-Z]{{2}}\}}|(?:m ?)?\\(?:angle|triangle) ?[A-Z]{{1,3}}"
_OF = (  # |z|, [ABC], E[X], \gcd(a,b); |x| = 5 is an equation for x
    rf"\\(?:sin|cos|tan|max|min|det|deg|dim) ?(?:{_LETTER}|\({_LETTER}(?:\([a-z]\))?\))"
    rf"|\\(?:gcd|lcm) ?\({_LETTER} ?, ?{_LETTER}\)"
    rf"|\|[zw]{_INDEX}(?: ?[-+] ?[zw]{_INDEX})?\||\\\|{_LETTER}\\\||\[(?:\\triangle )?[A-Z]{{3,6}}\]|E ?\[[A-Z]\]"
)
_SQUARED = re.compile(r"([A-Za-z]) ?\((?:.*[^A-Za-z\\])?\1(?! ?\()")  # x(x+1) is a product, f(f(2)) is none
POINT = rf"\({_LETTER}(?: ?, ?{_LETTER}){{1,4}}\)"  # (x,y)
_QUANTITY = rf"(?:{_MEASURE}|{VARIABLE})"
_SHARE = (
    rf"\\frac\{{ ?{_QUANTITY} ?\}}\{{ ?{_QUANTITY} ?\}}|{_QUANTITY}(?: ?[/:] ?{_QUANTITY}){{1,3}}"  # AB/CD, V_1:V_2
)
_NAME = re.compile(rf"{_QUANTITY}|{_OF}|{POINT}|{_SHARE}")
_PROSE = re.compile(  # Area of ABC; ABy is a product
    r"(?:[Tt]he )?(?:[A-Za-z][a-z]{2,}|[A-Z]{3,})(?: (?:[A-Za-z]+|\\(?:angle|triangle)))*"
)
_SENTENCE = re.compile(
    r"([A-Za-z][A-Za-z ,'()_\\{}-]{2,150}?) (?:is|are|equals)(?: equal to| exactly| therefore| then)?"
    r" (?=[-+$\\(\[{0-9.A-Za-z])"
)
_KINDS = "point pair triple interval set vector matrix function polynomial equation line expression fraction ratio"
LABEL = re.compile(  # "Answer: ", "the ordered pair "
    rf"^(?:the )?(?:final )?answer ?[:=] ?|^(?:the )?(?:ordered )?(?:{_KINDS.replace(' ', '|')})s? (?=[-$\\(\[{{0-9])",
    re.I,
)
# words that change the number, deny it or make a condition of it; not those that only count or compare things
_CONDITIONS = "if when suppose assume assuming might may could guess never isn square cube"
_HARMLESS = "and to is are was least most one two three four five six seven eight nine ten"
_UNSAID = {*CHANGING, *DENIES, *_CONDITIONS.split()} - {*_HARMLESS.split()}


def said(text: str) -> str:
    """What a sentence says of something: "34" of "The largest n is 34"."""
    text = LABEL.sub("", text)
    for _ in range(2):
        found = _SENTENCE.match(text)
        lead = found.group(1).lower().replace("that could be", "") if found else ""
        if found is None or {*re.findall(r"[a-z]+", lead)} & _UNSAID:
            break
        text = text[found.end() :]
    return text


def letters(text: str) -> set[str]:
    """The variables of an expression; units of measure are none."""
    if (stated := amount(text)) is not None and (len(stated[1]) != 2 or sizes(stated[1])):  # the bh of 1/2 bh is none
        return set()
    return symbols(re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: "" if sizes(word[0]) else word[0], text))


def named(text: str) -> str | None:
    """The name that the left side of an equation is, "" for words such as "Area"; None where it is something else."""
    if _NAME.fullmatch(text) and not _SQUARED.match(text):
        entries = [letter.strip("\\ ") for letter in text.strip("()").split(",")]
        in_order = text[0] != "(" or entries == sorted(entries)  # (y,x)=(1,2) says another thing than (1,2)
        return re.sub(r"[ {}]", "", text) if in_order else None
    words = {*text.lower().split()}
    return "" if _PROSE.fullmatch(text) and not words & {*_UNSAID, *FUNCTIONS.split()} else None
