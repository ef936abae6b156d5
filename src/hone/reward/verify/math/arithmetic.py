r"""Evaluates sums, products, quotients and powers of plain numbers exactly: `2 + 3 \times \frac{1}{2}` is 7/2.

So most equation chains are checked without a worker process. The work is bounded for any input.
"""

import re
from fractions import Fraction

MAX_TOKENS, MAX_LEVELS, MAX_POWER, MAX_BITS = 120, 20, 300, 4000

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<sign>\\frac|\\times|\\cdot|\\div|[-+*/^%(){}\[\]]))"
)
_SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "[": "(", "]": ")", "{": "(", "}": ")"}


class _NoValue(Exception):
    """The text is not arithmetic of plain numbers, or it exceeds a bound."""


def evaluate_arithmetic(text: str) -> Fraction | None:
    r"""The value of an arithmetic expression; None for anything else, such as `3 4` or `1/0`.

    >>> evaluate_arithmetic(r"2 + 3 \times \frac{1}{2}"), evaluate_arithmetic("x + 1")
    (Fraction(7, 2), None)
    """
    tokens, position = list[str](), 0
    while position < len(text.rstrip()) and len(tokens) < MAX_TOKENS:
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        position = match.end()
        tokens.append(_SIGNS.get(match.group().strip(), match.group().strip()))
    try:
        reader = _Reader(tokens)
        value = reader.sum(MAX_LEVELS)
    except (_NoValue, ZeroDivisionError):
        return None
    return value if reader.position == len(tokens) and position >= len(text.rstrip()) else None


class _Reader:
    """A recursive-descent parser: sums of products of signed powers."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position = tokens, 0

    def _next(self, *wanted: str) -> str:
        """Takes the next token if it is one of these; "" if it is not."""
        token = self.tokens[self.position] if self.position < len(self.tokens) else ""
        if token not in wanted:
            return ""
        self.position += 1
        return token

    def sum(self, levels: int) -> Fraction:
        value = self._product(levels)
        while sign := self._next("+", "-"):
            value += self._product(levels) * (1 if sign == "+" else -1)
        return _bounded(value)

    def _product(self, levels: int) -> Fraction:
        value = self._power(levels)
        while True:
            sign = self._next("*", "/")
            if not sign and self.tokens[self.position : self.position + 1] != ["("]:
                return value
            factor = self._power(levels)
            value = _bounded(value / factor if sign == "/" else value * factor)

    def _power(self, levels: int) -> Fraction:
        if sign := self._next("+", "-"):
            return self._power(levels - 1) * (1 if sign == "+" else -1)
        value = self._atom(levels - 1)
        if self._next("^"):
            power = self._power(levels - 1)
            if power.denominator != 1 or abs(power) * max(_bits(value), 1) > MAX_BITS or abs(power) > MAX_POWER:
                raise _NoValue
            value **= int(power)
        return value / 100 if self._next("%") else value

    def _atom(self, levels: int) -> Fraction:
        if levels <= 0 or self.position >= len(self.tokens):
            raise _NoValue
        if self._next(r"\frac"):
            return self._group(levels) / self._group(levels)
        if self.tokens[self.position] == "(":
            return self._group(levels)
        token = self.tokens[self.position]
        if not token[-1].isdigit():
            raise _NoValue
        self.position += 1
        value = Fraction(token.replace(",", ""))
        mixed = "." not in token and self._next(r"\frac")  # 1\frac{1}{2}
        return _bounded(value + self._group(levels) / self._group(levels) if mixed else value)

    def _group(self, levels: int) -> Fraction:
        if not self._next("("):
            raise _NoValue
        value = self.sum(levels - 1)
        if not self._next(")"):
            raise _NoValue
        return value


def _bits(value: Fraction) -> int:
    return max(abs(value.numerator), value.denominator).bit_length()


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise _NoValue
    return value
