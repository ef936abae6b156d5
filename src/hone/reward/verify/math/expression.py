r"""Single expressions: their names and letters, and which of them the parser may read.

SymPy would try to compute `9^{9^{9^{9}}}`. `safe_for_parser` passes only known commands, and bounds length, depth,
powers, factorials and digits. It writes out every product of a number and a bracket, because the parser reads `3(2)`
and `3 4` as sums.
"""

import re

from hone.reward.verify.answers import DENIES
from hone.reward.verify.math.amount import CHANGING, amount, unit_sizes

MAX_LENGTH, MAX_DEPTH, MAX_DIGITS, MAX_TOKENS = 300, 10, 100, 150
MAX_POWER = 10_000  # of nested exponents, multiplied
MAX_FACTORIAL, MAX_FACTORIALS = 3000, 4

FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp"
GREEK = """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega"""
_COMMANDS = frozenset(f"{FUNCTIONS} {GREEK} frac sqrt pi infty cdot times div binom lfloor rfloor lceil rceil".split())
_TAKES = frozenset(["^", "_", *(f"\\{name}" for name in f"{FUNCTIONS} frac sqrt binom".split())])  # arguments in braces
_BARE = re.compile(rf"(?<![\\A-Za-z])({FUNCTIONS.replace(' ', '|')}|pi|infty)(?![A-Za-z])")
_TOKEN = re.compile(r"\\[A-Za-z]+|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]|[-+*/^_(){}\[\]|!]|\s+")
_NUMBER = re.compile(r"[0-9.]+")
_CLOSES = {"(": ")", "[": "]", "{": "}"}


class Refused(Exception):
    """The reason why an expression is not handed to the parser."""


def safe_for_parser(text: str) -> str:
    """The expression in the spelling that the parser reads right; Refused if it is not safe."""
    if len(text) > MAX_LENGTH:
        raise Refused(f"it has more than {MAX_LENGTH} characters")
    tokens = _tokens(_BARE.sub(r"\\\1 ", text))
    _check_bounds(tokens)
    return " ".join(_write_out(_round_brackets(tokens)))


def words(text: str) -> list[str]:
    """The runs of two letters or more that are neither commands nor functions."""
    return re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", _BARE.sub("", text))


def symbols(text: str) -> set[str]:
    r"""The variables of an expression: Latin and Greek letters, but neither e, i nor \pi."""
    names = {t.removeprefix("\\") for t in _TOKEN.findall(_BARE.sub(r"\\\1 ", text)) if t[-1].isalpha()}
    return {t for t in names if (len(t) == 1 and t not in "ei") or t in GREEK.split()}


def _tokens(text: str) -> list[str]:
    tokens, position = list[str](), 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise Refused(f"it has the character {text[position]!r}")
        position = match.end()
        token = match.group()
        if token[0] == "\\" and token[1:] not in _COMMANDS:
            raise Refused(f"it has the command {token}")
        if _NUMBER.fullmatch(token) and len(token) > MAX_DIGITS:
            raise Refused(f"it has a number of more than {MAX_DIGITS} digits")
        tokens += [token] if token.strip() else []
    if not tokens or tokens[0] in ("^", "*", "/", "!", "_", ")", "}") or tokens[-1] in ("^", "*", "/", "+", "-", "_"):
        raise Refused("it is no whole expression")
    if len(tokens) > MAX_TOKENS:
        raise Refused(f"it has more than {MAX_TOKENS} symbols")
    return tokens


def _check_bounds(tokens: list[str]) -> None:
    _weigh(tokens, 0, "", MAX_DEPTH)
    if tokens.count("!") > MAX_FACTORIALS:
        raise Refused(f"it has more than {MAX_FACTORIALS} factorials")


