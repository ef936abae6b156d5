"""Finds the backends in their folders.

Each kind of computation with backends has a protocol, a class derived from Backend: `decoder.LayerBackend`,
`rows.RowAttention`, `layout.PassBackend`, `layout.Streams`, `vocab.distribution.VocabBackend`.
"""

import os
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from torch.nn.attention import SDPBackend, sdpa_kernel

VARIABLE = "HONE_BACKENDS"  # names of the backends to use, with commas between them; "plain": none; unset: all


class Backend:
    """Computes something faster than plain code does. Its `covers` returns a reason why it cannot, or None."""

    name: str  # that of its folder, or another one for a part that is switched on and off alone
    priority: int = 0  # the one with the highest is asked first


B = TypeVar("B", bound=Backend)
_second_order = [0]  # how many callers are inside `second_order`


def discover(package: str, entry: str) -> Iterator[Any]:
    """The module `entry` of each folder of the package whose requirements are installed."""
    for found in pkgutil.iter_modules(import_module(package).__path__):
        if found.ispkg and all(map(find_spec, import_module(f"{package}.{found.name}").REQUIRES)):
            yield import_module(f"{package}.{found.name}.{entry}")


@cache
def find(kind: type[B], package: str, entry: str, names: str | None) -> tuple[B, ...]:
    """The backends of this kind in the package, by falling priority; names: use only these, None: all."""
    every = [b for module in discover(package, entry) for b in getattr(module, "BACKENDS", ())]
    found = [b for b in every if isinstance(b, kind) and (names is None or b.name in names.split(","))]
    return tuple(sorted(found, key=lambda b: -b.priority))


def backends_for(kind: type[B], package: str = "hone.model.backends", entry: str = "backend") -> tuple[B, ...]:
    """The backends of this kind by falling priority, without those that the environment switches off."""
    return find(kind, package, entry, os.environ.get(VARIABLE))


@contextmanager
def second_order() -> Iterator[None]:
    """Inside, layers and attention are plain torch, since backends have no second gradient (TRPO needs it)."""
    _second_order[0] += 1
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _second_order[0] -= 1


def differentiates_once() -> bool:
    """Whether backends without a second gradient may be used: no caller is inside `second_order`."""
    return not _second_order[0]
