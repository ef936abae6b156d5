"""Values and annotations: does a value fit a field, and what does a text on the command line mean there?

Nothing is converted but a whole number to a float and a list to a tuple: a changed type is an error.
"""

import os
import sys
import types
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

_PLAIN: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    type(None): "none",
    Any: "anything",
}


class Misfit(Exception):
    """A value that does not fit; the message says what would."""


def fit(value: Any, hint: Any) -> Any:
    """The value as the annotation wants it, or Misfit.

    >>> fit(1, float), fit([0.9, 1], tuple[float, float])
    (1.0, (0.9, 1.0))
    """
    origin = get_origin(hint) or hint
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _fit_union(value, hint)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in get_args(hint)):
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        return _fit_tuple(value, hint)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        key, item = get_args(hint) or (Any, Any)
        return {fit(k, key): fit(v, item) for k, v in value.items()}
    elif _is_plain(value, origin):
        return float(value) if origin is float else value
    raise Misfit(expected(hint))


def read(text: str, hint: Any) -> Any:
    """What a text means for a field of this annotation, or Misfit.

    >>> read("1e-3", float), read("none", float | None), read("none", str), read("a,b", tuple[str, ...])
    (0.001, None, 'none', ('a', 'b'))
    """
    for candidate in _readings(text, hint):
        try:
            return fit(candidate, hint)
        except Misfit:
            continue
    raise Misfit(expected(hint))


def expected(hint: Any) -> str:
    """An annotation in words: "a whole number or none"."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(expected(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"{len(args)} values ({', '.join(expected(arg) for arg in args)})"
    if origin is tuple:
        return f"a list, each {expected(args[0])}" if args else "a list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"names, each with {expected(args[1])}" if args else "names with values"
    if origin is Callable or origin is Sequence:
        return "a function" if origin is Callable else "a list"
    return _PLAIN.get(origin, getattr(origin, "__name__", str(origin)))


def shown_value(value: Any) -> str:
    """A value as an error message shows it: short, with its kind."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"a table of {len(value)}"
    return f"a {type(value).__name__}" if not hasattr(value, "__name__") else f"{value.__name__}"


def mapping_value(hint: Any) -> Any:
    """The annotation of a mapping's values, or None where the field holds no mapping."""
    for arm in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        origin = get_origin(arm) or arm
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return (get_args(arm) or (Any, Any))[1]
    return None


def _is_plain(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # so neither nan nor inf
    if kind is int:
        return type(value) is int and abs(value) < 2**63  # True is not 1, and torch counts in 64 bits
    if kind is str:
        return isinstance(value, str) and _is_writable(value)
    if kind is bool:
        return type(value) is bool
    if kind is Callable:
        return callable(value)
    if kind is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_writable(text: str) -> bool:
    """Whether it can be a file's name, or part of one: many texts are, and none needs what this leaves out."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _fit_union(value: Any, hint: Any) -> Any:
    for arm in get_args(hint):
        try:
            return fit(value, arm)
        except Misfit:
            continue
    raise Misfit(expected(hint))


def _fit_tuple(value: Sequence[Any], hint: Any) -> tuple[Any, ...]:
    args = get_args(hint) or (Any, ...)
    kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(value):
        raise Misfit(expected(hint))
    return tuple(fit(item, kind) for item, kind in zip(value, kinds, strict=True))


def _readings(text: str, hint: Any) -> Iterator[Any]:
    """What a text may mean, the likeliest first; the first that fits is taken."""
    literals = _literals(text)
    yield from (value for value in literals if hint is Any or isinstance(value, dict | list | tuple))
    if text.lower() in ("none", "null") and hint is not Any:
        yield None
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    yield text
    yield from literals
    yield tuple(part.strip() for part in text.split(",") if part.strip())


def _literals(text: str) -> list[Any]:
    """The Python literal that the text is, if it is one; `None` is left to the caller."""
    try:
        return [value for value in (literal_eval(text.strip()),) if value is not None]
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
