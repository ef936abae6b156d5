"""Rewards that take their time and fail: when too many have for the step to count, the others are not waited for."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from hone.types import Outcome

SECONDS = 2.0  # until then all are waited for: quick failures are told in full


class Enough(Exception):
    """More outcomes are invalid than may be; `outcomes` are those."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(f"{len(outcomes)} outcomes are invalid")
        self.outcomes = outcomes


@dataclass(slots=True, kw_only=True)
class Watch:
    """One part's outcomes of one call, as they come."""

    room: float  # the most that may be invalid
    late: Callable[[str], None]  # is told of one that took too long
    since: float = field(default_factory=time.monotonic)
    bad: list[Outcome] = field(default_factory=list[Outcome])

    def __call__(self, outcomes: Sequence[Outcome], *, late: bool) -> None:
        """Enough where waiting for the others cannot help."""
        self.bad += [outcome for outcome in outcomes if not outcome.valid]
        if late:
            self.late(outcomes[0].reason)
        if len(self.bad) > self.room and time.monotonic() - self.since >= SECONDS:
            raise Enough(self.bad)


_limit: ContextVar[tuple[float, Callable[[str], None]] | None] = ContextVar("limit", default=None)


@contextmanager
def limited(room: float, late: Callable[[str], None]) -> Iterator[None]:
    """Within it, in this thread, so many outcomes of each call may be invalid."""
    token = _limit.set((room, late))
    try:
        yield
    finally:
        _limit.reset(token)


def watch() -> Watch | None:
    """For a call that begins here; None where nobody has set a limit."""
    limit = _limit.get()
    return None if limit is None else Watch(room=limit[0], late=limit[1])
