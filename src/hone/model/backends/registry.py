"""Finds the folders that hold backends, and hands out what they compute.

Whoever can be computed faster derives a class from Backend that says what is asked: `decoder.LayerBackend`,
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

CHOICE = "HONE_BACKENDS"  # names of the backends to use, with commas between them; "plain": none; unset: all


class Backend:
    """Something that is computed faster than by plain code."""

    name: str  # of its folder, or of a part of it that is switched on and off by itself
    priority: int = 0  # the highest is asked first


B = TypeVar("B", bound=Backend)
_second_order = [0]  # how many callers will differentiate gradients again


def discover(package: str, entry: str) -> Iterator[Any]:
    """The module `entry` of every folder in the package whose requirements are installed."""
    for found in pkgutil.iter_modules(import_module(package).__path__):
        if found.ispkg and all(map(find_spec, import_module(f"{package}.{found.name}").REQUIRES)):
            yield import_module(f"{package}.{found.name}.{entry}")


@cache
def find(kind: type[B], package: str, entry: str, names: str | None) -> tuple[B, ...]:
    """The backends of this kind in the package, the highest priority first; names: of those to use, None: all."""
    every = [b for module in discover(package, entry) for b in getattr(module, "BACKENDS", ())]
    found = [b for b in every if isinstance(b, kind) and (names is None or b.name in names.split(","))]
    return tuple(sorted(found, key=lambda b: -b.priority))


def backends_for(kind: type[B], package: str = "hone.model.backends", entry: str = "backend") -> tuple[B, ...]:
    """The backends of this kind that the environment does not switch off, the one to ask first before the others."""
    return find(kind, package, entry, os.environ.get(CHOICE))


@contextmanager
def second_order() -> Iterator[None]:
    """Inside, layers and attention are plain operations: those of a backend have no second gradient (TRPO)."""
    _second_order[0] += 1
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _second_order[0] -= 1


def differentiates_once() -> bool:
    """Whether nobody differentiates gradients again."""
    return not _second_order[0]
