"""What a reward function returned becomes an outcome: a number with its parts, or invalid with a reason.

Whatever is no finite number is invalid, and never zero. A reason ends with the file and line of the user's code that it
comes from, as in "KeyError: 'answer' (rewards.py:7)". Reasons that differ only in numbers and quoted text are of one
kind; so are exceptions of one type from one line.
"""

import math
import os
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from inspect import unwrap
from numbers import Real
from pathlib import Path
from typing import Any

from hone.types import Outcome, Task

GREATEST = 3.4028234663852886e38  # of float32, in which rewards are learned from
LONGEST = 300  # characters of a reason, less its place
PLACE = re.compile(r" \(([^()]*(?:\.py|>):\d+)\)$")
VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![\w./-])\d[\d.,]*(?![\w/-])")  # from one completion to the next
HONE = str(Path(__file__).parents[1])


def as_task(task: Task | str) -> Task:
    """The task itself, or one with no prompt whose gold answer is the text."""
    return Task(prompt="", answer=task) if isinstance(task, str) else task


def invalid(reason: str, *, place: str = "") -> Outcome:
    """No number, for this reason. place: the user's file and line that it comes from."""
    plain = reason.encode("utf-8", "replace").decode()  # half a surrogate pair can be neither printed nor stored
    said = " ".join(plain.split())[:LONGEST]
    return Outcome(value=None, reason=f"{said} ({place})" if place else said)


def kind_of(reason: str) -> str:
    """What the reason has in common with others of its kind.

    >>> kind_of("math: KeyError: 'answer' (rewards.py:7)"), kind_of("timed out: it took more than 60 s")
    ('math: KeyError (rewards.py:7)', 'timed out: it took more than … s')
    """
    found = PLACE.search(reason)
    said = reason[: found.start()] if found else reason
    error = re.match(r"(.*?\b[A-Z]\w*)(?::|$)", said) if found else None
    said = error[1] if error else VARIES.sub("…", said)
    return f"{said} ({found[1]})" if found else said


def kinds(outcomes: Iterable[Outcome]) -> dict[str, tuple[int, str]]:
    """Each kind of reason of invalid outcomes, the most frequent first: its count, and its first example."""
    reasons = [outcome.reason for outcome in outcomes if not outcome.valid]
    counts, first = Counter(map(kind_of, reasons)), dict[str, str]()
    for reason in reasons:
        first.setdefault(kind_of(reason), reason)
    return {kind: (count, first[kind]) for kind, count in counts.most_common()}


def place_of(function: Callable[..., Any]) -> str:
    """Where a user's function begins, as in rewards.py:12; "" of Hone's own and of those that are not in Python."""
    inner: Any = unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return _written(code.co_filename, code.co_firstlineno) if code and not _is_hone(code.co_filename) else ""


def _raised_at(error: BaseException) -> str:
    """The last line of the user's own code that it came through; else where Hone called something, or Hone's line."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [frame for frame in frames if not _is_hone(frame[0])]
    users = [frame for frame in outside if not _is_library(frame[0])]
    found = users[-1:] or outside[:1] or frames[-1:]
    return _written(*found[0]) if found else ""


def _is_hone(file: str) -> bool:
    return file.startswith(HONE + os.sep) and not file.startswith(os.path.join(HONE, "recipes") + os.sep)


def _is_library(file: str) -> bool:
    """Whether the file belongs to Python or to a package. What is typed into a shell or a notebook is the user's."""
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))
    return installed or file.startswith(("<frozen ", "<string>", "<__array", *_libraries()))


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib")
    return tuple({sysconfig.get_path(name) + os.sep for name in names if sysconfig.get_path(name)})


def _written(file: str, line: int) -> str:
    """Relative to the folder that the command was started in, where it lies below it."""
    try:
        path = Path(file).relative_to(Path.cwd())
    except (ValueError, OSError):
        path = Path(file)
    return f"{path}:{line}"


def commonest(outcomes: Iterable[Outcome]) -> tuple[str, int, int]:
    """The most frequent reason of invalid outcomes, how often it was given, and how many are invalid."""
    reasons = Counter(outcome.reason for outcome in outcomes if not outcome.valid)
    reason, times = reasons.most_common(1)[0] if reasons else ("", 0)
    return reason, times, reasons.total()


def crash_outcome(error: BaseException) -> Outcome:
    """The outcome of a reward that raised: no number."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:  # of tasks that ran together, the first that did
        error = error.exceptions[0]
    place = _raised_at(error)
    error.__traceback__ = None  # one that is raised again would bring this one's frames along
    try:
        said = str(error)
        return invalid(f"{type(error).__name__}: {said}" if said else type(error).__name__, place=place)
    except Exception:  # an exception whose own text cannot be written
        return invalid(type(error).__name__, place=place)


def finite(value: Any) -> float | None:
    """The number a value stands for, or None: text, and what is infinite in float32, are no numbers."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        return None
    return number if abs(number) <= GREATEST else None


def to_outcome(value: Any, *, place: str = "") -> Outcome:
    """What a reward function returned, as an outcome: number, parts to be summed, Outcome, else invalid.

    place: where the function is, for the reason.
    """
    if isinstance(value, float | int) and abs(value) <= GREATEST:  # as most are: the rest takes longer to tell apart
        return Outcome(value=float(value))
    if isinstance(value, Mapping):
        return _from_parts(value, place)
    if isinstance(value, Outcome):
        if not value.valid:
            return value if value.reason else invalid("the reward gave no reason", place=place)
        number, parts, added = finite(value.value), _finite_parts(value.parts), _finite_parts(value.added)
        if number is None or parts is None or added is None:
            said = f"the reward returned an Outcome of {value.value!r} with parts {dict(value.parts)!r}"
            return invalid(said, place=place)
        return replace(value, value=number, parts=parts, added=added)
    number = finite(value)
    if number is None:
        return invalid(f"the reward returned {type(value).__name__} {value!r}, expected a finite number", place=place)
    return Outcome(value=number)


def _from_parts(parts: Mapping[Any, Any], place: str) -> Outcome:
    numbers = _finite_parts(parts)
    if not numbers:
        return invalid(f"the reward returned the parts {dict(parts)!r}, expected finite numbers", place=place)
    return to_outcome(Outcome(value=math.fsum(numbers.values()), parts=numbers, added=numbers))


def _finite_parts(parts: Mapping[Any, Any]) -> dict[str, float] | None:
    """The parts as plain numbers; None where one of them is no finite number, or two have one name."""
    numbers = {str(name): number for name, part in parts.items() if (number := finite(part)) is not None}
    return numbers if len(numbers) == len(parts) else None
