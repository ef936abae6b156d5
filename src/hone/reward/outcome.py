"""Outcomes: the value that a reward function returned becomes a number with parts, or invalid with a reason.

A value that is not a finite number is invalid, and never zero. A reason ends with the file and line of the user's code
that it comes from, as in "KeyError: 'answer' (rewards.py:7)". Reasons that differ only in numbers and quoted text are
of one kind. So are exceptions of one type from one line.
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

from hone.errors import HoneError
from hone.types import Outcome, Task

FLOAT32_MAX = 3.4028234663852886e38  # rewards become float32 in a batch
MAX_REASON = 300  # characters of a reason, without its location
LOCATION = re.compile(r" \(([^()]*(?:\.py|>):\d+)\)$")
CHANGING_PARTS = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![\w./-])\d[\d.,]*(?![\w/-])")  # what differs between completions
HONE_FOLDER = str(Path(__file__).parents[1])


def as_task(task: Task | str) -> Task:
    """The task itself, or for a text a task without a prompt whose gold answer is the text."""
    if not isinstance(task, Task | str):
        raise HoneError(f"the task is {task!r:.60}: give a Task, or the gold answer as text")
    return Task(prompt="", answer=task) if isinstance(task, str) else task


def invalid(reason: str, *, location: str = "") -> Outcome:
    """An outcome without a number, for this reason. location: the user's file and line that it comes from."""
    plain = reason.encode("utf-8", "replace").decode()  # half a surrogate pair can be neither printed nor stored
    message = " ".join(plain.split())[:MAX_REASON]
    return Outcome(value=None, reason=f"{message} ({location})" if location else message)


def kind_of(reason: str) -> str:
    """The kind of a reason: the text that it shares with others of its kind.

    >>> kind_of("math: KeyError: 'answer' (rewards.py:7)"), kind_of("timed out: it took more than 60 s")
    ('math: KeyError (rewards.py:7)', 'timed out: it took more than … s')
    """
    found = LOCATION.search(reason)
    message = reason[: found.start()] if found else reason
    error = re.match(r"(.*?\b[A-Z]\w*)(?::|$)", message) if found else None
    message = error[1] if error else CHANGING_PARTS.sub("…", message)
    return f"{message} ({found[1]})" if found else message


def kinds(outcomes: Iterable[Outcome]) -> dict[str, tuple[int, str]]:
    """The kinds of reasons of invalid outcomes, most frequent first, each with its count and its first example."""
    reasons = [outcome.reason for outcome in outcomes if not outcome.valid]
    counts, first = Counter(map(kind_of, reasons)), dict[str, str]()
    for reason in reasons:
        first.setdefault(kind_of(reason), reason)
    return {kind: (count, first[kind]) for kind, count in counts.most_common()}


def location_of(function: Callable[..., Any]) -> str:
    """Where a user's function begins, as in rewards.py:12; "" for Hone's own and for those not written in Python."""
    inner: Any = unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return _file_and_line(code.co_filename, code.co_firstlineno) if code and not _is_hone(code.co_filename) else ""


def _raised_at(error: BaseException) -> str:
    """The last line of the user's code in the traceback; without one the first line outside Hone, or Hone's."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [frame for frame in frames if not _is_hone(frame[0])]
    own = [frame for frame in outside if not _is_library(frame[0])]
    found = own[-1:] or outside[:1] or frames[-1:]
    return _file_and_line(*found[0]) if found else ""


def _is_hone(file: str) -> bool:
    return file.startswith(HONE_FOLDER + os.sep) and not file.startswith(os.path.join(HONE_FOLDER, "recipes") + os.sep)


def _is_library(file: str) -> bool:
    """Whether the file belongs to Python or to a package. Code typed into a shell or a notebook is the user's."""
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))
    return installed or file.startswith(("<frozen ", "<string>", "<__array", *_libraries()))


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib")
    return tuple({sysconfig.get_path(name) + os.sep for name in names if sysconfig.get_path(name)})


def _file_and_line(file: str, line: int) -> str:
    """The file and line; the file relative to the working directory where it lies below that."""
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
    """The invalid outcome of a reward that raised."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:  # of a task group, the first error
        error = error.exceptions[0]
    location = _raised_at(error)
    error.__traceback__ = None  # an exception object that is raised again would keep these frames
    try:
        message = str(error)
        return invalid(f"{type(error).__name__}: {message}" if message else type(error).__name__, location=location)
    except Exception:  # an exception whose own text cannot be written
        return invalid(type(error).__name__, location=location)


def finite(value: Any) -> float | None:
    """The value as a number; None for text, NaN and what is infinite in float32."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        return None
    return number if abs(number) <= FLOAT32_MAX else None


def to_outcome(value: Any, *, location: str = "") -> Outcome:
    """The outcome of a returned value: a number, a dict of parts to sum, or an Outcome; anything else is invalid.

    location: the function's file and line, for the reason.
    """
    if isinstance(value, float | int) and abs(value) <= FLOAT32_MAX:  # the usual case, told apart at once
        return Outcome(value=float(value))
    if isinstance(value, Mapping):
        return _from_parts(value, location)
    if isinstance(value, Outcome):
        if not value.valid:
            return value if value.reason else invalid("the reward gave no reason", location=location)
        number, parts, added = finite(value.value), _finite_parts(value.parts), _finite_parts(value.added)
        if number is None or parts is None or added is None:
            message = f"the reward returned an Outcome of {value.value!r} with parts {dict(value.parts)!r}"
            return invalid(message, location=location)
        return replace(value, value=number, parts=parts, added=added)
    number = finite(value)
    if number is None:
        return invalid(
            f"the reward returned {type(value).__name__} {value!r}, expected a finite number", location=location
        )
    return Outcome(value=number)


def _from_parts(parts: Mapping[Any, Any], location: str) -> Outcome:
    numbers = _finite_parts(parts)
    if not numbers:
        return invalid(f"the reward returned the parts {dict(parts)!r}, expected finite numbers", location=location)
    return to_outcome(Outcome(value=math.fsum(numbers.values()), parts=numbers, added=numbers))


def _finite_parts(parts: Mapping[Any, Any]) -> dict[str, float] | None:
    """The parts as floats; None where one of them is not a finite number, or two have the same name."""
    numbers = {str(name): number for name, part in parts.items() if (number := finite(part)) is not None}
    return numbers if len(numbers) == len(parts) else None
