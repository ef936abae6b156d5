"""A JSON document with one thing in it changed, in every place and to every kind of value."""

import copy
from collections.abc import Iterator
from typing import Any

DEEP: Any = None
for _ in range(60):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    "null": None, "true": True, "a list": [], "a table": {}, "a list of lists": [[1], {"a": None}],
    "a table of tables": {"a": {"b": [1]}}, "huge": 10**400, "huge float": 1e308, "negative": -7, "nan": float("nan"),
    "infinity": float("inf"), "fraction": 0.5, "text": "x", "no text": "", "odd text": "\ud800\u0000../..",
    "deep": DEEP,
}  # fmt: skip
Path = tuple[str | int, ...]


def places(document: Any, above: Path = ()) -> Iterator[Path]:
    """Every place in the document, the whole of it first; of a long list the first and the last two."""
    yield above
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*above, key))
    elif isinstance(document, list):
        for index in sorted({0, *range(max(0, len(document) - 2), len(document))} if document else ()):
            yield from places(document[index], (*above, index))


def changed(document: Any, place: Path, value: Any) -> Any:
    """A copy with another value in that place."""
    if not place:
        return value
    found = copy.deepcopy(document)
    node = found
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return found


def without(document: Any, place: Path) -> Any:
    """A copy that lacks what is in that place."""
    found = copy.deepcopy(document)
    node = found
    for key in place[:-1]:
        node = node[key]
    del node[place[-1]]
    return found


def mutants(document: Any) -> Iterator[tuple[str, Any]]:
    """Each changed document, with words for what was changed."""
    for place in places(document):
        name = ".".join(map(str, place)) or "all of it"
        for kind, value in VALUES.items():
            yield f"{name} = {kind}", changed(document, place, value)
        if place:
            yield f"{name} is missing", without(document, place)