def _weigh(tokens: list[str], start: int, closer: str, depth: int) -> tuple[int, int]:
    """Where a group ends, and the product of the exponents that are nested in it."""
    if depth == 0:
        raise Refused(f"it is nested more than {MAX_DEPTH} deep")
    position, heaviest, last = start, 1, 1  # last: the weight of the base of a next exponent
    while position < len(tokens) and tokens[position] != closer:
        token, first = tokens[position], position
        if token in _CLOSES:
            position, last = _weigh(tokens, position + 1, _CLOSES[token], depth - 1)
        elif token in _CLOSES.values():
            raise Refused("its brackets do not match")
        elif token == "^":
            position, power = _exponent(tokens, position + 1, depth)
            last *= power
        elif token == "!":
            _factorial(tokens[:position])
        elif token == r"\binom":
            _binomial(tokens[position + 1 :])
        else:
            last = 1
        position = position + 1 if position == first or tokens[first] in _CLOSES else position
        heaviest = max(heaviest, last)
        if heaviest > MAX_POWER:
            raise Refused(f"its powers exceed {MAX_POWER}")
    if closer and position == len(tokens):
        raise Refused("its brackets do not match")
    return position, heaviest


def _exponent(tokens: list[str], start: int, depth: int) -> tuple[int, int]:
    """Where an exponent ends, and how large it may become: the product of its numbers."""
    end = start + 1
    if tokens[start] in _CLOSES:
        end = _weigh(tokens, start + 1, _CLOSES[tokens[start]], depth - 1)[0] + 1
    if tokens[end : end + 1] == ["^"]:
        raise Refused("it has a power in a power")
    inside = tokens[start:end]
    if any(t == "^" and not _low_tower(inside[i - 1 : i + 4]) for i, t in enumerate(inside)):
        raise Refused("it has a power in a power")
    if "!" in inside or r"\binom" in inside:
        raise Refused("it has a factorial in a power")
    product = 1
    for number in (t for t in inside if _NUMBER.fullmatch(t)):
        product *= max(1, int(float(number))) if len(number) < 9 else MAX_POWER + 1
    return end, product


def _low_tower(tokens: list[str]) -> bool:
    """Whether a power in an exponent stays small: `x^2`, or a digit to the power of a letter, which is at most 5."""
    base, _, power, *rest = [*tokens, "", "", ""]
    braced = power == "{" and rest[1] == "}"
    power = rest[0] if braced else power
    if base.isdigit():
        return len(base) == 1 and len(power) == 1 and power.isalpha()
    return base not in (")", "}") and power in ("2", "3")


def _factorial(before: list[str]) -> None:
    last = before[-1] if before else ""
    if not (last.isdigit() and int(last) <= MAX_FACTORIAL and "^" not in before[-2:]) and not last.isalpha():
        raise Refused(f"it has a factorial of something else than a variable or a number up to {MAX_FACTORIAL}")


def _binomial(after: list[str]) -> None:
    inside = after[: MAX_DEPTH * 2]
    second = [i for i, t in enumerate(inside) if t == "}"][:2]
    inside = inside[: second[-1]] if len(second) == 2 else ["^"]
    if any(t in ("^", "!", "*", r"\cdot", r"\times") or (t.isdigit() and int(t) > MAX_FACTORIAL) for t in inside):
        raise Refused(f"it has a binomial of something else than numbers up to {MAX_FACTORIAL}")


def _round_brackets(tokens: list[str]) -> list[str]:
    """Make braces and brackets round unless they hold an argument: the parser reads `5{6}` and `5[6]` as sums."""
    out, opened, awaited = list[str](), list[str | None](), False  # awaited: a command's second argument
    for before, token in zip(["", *tokens], tokens, strict=False):
        out.append(token)
        if token in ("{", "["):
            argument = before == r"\sqrt" or (token == "{" and (awaited or before in _TAKES))
            opened.append((before if not awaited else "") if argument else None)
            out[-1] = token if argument else "("
        awaited = False
        if token in ("}", "]"):
            command = opened.pop()
            out[-1] = ")" if command is None else token
            awaited = command in (r"\frac", r"\binom") or (command == r"\sqrt" and token == "]")
    return out


