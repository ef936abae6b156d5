"""One row's bytes to a row, or the reason why not, in words that follow "FILE line N"."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

LIMIT = 8 * 2**20  # bytes of a row; no context holds as many tokens
SHOWN = 160  # characters of a row in an error


class Unreadable(Exception):
    """The message continues a sentence that begins with the place: "is not valid JSON (...): correct it"."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # made once: a new one a row would halve the speed


def parse(data: bytes, *, limit: int = LIMIT) -> Any:
    """A JSON value; limit 0: of any length."""
    if limit and len(data) > limit:
        raise Unreadable(over(limit))
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)  # of a whole file; a row of JSON lines is one
        place = f"line {line + 1}" if line else f"byte {error.start}"
        raise Unreadable(f"is not UTF-8 ({place}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
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
    return names.get(type(value), "a number")


def object_of(value: Any) -> dict[str, Any]:
    """The value, which must be a row."""
    if type(value) is not dict:
        raise Unreadable(f"is {kind_of(value)}, not an object: write one row as {{column: value}}")
    return value


def shown(row: Any) -> str:
    """A row as an error shows it: one line, every text short.

    >>> shown({"prompt": "a" * 99, "n": [1, 2, 3]})
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
