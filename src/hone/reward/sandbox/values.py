"""Values that cross between sandbox and client: data, bounded in size and depth, built only from Python's own types.

Both sides use this module, so it imports nothing of Hone. What comes out is never an object of the program's: a
subclass arrives as the value underneath, and what is no data arrives as `Opaque`, which equals nothing.
"""

import array
import datetime
import importlib
import json
import sys
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from collections.abc import Callable, Hashable, Iterable, MutableMapping, MutableSequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType, NoneType
from typing import Any

DEPTH, ITEMS = 64, 200_000
COLLISIONS = 64  # more keys of one hash than this were made to be slow
SMALL = 1 << 53  # a larger integer is written in hexadecimal, which takes linear time to read
DIGITS = 20_000  # of a fraction or decimal, and of a decimal's exponent: sums and comparisons with more are slow
VIEWS: dict[type, str] = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
# classes that are data themselves: what type() gives, and what a defaultdict makes
TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, NoneType, range)
}
CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}
# of modules that most programs never import: equal if their texts are
BY_TEXT = (("uuid", "UUID"), ("pathlib", "PurePosixPath"), ("pathlib", "PosixPath"), ("pathlib", "PureWindowsPath"))
BY_TEXT += (("ipaddress", "IPv4Address"), ("ipaddress", "IPv6Address"), ("ipaddress", "IPv4Network"))
Refer = Callable[[Any], int]  # what is no data to the number by which the other side may name it


class Opaque:
    """Something that is no data; `kind` is the name of its type, `number` what it can be named by (0: it cannot)."""

    __slots__ = ("kind", "number")

    def __init__(self, kind: str, number: int = 0) -> None:
        self.kind, self.number = kind, number

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    def __call__(self) -> Any:
        """It can be what a defaultdict makes its values by, and is passed on as such."""
        raise TypeError(f"{self.kind} cannot be called from here")


class TooLarge(ValueError):
    """Too deep, too many items, or too long."""


