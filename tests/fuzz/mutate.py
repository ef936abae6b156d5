"""Inputs made from others by chance: what the fuzzer does where no coverage-guided one is installed."""

import random
import re
from collections.abc import Sequence

WORDS = [
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"Infinity",
        b"-0.0",
        b"1.5",
        b"99999999999999999999",
        b"10" * 99,
    ),
    *(b'""', b'"\\ud800"', b'"\\u0000"', b"[]", b"{}", b"[[" * 600, b'{"a":' * 600, b"[1]", b'{"a": 1}', b'"x"'),
    *(
        b"\xff",
        b"\xef\xbb\xbf",
        b"\n",
        b"\r\n",
        b"\0",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x7f" * 8,
        b"\x80" * 8,
    ),
    *(
        b"{{ x }}",
        b"{% for i in range(9999) %}",
        b"{% endfor %}",
        b"| join",
        b"\\frac{1}{",
        b"\\sqrt",
        b"^",
        b"}",
        b"9" * 400,
    ),
]
VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9.]+(?:e[-+]?[0-9]+)?|true|false|null|\[\]|\{\}')


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """The input after one to four changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        data = chance.choice(CHANGES)(data, others, chance)
    return data[: 1 << 16]


def _value(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """One value of JSON becomes another, of another kind."""
    found = list(VALUE.finditer(data))
    if not found:
        return _word(data, others, chance)
    place = chance.choice(found)
    new = chance.choice([*WORDS, chance.choice(found).group()])
    return data[: place.start()] + new + data[place.end() :]


def _byte(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


def _bit(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    if not data:
        return b"\x01"
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _word(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(WORDS) + data[at + chance.choice((0, 1, 4, 8)) :]


def _cut(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b:]


def _repeat(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:b] * chance.choice((1, 2, 30)) + data[b:]


def _splice(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(others)
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


CHANGES = (_value, _value, _value, _byte, _bit, _word, _cut, _repeat, _splice)
