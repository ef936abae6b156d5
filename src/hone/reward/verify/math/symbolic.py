"""Equality of two expressions by SymPy, in a process that may be ended at any time.

`latex2sympy2_extended`, the parser of `math-verify`, reads both. Their values are compared with 150 digits: constants
once, other expressions at six points. Equal values at six such points are no accident for expressions of this size.
`simplify` may take minutes. The process loads only this file and its imports.
"""

import gc
import hashlib
import json
import os
import resource
import signal
import socket
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from hone.reward.workers.supervisor import supervise

DIGITS, AGREE, CPU_SECONDS, MEMORY = 150, sympy.Float(10) ** -110, 1.0, 256 << 20
SLOW, NICE = 0.1, 10  # after SLOW seconds of processor time a call gets lower priority, but not so low that it stops
_CONFIG = ConversionConfig(lowercase_symbols=False)
# Fractions on both sides of zero that are no root or pole of a short expression; an offset is added to them.
_POINTS = ((7, 5), (-11, 7), (23, 13), (-31, 17), (43, 11), (-5, 19))
_WARM = (
    *(r"3 \sqrt { 13 }", r"6 - 5 i", r"\cot x", r"\frac { 11 + 9 a } { 20 }", r"2 ^ { 10 }", "x * y", "3 x ^ 2", "5 !"),
    *(r"\frac { 1 } { 7 ! }", r"e ^ { i \pi }", r"\sin ^ 2 x", r"\log _ 2 8", r"\ln x", "| x |", "x ( x + 1 )"),
    *(r"\sqrt [ 3 ] { 2 }", "a b", r"\alpha + \beta", "( a + 5 ) ( b + 2 )", "x _ { 1 } + x _ 2", "x ^ { - 1 }"),
    *(r"\frac { - 1 + \sqrt { 5 } } { 2 }", r"\frac{1}{2} x", r"- \infty", "x ^ 3 + 3 x - 6", r"2 \cdot ( 3 + x )"),
)


class UnreadableExpression(Exception):
    """The parser cannot read the text."""


def read(text: str) -> Any:
    """The expression, with i for the imaginary unit; UnreadableExpression where the parser refuses it."""
    try:
        expression = latex2sympy(text, normalization_config=None, conversion_config=_CONFIG)
    except MemoryError:
        raise
    except Exception as error:
        raise UnreadableExpression from error
    if not isinstance(expression, sympy.Expr):
        raise UnreadableExpression
    return expression.subs(sympy.Symbol("i"), sympy.I) if expression.has(sympy.Symbol("i")) else expression


def difference(text: str) -> Any:
    """left - right of an equation."""
    left, _, right = text.partition("=")
    return read(left) - read(right)


