"""Values that cross the wall: data, bounded in size and depth, built only from Python's own plain types.

Both sides use this module, so it imports nothing of Hone. What comes out is never an object of the program's: a
subclass arrives as the plain value underneath, and what is no data arrives as `Opaque`, which equals nothing.
"""

import json
from collections import Counter
from collections.abc import Hashable
from typing import Any

DEPTH, ITEMS = 64, 200_000
COLLISIONS = 64  # more keys of one hash than this were made to be slow
CONTAINERS = (list, tuple, set, frozenset, dict)
SMALL = 1 << 53  # a larger integer is written in hexadecimal, which takes linear time to read


class Opaque:
    """Something that is no data; `kind` is the name of its type."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class TooLarge(ValueError):
    """Too deep, too many items, or too long."""


def dumps(value: Any, *, limit: int) -> bytes:
    """The value as JSON in ASCII."""
    text = json.dumps(_out(value, 0, [ITEMS, limit])).encode("ascii")
    if len(text) > limit:
        raise TooLarge(f"{len(text)} bytes, and {limit} are allowed")
    return text


def loads(text: bytes) -> Any:
    """The value that `dumps` wrote; ValueError on anything else, however it was made."""
    try:
        return _in(json.loads(text.decode("ascii"), parse_constant=_refuse), 0)
    except (RecursionError, LookupError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"not a value: {type(error).__name__}") from error


def _refuse(name: str) -> Any:
    raise ValueError(f"not a value: {name}")


def _out(value: Any, depth: int, left: list[int]) -> Any:
    """The value in JSON's types; `left` counts the items and bytes that may still come."""
    plain = _plain(value)
    kind = type(plain)
    left[0] -= len(plain) if kind in CONTAINERS else 1
    left[1] -= plain.bit_length() // 8 if kind is int else len(plain) if kind in (str, bytes) else 1
    if min(left) < 0 or depth > DEPTH:
        raise TooLarge(
            f"more than {ITEMS} items or the bytes allowed" if depth <= DEPTH else f"more than {DEPTH} levels"
        )
    if kind in CONTAINERS and kind is not dict:
        items = [_out(item, depth + 1, left) for item in plain]
        return items if kind is list else {kind.__name__: items}
    if kind is dict:
        return {"dict": [[_out(k, depth + 1, left), _out(v, depth + 1, left)] for k, v in plain.items()]}
    return _scalar(plain)


def _scalar(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    return {"opaque": kind.__name__[:100]}


def _plain(value: Any) -> Any:
    """The value under a subclass (Counter, namedtuple, IntEnum, numpy's scalars and arrays), its methods unasked."""
    kind = type(value)
    if kind is bool or value is None:
        return value
    for base in (int, float, complex, str, bytes, list, tuple, dict, set, frozenset):
        if kind is base:
            return value
        if issubclass(kind, base):
            return _under(base, value)
    if kind is bytearray:
        return bytes(value)
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value


def _under(base: type, value: Any) -> Any:
    if base is int:
        return int.__add__(value, 0)
    if base is float:
        return float.__add__(value, 0.0)
    if base is complex:
        return complex.__add__(value, 0)
    if base in (str, bytes):
        return base.__getitem__(value, slice(None)) if base.__len__(value) else base()
    if base is dict:
        return dict(zip(dict.keys(value), dict.values(value), strict=True))
    return base(base.__iter__(value))


def _in(value: Any, depth: int) -> Any:
    if depth > DEPTH:
        raise ValueError("not a value: too deep")
    if isinstance(value, list):
        return [_in(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return _READ[kind](inner, depth + 1)


def _items(inner: Any, depth: int) -> list[Any]:
    if not isinstance(inner, list):
        raise TypeError(kind_of(inner))
    return [_in(item, depth) for item in inner]


def _pairs(inner: Any, depth: int) -> dict[Any, Any]:
    keys = _keys([_in(k, depth) for k, _ in inner])
    return dict(zip(keys, [_in(v, depth) for _, v in inner], strict=True))


def _keys(found: list[Hashable]) -> list[Hashable]:
    if len(found) > COLLISIONS and max(Counter(hash(key) for key in found).values()) > COLLISIONS:
        raise ValueError("not a value: keys chosen to collide")
    return found


def kind_of(value: Any) -> str:
    """The name of a value's type."""
    return type(value).__name__


_READ = {
    "tuple": lambda inner, depth: tuple(_items(inner, depth)),
    "set": lambda inner, depth: set(_keys(_items(inner, depth))),
    "frozenset": lambda inner, depth: frozenset(_keys(_items(inner, depth))),
    "dict": _pairs,
    "int": lambda inner, depth: int(inner, 16),
    "float": lambda inner, depth: float.fromhex(inner),
    "complex": lambda inner, depth: complex(*map(float.fromhex, inner)),
    "bytes": lambda inner, depth: bytes.fromhex(inner),
    "opaque": lambda inner, depth: Opaque(str(inner)),
}
