"""What a reward function returned becomes an outcome: a number with its parts, or invalid with a reason.

Whatever is no finite number is invalid, and never zero.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from hone.types import Outcome


def invalid(reason: str) -> Outcome:
    """No number, for this reason."""
    plain = reason.encode("utf-8", "replace").decode()  # half a surrogate pair can be neither printed nor stored
    return Outcome(value=None, reason=" ".join(plain.split())[:300])


def commonest(outcomes: Iterable[Outcome]) -> tuple[str, int, int]:
    """Of the invalid ones the most frequent reason, how often it is given, and how many there are."""
    reasons = Counter(outcome.reason for outcome in outcomes if not outcome.valid)
    reason, times = reasons.most_common(1)[0] if reasons else ("", 0)
    return reason, times, reasons.total()


def crashed(error: BaseException) -> Outcome:
    """No number, for it raised."""
    try:
        said = str(error)
        return invalid(f"{type(error).__name__}: {said}" if said else type(error).__name__)
    except Exception:  # an exception whose own text cannot be written
        return invalid(type(error).__name__)


def finite(value: Any) -> float | None:
    """The number a value stands for, or None: text and infinities are no numbers."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def to_outcome(value: Any) -> Outcome:
    """What a reward function returned, as an outcome: number, parts to be summed, Outcome, else invalid."""
    if isinstance(value, float | int) and math.isfinite(value):  # as most are: the rest takes longer to tell apart
        return Outcome(value=float(value))
    if isinstance(value, Mapping):
        return _from_parts(value)
    if isinstance(value, Outcome):
        if not value.valid:
            return value if value.reason else replace(value, reason="the reward gave no reason")
        bad = [name for name, part in {**value.parts, **value.added}.items() if finite(part) is None]
        number = finite(value.value)
        if number is None or bad:
            return invalid(f"the reward returned an Outcome of {value.value!r} with parts {dict(value.parts)!r}")
        return replace(value, value=number)
    number = finite(value)
    if number is None:
        return invalid(f"the reward returned {type(value).__name__} {value!r}, expected a finite number")
    return Outcome(value=number)


def _from_parts(parts: Mapping[Any, Any]) -> Outcome:
    numbers = {str(name): finite(part) for name, part in parts.items()}
    good = {name: number for name, number in numbers.items() if number is not None}
    if not parts or len(good) < len(parts):
        return invalid(f"the reward returned the parts {dict(parts)!r}, expected finite numbers")
    return to_outcome(Outcome(value=math.fsum(good.values()), parts=good, added=good))
