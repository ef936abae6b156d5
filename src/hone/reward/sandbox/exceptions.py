"""Exceptions that cross between sandbox and client: what one is to the other side, and how it is raised there again.

Both sides use this module, so it imports nothing of Hone.
"""

import builtins
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

Record = dict[str, Any]
_RUNNERS = ("unittest", "_pytest")  # a program that raises their SkipTest shall not have its tests left out


def _made_again(kind: type[BaseException], answer: Mapping[str, Any]) -> BaseException:
    """An exception of this class with the same arguments and attributes."""
    try:  # some of Python's own set attributes from their arguments
        error = kind(*answer["args"]) if kind.__module__ == "builtins" else kind.__new__(kind)
    except Exception:
        error = RuntimeError() if issubclass(kind, BaseExceptionGroup) else kind.__new__(kind)
    error.args = tuple(answer["args"])
    for name, value in answer["held"].items():
        with contextlib.suppress(Exception):
            setattr(error, name, value)
    return error


def exception_record(error: BaseException) -> Record:
    """What an exception is to the other side: its text, its classes, and what it holds where that is data."""
    kinds = [[kind.__module__, kind.__name__] for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    args = [_told_value(value) for value in error.args[:8]]
    held = {name: _told_value(value) for name, value in list(vars(error).items())[:16] if not name.startswith("_")}
    return {"error": describe(error), "kinds": kinds[:16], "args": args, "held": held}


def _told_value(value: Any) -> Any:
    text = value if isinstance(value, str | int | float | None) else as_text(value)
    return text[:1000] if isinstance(text, str) else text


def describe(error: BaseException) -> str:
    """An exception in one text."""
    said = as_text(error)
    return f"{type(error).__name__}: {said}"[:500] if said else type(error).__name__


def as_text(value: Any) -> str:
    """str(value), whose method may be the program's."""
    try:
        return str(value)
    except BaseException:
        return ""


def rebuild(answer: Mapping[str, Any], classes: Mapping[str, type[BaseException]]) -> BaseException:
    """The same exception, or the nearest of its bases that this side has. classes: those made for it here."""
    for module, name in answer["kinds"]:
        if module.startswith(_RUNNERS):
            continue
        kind = classes.get(name) or getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return _made_again(kind, answer)
    return RuntimeError(answer["error"])


def exception_class(name: str, kinds: Sequence[str]) -> type[BaseException]:
    """A class for an exception of the program, derived from the nearest of its bases that Python itself has."""
    known = (getattr(builtins, str(kind), None) for kind in kinds)
    bases = [kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)]
    made: Any = type(name, (*bases[:1],) or (Exception,), {})
    return made