def _write_out(tokens: list[str]) -> list[str]:
    """Write decimals and quotients of two numbers as fractions, and products with numbers as products."""
    out = list[str]()
    for i, token in enumerate(tokens):
        before = "" if not i or tokens[i - 2 : i - 1] == ["_"] else out[-1]  # a subscript ends with one symbol
        number = _NUMBER.fullmatch(token) is not None
        if number and before and _NUMBER.fullmatch(tokens[i - 1]):
            raise Refused("it has two numbers side by side")
        after_value = before[-1:] in (")", "]") or (before[-1:] == "}" and _is_value(tokens[:i]))
        product = token == "(" and (before[:1].isdigit() or before == r"\pi") and not _is_power(tokens[:i])
        if (number and after_value) or product:
            out.append(r"\cdot")
        out.append(f"{{{token}}}" if before == "_" and token != "{" else _exact(token) if number else token)
    return _quotients(out)


def _is_power(before: list[str]) -> bool:
    r"""Whether the last number is the power of a function, as in `\sin^2(x)`."""
    return before[-2:-1] == ["^"] and len(before) > 2 and before[-3].removeprefix("\\") in FUNCTIONS.split()


def _is_value(before: list[str]) -> bool:
    """Whether the last brace closed an exponent or a whole fraction, and not a first argument or a base."""
    depth = 0
    for i in range(len(before) - 1, -1, -1):
        depth += (before[i] == "}") - (before[i] == "{")
        if depth == 0:
            return i == 0 or (before[i - 1] not in (r"\frac", r"\binom") and before[i - 2 : i] != [r"\log", "_"])
    return False


def _exact(number: str) -> str:
    whole, point, rest = number.partition(".")
    if not point:
        return number.lstrip("0") or "0"
    return rf"\frac{{{(whole + rest).lstrip('0') or '0'}}}{{1{'0' * len(rest)}}}"


def _quotients(tokens: list[str]) -> list[str]:
    """Write quotients of numbers as fractions, so that `1/2 x` is half of x."""
    out = list[str]()
    for token in tokens:
        if len(out) > 1 and out[-1] == "/" and token.isdigit() and out[-2].isdigit():
            if len(out) > 2 and out[-3] == "/":
                raise Refused("it has a quotient that can be read in two ways")
            if len(out) > 2 and out[-3] in ("^", "_"):  # x^2/4 is a quarter of x^2
                out[-1:] = [r"\cdot", rf"\frac{{1}}{{{token}}}"]
            else:
                out[-2:] = [rf"\frac{{{out[-2]}}}{{{token}}}"]
        else:
            out.append(token)
    return out


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
# words that change the number, deny it or make it a condition; not words that only count or compare
_CONDITIONS = "if when suppose assume assuming might may could guess never isn square cube"
_HARMLESS = "and to is are was least most one two three four five six seven eight nine ten"
_UNSAID = {*CHANGING, *DENIES, *_CONDITIONS.split()} - {*_HARMLESS.split()}


def stated_value(text: str) -> str:
    """The value that a sentence states: "34" in "The largest n is 34"."""
    text = LABEL.sub("", text)
    for _ in range(2):
        sentence = _SENTENCE.match(text)
        lead = sentence.group(1).lower().replace("that could be", "") if sentence else ""
        if sentence is None or {*re.findall(r"[a-z]+", lead)} & _UNSAID:
            break
        text = text[sentence.end() :]
    return text


def letters(text: str) -> set[str]:
    """The variables of an expression; units of measure are none."""
    if (stated := amount(text)) is not None and (
        len(stated[1]) != 2 or unit_sizes(stated[1])
    ):  # the bh of 1/2 bh is none
        return set()
    return symbols(re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: "" if unit_sizes(word[0]) else word[0], text))


def left_name(text: str) -> str | None:
    """The name on the left side of an equation, "" for words such as "Area", None for anything else."""
    if _NAME.fullmatch(text) and not _SQUARED.match(text):
        entries = [letter.strip("\\ ") for letter in text.strip("()").split(",")]
        in_order = text[0] != "(" or entries == sorted(entries)  # (y,x)=(1,2) differs from (1,2)
        return re.sub(r"[ {}]", "", text) if in_order else None
    words = {*text.lower().split()}
    return "" if _PROSE.fullmatch(text) and not words & {*_UNSAID, *FUNCTIONS.split()} else None
