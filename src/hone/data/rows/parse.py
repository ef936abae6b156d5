"""One row's bytes to a row, or the reason why not, in words that follow "FILE line N"."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

LIMIT = 8 * 2**20  # bytes of a row; no context holds as many tokens
DEEPEST = 64  # levels of lists and objects in a row; what reads rows recurses
TOO_DEEP = f"holds lists and objects in more than {DEEPEST} levels: write it flatter"
SHOWN = 160  # characters of a row in an error


class Unreadable(Exception):
    """The message continues a sentence that begins with the place: "is not valid JSON (...): correct it"."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is larger than any number")
    return value


class Repeated(dict[str, Any]):
    """An object in which a key stands twice."""

    key = ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python would keep the last of two values and say nothing."""
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    names = [name for name, _ in pairs]
    marked = Repeated(made)
    marked.key = next(name for name in names if names.count(name) > 1)
    return marked


# made once: a new one a row would halve the speed
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_once)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape of half of a surrogate pair, which may have its other half


def parse(data: bytes, *, limit: int = LIMIT) -> Any:
    """A JSON value, in which keys may be Repeated; limit 0: of any length."""
    if limit and len(data) > limit:
        raise Unreadable(over(limit))
    try:
        value = _DECODER.decode(data.decode("utf-8"))
        if _HALF.search(data):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise Unreadable("holds half of a surrogate pair: it is not Unicode, repair it") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)  # of a whole file; a row of JSON lines is one
        place = f"line {line + 1}" if line else f"byte {error.start}"
        raise Unreadable(f"is not UTF-8 ({place}): save the file as UTF-8") from error
    except RecursionError as error:
        raise Unreadable(TOO_DEEP) from error
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            raise Unreadable("holds a whole number of thousands of digits: write it as text") from error
        raise Unreadable(f"is not valid JSON ({error}): correct it") from error


def over(limit: int) -> str:
    """What is wrong with a row of more bytes than the limit."""
    return f"is longer than {limit // 2**20} MiB, more than any model reads: cut it into several rows"


def too_long(row: Mapping[str, Any]) -> str:
    """The same complaint for rows that were never lines."""
    return over(LIMIT) if sum(len(v) for v in row.values() if isinstance(v, str)) > LIMIT else ""


def kind_of(value: Any) -> str:
    """A JSON value's kind in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "a number")


def object_of(value: Any) -> dict[str, Any]:
    """The value, which must be a row."""
    if not isinstance(value, dict):
        raise Unreadable(f"is {kind_of(value)}, not an object: write one row as {{column: value}}")
    if problem := fault_in(value):
        raise Unreadable(problem)
    return value


def fault_in(value: Any) -> str:
    """What no reader of a row could use, "" where there is nothing: a key that stands twice, or too many levels."""
    if type(value) is dict and not any(isinstance(inner, dict | list) for inner in value.values()):
        return ""  # most rows
    level, depth = [value], 0
    while level:
        for inner in level:
            if isinstance(inner, Repeated):
                return f'has the key "{inner.key}" twice: remove one'
        if depth > DEEPEST:
            return TOO_DEEP
        inside = [inner.values() if isinstance(inner, Mapping) else inner for inner in level]
        # an object is looked at once a level: rows made in Python may hold themselves
        level = [*{id(x): x for values in inside for x in values if isinstance(x, Mapping | list | tuple)}.values()]
        depth += 1
    return ""


def short_text(row: Any) -> str:
    """A row as an error shows it: one line, every text short.

    >>> short_text({"prompt": "a" * 99, "n": [1, 2, 3]})
    '{"prompt": "aaaaaaaaaaaaaaaaaaaaaaaa...", "n": [1, 2, "..."]}'
    """
    text = json.dumps(_short(row), default=str)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= 24 else value[:24] + "..."
    if isinstance(value, Mapping):
        return {str(k)[:24]: _short(v) for k, v in list(value.items())[:8]}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_short(v) for v in value[:2]] + (["..."] if len(value) > 2 else [])
    return value