def dumps(value: Any, *, limit: int, refer: Refer | None = None) -> bytes:
    """The value as JSON in ASCII."""
    text = json.dumps(_out(value, 0, _Remaining(max(ITEMS, limit // 4), limit, refer))).encode("ascii")
    if len(text) > limit:
        raise TooLarge(f"{len(text)} bytes, and {limit} are allowed")
    return text


def loads(text: bytes, *, resolve: Callable[[Opaque], Any] | None = None) -> Any:
    """The value that `dumps` wrote; ValueError on anything else, however it was made."""
    try:
        return _in(json.loads(text.decode("ascii"), parse_constant=_refuse), 0, resolve or (lambda found: found))
    except (RecursionError, LookupError, TypeError, ArithmeticError, UnicodeDecodeError) as error:
        raise ValueError(f"not a value: {type(error).__name__}") from error


def _refuse(name: str) -> Any:
    raise ValueError(f"not a value: {name}")


class _Remaining:
    """The items and bytes that may still come, and who numbers what is no data."""

    __slots__ = ("items", "refer", "size", "whole")

    def __init__(self, items: int, size: int, refer: Refer | None) -> None:
        self.items, self.size, self.whole, self.refer = items, size, items, refer

    def take(self, items: int, size: int) -> None:
        self.items -= items
        self.size -= size
        if self.items < 0 or self.size < 0:
            raise TooLarge(f"more than {self.whole} items or the bytes allowed")


def _out(value: Any, depth: int, left: _Remaining) -> Any:
    """The value in JSON's types."""
    if depth > DEPTH:
        raise TooLarge(f"more than {DEPTH} levels")
    plain = _plain(value)
    kind = type(plain)
    if kind in (list, tuple, set, frozenset, deque):
        left.take(len(plain), 0)
        items = [_out(item, depth + 1, left) for item in plain]
        if kind is deque and plain.maxlen is not None:
            return {"bounded": [plain.maxlen, *items]}
        return items if kind is list else {kind.__name__: items}
    if kind in (dict, OrderedDict, Counter):
        left.take(len(plain), 0)
        pairs = [[_out(k, depth + 1, left), _out(v, depth + 1, left)] for k, v in plain.items()]
        return {kind.__name__: pairs}
    if kind is defaultdict:
        made = plain.default_factory
        return {"defaultdict": [_out(made, depth + 1, left), _out(dict(plain), depth, left)]}
    if kind in _HELD:
        return {kind.__name__: [_out(held, depth + 1, left) for held in _HELD[kind](plain)]}
    if kind is _Named:
        return {"named": [*plain.names, *(_out(item, depth + 1, left) for item in plain.items)]}
    if kind is slice:
        return {"slice": [_out(end, depth + 1, left) for end in (plain.start, plain.stop, plain.step)]}
    if kind in VIEWS:
        return {VIEWS[kind]: _out(list(plain), depth, left)}
    left.take(1, plain.bit_length() // 8 if kind is int else len(plain) if kind in (str, bytes, bytearray) else 1)
    return _scalar(plain, left)


def _scalar(value: Any, left: _Remaining) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else {"int": hex(value)}
    if kind in _WRITE:
        return {kind.__name__: _WRITE[kind](value)}
    if kind is type and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    for name, constant in CONSTANTS.items():
        if value is constant:
            return {"constant": name}
    for module, name in BY_TEXT:
        if name == kind.__name__ and getattr(sys.modules.get(module), name, None) is kind:
            return {"text": [module, name, str(value)]}
    if kind is Opaque:
        return {"opaque": [value.kind[:100], value.number]}
    return {"opaque": [kind.__name__[:100], left.refer(value) if left.refer else 0]}


def _digits(text: str) -> str:
    if len(text) > DIGITS:
        raise TooLarge(f"a number of more than {DIGITS} digits")
    return text


def _decimal_text(value: Decimal) -> str:
    if value.is_finite() and abs(value.adjusted()) > DIGITS:
        raise TooLarge(f"a decimal with an exponent beyond {DIGITS}")
    return _digits(str(value))


_WRITE: dict[type, Callable[[Any], Any]] = {
    float: float.hex,
    complex: lambda value: [value.real.hex(), value.imag.hex()],
    bytes: bytes.hex,
    bytearray: bytearray.hex,
    range: lambda value: [hex(value.start), hex(value.stop), hex(value.step)],
    Fraction: lambda value: [_digits(hex(value.numerator)), _digits(hex(value.denominator))],
    Decimal: _decimal_text,
    datetime.datetime: datetime.datetime.isoformat,
    datetime.date: datetime.date.isoformat,
    datetime.time: datetime.time.isoformat,
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    datetime.timezone: lambda value: value.utcoffset(None).total_seconds().hex(),
    array.array: lambda value: [value.typecode, value.tobytes().hex()],
}


_HELD: dict[type, Callable[[Any], list[Any]]] = {  # what is equal to the plain container that it holds
    MappingProxyType: lambda value: [dict(value)],
    ChainMap: lambda value: [dict(held) for held in value.maps],
    UserDict: lambda value: [dict(value.data)],
    UserList: lambda value: [list(value.data)],
    UserString: lambda value: [str(value.data)],
}


def _plain(value: Any) -> Any:
    """The value under a subclass (defaultdict, IntEnum, numpy's scalars and arrays), its methods unasked."""
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if issubclass(kind, tuple) and isinstance(names := getattr(kind, "_fields", None), tuple):
        return _Named([kind.__name__, len(names), *map(str, names)], list(tuple.__iter__(value)))
    for base in (
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        Counter,
        OrderedDict,
        dict,
        set,
        frozenset,
        deque,
    ):
        if issubclass(kind, base):
            return _under(base, value)
    if kind is memoryview:
        return value.tobytes()
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value


_PLAIN = {bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, Counter, OrderedDict}
_PLAIN |= {deque, range, Fraction, Decimal, datetime.datetime, datetime.date, datetime.time, datetime.timedelta}
_PLAIN |= {array.array, Opaque, defaultdict, datetime.timezone, *_HELD, *VIEWS}


class _Named:
    """A named tuple: its name, the number of its fields and their names; its items."""

    __slots__ = ("items", "names")

    def __init__(self, names: list[Any], items: list[Any]) -> None:
        self.names, self.items = names, items


@lru_cache(256)
def _named_type(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)  # it takes names only, and no others


def _named(items: list[Any]) -> Any:
    name, number, *rest = items
    return _named_type(name, tuple(rest[:number]))(*rest[number:])


def _under(base: type, value: Any) -> Any:
    if base is int:
        return int.__add__(value, 0)
    if base is float:
        return float.__add__(value, 0.0)
    if base is complex:
        return complex.__add__(value, 0)
    if base in (str, bytes, bytearray):
        return base.__getitem__(value, slice(None)) if base.__len__(value) else base()
    if issubclass(base, dict):
        plain = dict(zip(dict.keys(value), dict.values(value), strict=True))
        return plain if base is dict else base(plain)
    return base(base.__iter__(value))


Resolve = Callable[[Opaque], Any]


def _in(value: Any, depth: int, resolve: Resolve) -> Any:
    if depth > DEPTH:
        raise ValueError("not a value: too deep")
    if isinstance(value, list):
        return [_in(item, depth + 1, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "opaque":
        name, number = inner
        return resolve(Opaque(str(name), int(number)))
    if kind in _SCALARS:
        return _SCALARS[kind](inner)
    items = [_in(item, depth + 1, resolve) for item in inner] if isinstance(inner, list) else _refuse(kind)
    return _CONTAINERS[kind](items)


def _pairs(items: Iterable[Any]) -> dict[Any, Any]:
    keys, held = [key for key, _ in items], [value for _, value in items]
    return dict(zip(_keys(keys), held, strict=True))


def _keys(found: list[Hashable]) -> list[Hashable]:
    if len(found) > COLLISIONS and max(Counter(hash(key) for key in found).values()) > COLLISIONS:
        raise ValueError("not a value: keys chosen to collide")
    return found


def _decimal(text: str) -> Decimal:
    found = Decimal(_digits(text))
    _decimal_text(found)
    return found


def _array(inner: Any) -> Any:
    made = array.array(str(inner[0]))
    made.frombytes(bytes.fromhex(inner[1]))
    return made


def _by_text(inner: Any) -> Any:
    module, name, text = inner
    if (module, name) not in BY_TEXT or not isinstance(text, str):
        raise ValueError("not a value: an unknown class")
    return getattr(importlib.import_module(module), name)(text)


def _default(items: list[Any]) -> Any:
    made, held = items
    return defaultdict(made if callable(made) else None, _of(dict, held))


def _of(kind: type, held: Any) -> Any:
    """Held, which the other side says is of this kind."""
    if type(held) is not kind:
        raise ValueError(f"not a value: no {kind.__name__}")
    return held


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "named": _named,
    "slice": lambda items: slice(*items),
    "set": lambda items: set(_keys(items)),
    "frozenset": lambda items: frozenset(_keys(items)),
    "deque": deque,
    "bounded": lambda items: deque(items[1:], _of(int, items[0])),
    "defaultdict": _default,
    "mappingproxy": lambda items: MappingProxyType(_of(dict, items[0])),
    "ChainMap": lambda items: ChainMap(*(_of(dict, held) for held in items)),
    "UserDict": lambda items: UserDict(_of(dict, items[0])),
    "UserList": lambda items: UserList(_of(list, items[0])),
    "UserString": lambda items: UserString(_of(str, items[0])),
    "dict": _pairs,
    "OrderedDict": lambda items: OrderedDict(_pairs(items)),
    "Counter": lambda items: Counter(_pairs(items)),
    "keys": lambda items: dict.fromkeys(_keys(items)).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: _pairs(items).items(),
}
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda inner: int(inner, 16),
    "float": float.fromhex,
    "complex": lambda inner: complex(*map(float.fromhex, inner)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda inner: range(*(int(n, 16) for n in inner)),
    "Fraction": lambda inner: Fraction(*(int(_digits(n), 16) for n in inner)),
    "Decimal": _decimal,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda inner: datetime.timedelta(*inner),
    "timezone": lambda inner: datetime.timezone(datetime.timedelta(seconds=float.fromhex(inner))),
    "type": TYPES.__getitem__,
    "constant": CONSTANTS.__getitem__,
    "text": _by_text,
    "array": _array,
}


CHANGING = (list, dict, set, deque, bytearray, array.array, tuple)


def renew(old: Any, new: Any) -> None:
    """Make a test's list, set, dictionary or bytes what the program has made of it, in place, also inside."""
    if type(old) is not type(new) or not isinstance(old, CHANGING):
        return
    if isinstance(old, tuple):  # itself it stays, but not what is in it
        for one, other in zip(old, new, strict=False):
            renew(one, other)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, MutableMapping):
        kept = {key: _renewed(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(kept)
    elif isinstance(old, list | deque) and len(old) == len(new):
        for i, value in enumerate(new):
            old[i] = _renewed(old[i], value)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, MutableSequence | array.array):
        old[:] = new


def _renewed(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, CHANGING) and not isinstance(old, tuple):
        renew(old, new)
        return old
    return new