def value(expression: Any, point: dict[Any, Any]) -> Any:
    """The number at a point, None where there is none."""
    try:
        number = sympy.N(expression, DIGITS, subs=point)
    except (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return None
    return number if number.is_number and number.is_finite else None


def close(a: Any, b: Any) -> bool:
    """Equal to 110 digits."""
    return bool(abs(a - b) <= AGREE * max(abs(a), abs(b)))


def offset(gold: str, answer: str) -> Any:
    """Between 0 and 0.1, by a hash of both texts: nobody can fit an answer to the gold values at known points."""
    digest = hashlib.sha256(f"{gold}\0{answer}".encode()).digest()
    return sympy.Rational(1 + int.from_bytes(digest[:4], "big") % 9973, 99_991)


def equal(gold: Any, answer: Any, shift: Any = 0) -> bool:
    """The same constant, or equal values at all points where the gold one is real; at all points if it nowhere is."""
    if gold == answer:
        return True
    if gold.is_infinite or answer.is_infinite:
        return False
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not names:
        return _constants(gold, answer)
    pairs = _values(gold, answer, names, shift)
    real = [(a, b) for a, b in pairs if a.is_real]
    pairs = real or pairs
    return len(pairs) >= 2 and all(b is not None and close(a, b) for a, b in pairs)


def _values(gold: Any, answer: Any, names: list[Any], shift: Any) -> list[tuple[Any, Any]]:
    pairs = list[tuple[Any, Any]]()
    for turn in range(len(_POINTS)):
        turned = _POINTS[turn:] + _POINTS[:turn]
        spread = {x: sympy.Rational(*turned[i % 6]) + sympy.Rational(i, 29) + shift for i, x in enumerate(names)}
        at = value(gold, spread)
        pairs += [] if at is None else [(at, value(answer, spread))]
    return pairs


def _constants(gold: Any, answer: Any) -> bool:
    exact = [part.doit() for part in (gold, answer)]
    if all(part.is_Rational for part in exact):
        return exact[0] == exact[1]
    if exact[0].is_zero or exact[1].is_zero:  # a relative difference from zero says nothing
        return _vanishes(exact[0] - exact[1])
    a, b = (value(part, {}) for part in exact)
    return a is not None and b is not None and close(a, b)


def _vanishes(expression: Any) -> bool:
    """Whether its terms cancel to the last digit, and SymPy does not show that it differs from zero."""
    parts = sympy.N(expression, DIGITS).as_real_imag()
    cancels = all(part == 0 or getattr(part, "_prec", 0) == 1 for part in parts)  # 1: no digit is certain
    return cancels and expression.equals(0) is not False


def proportional(gold: Any, answer: Any, shift: Any = 0) -> bool:
    """One equation is the other one times a number that is not zero."""
    return bool(_factor(gold, answer, shift))


def ordered(gold: Any, answer: Any, shift: Any = 0) -> bool:
    """One inequality is the other one times a number above zero."""
    factor = _factor(gold, answer, shift)
    return factor is not None and bool(factor > 0)


def _factor(gold: Any, answer: Any, shift: Any) -> Any:
    """The number k with gold = k answer, None where there is none."""
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    pairs = _values(gold, answer, names, shift) if names else []
    if len(pairs) < 3 or any(b is None or a == 0 or b == 0 for a, b in pairs):
        return None
    first = pairs[0][0] / pairs[0][1]
    return first if first.is_real and all(close(a, first * b) for a, b in pairs[1:]) else None


def rounded(exact: Any, decimal: Any, shift: Any = 0) -> bool:
    """The decimal, a number and the unit of its last digit, is the value rounded to that digit or cut off after it."""
    number, unit = decimal
    at = value(exact, {}) if not exact.free_symbols else None
    if at is None or not at.is_real:
        return False
    return bool(abs(at - number) <= unit / 2 or (0 <= abs(at) - abs(number) < unit and at * number >= 0))


def _decimal(text: str) -> tuple[Any, Any]:
    number, _, unit = text.partition("=")
    return sympy.Rational(number), sympy.Rational(unit)


def _affordable(reader: Any, text: str) -> bool:
    """Read the gold answer and evaluate it twice, as if it were the other one, too; an equal answer costs as much."""
    gold = reader(text)
    names = sorted(gold.free_symbols, key=str)
    return bool(_values(gold, gold, names, 0) if names else [value(gold.doit(), {}) for _ in range(2)])


_KINDS = {
    "value": (read, read, equal),
    "equation": (difference, difference, proportional),
    "order": (difference, difference, ordered),
    "rounded": (read, _decimal, rounded),
}


def judge(call: dict[str, str]) -> dict[str, Any]:
    """The verdict on a call of `kind`, `gold` and `answer`; "unreadable" if the gold one cannot be read."""
    reader, answers, same = _KINDS[call["kind"]]
    try:
        gold = reader(call["gold"])
    except UnreadableExpression:
        return {"unreadable": "gold"}
    if not call["answer"]:
        return {"equal": False, "affordable": _affordable(reader, call["gold"])}
    try:
        return {"equal": bool(same(gold, answers(call["answer"]), offset(call["gold"], call["answer"])))}
    except UnreadableExpression:
        return {"equal": False}


def work(call: bytes) -> bytes:
    """Answer one call. The kernel ends a process that exceeds its processor time, even inside C code."""
    slow = list[int]()

    def step_back(number: int, frame: object) -> None:
        slow.append(number)
        os.setpriority(os.PRIO_PROCESS, 0, NICE)

    signal.signal(signal.SIGVTALRM, step_back)
    signal.setitimer(signal.ITIMER_VIRTUAL, SLOW)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        verdict = judge(json.loads(call))
    except (MemoryError, RecursionError) as error:
        verdict = {"failed": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return json.dumps({**verdict, "slow": bool(slow)}).encode()


def serve(number: int) -> None:
    """Fork a supervisor and its worker for every socket that comes in; return when the connection closes."""
    control = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors that end leave no zombies
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes the connection
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for text in _WARM:  # the parser builds its tables as it reads; processes that are forked later have them
        equal(read(text), read(text) + 1)
    gc.freeze()  # a collection in a child would copy all memory that it shares
    control.sendall(b".")  # it is ready
    while True:
        _, ends, _, _ = socket.recv_fds(control, 1, 1)
        if not ends:
            return
        with socket.socket(fileno=ends[0]) as end:
            if not os.fork():
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(work, end)
