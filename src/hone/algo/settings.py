"""The range of every numeric setting, by name. A factory may have ranges of its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import ParamSpec, get_args, get_type_hints

from hone.algo.table import Algorithm
from hone.errors import HoneError

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from low to high, each end included or not."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low itself is left out
    below: bool = False  # high itself is left out

    def __contains__(self, x: float) -> bool:
        return (x > self.low if self.above else x >= self.low) and (x < self.high if self.below else x <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        high = f"{'below' if self.below else 'at most'} {self.high:g}"
        ends = [low] * math.isfinite(self.low) + [high] * math.isfinite(self.high)
        return " and ".join(ends) or "a finite number"


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1)

RANGES: dict[str, Range] = {
    "gamma": SHARE, "lam": SHARE, "decay": Range(0, 1, below=True), "smoothing": Range(0, 0.5, below=True),
    "clip": POSITIVE, "low": POSITIVE, "high": POSITIVE, "value_clip": POSITIVE, "max_ratio": POSITIVE,
    "dual": Range(1, above=True), "delta": POSITIVE, "damping": NOT_NEGATIVE, "cg_steps": Range(1),
    "backtracks": Range(1), "beta": NOT_NEGATIVE, "kl_target": POSITIVE, "value": NOT_NEGATIVE,
    "entropy": NOT_NEGATIVE, "max_tokens": NOT_NEGATIVE, "limit": NOT_NEGATIVE, "margin": NOT_NEGATIVE,
    "threshold": Range(), "keep": NOT_NEGATIVE, "centre": NOT_NEGATIVE, "good": NOT_NEGATIVE, "bad": NOT_NEGATIVE,
    "odds": NOT_NEGATIVE, "top_k": NOT_NEGATIVE,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Range]] = {}  # algorithm -> ranges of its own


def allowed(algorithm: str, name: str) -> Range | None:
    """The range of a setting; None if it is not a number."""
    return SPECIAL.get(algorithm, {}).get(name, RANGES.get(name))


def with_ranges(**special: Range) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Let a factory refuse numbers outside their range and name its algorithm; `special`: ranges of its own."""

    def decorate(factory: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        ranges, hints = {**RANGES, **special}, get_type_hints(factory)
        SPECIAL[factory.__name__] = special

        @wraps(factory)
        def build(*args: P.args, **settings: P.kwargs) -> Algorithm:
            for name, value in settings.items():
                if hints.get(name) is bool and not isinstance(value, bool):
                    raise HoneError(f"{factory.__name__}: {name} is {value!r}: it must be True or False")
                if name in ranges and not _fits(value, hints.get(name), ranges[name]):
                    whole = "a whole number, " if hints.get(name) is int else ""
                    raise HoneError(f"{factory.__name__}: {name} is {value!r}: it must be {whole}{ranges[name]}")
            return replace(factory(*args, **settings), name=factory.__name__)

        return build

    return decorate


def _fits(value: object, hint: object, allowed: Range) -> bool:
    if value is None:
        return type(None) in get_args(hint)
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        return False
    return math.isfinite(value) and value in allowed
