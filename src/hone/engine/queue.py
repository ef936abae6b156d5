"""Requests that wait for a row: those of one prompt together, a queue for each adapter."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from hone.engine.request import Request

SWITCH_AFTER = 64  # launches that a request of another adapter waits before admission stops


@dataclass(slots=True, eq=False)
class Waiting:
    """Requests of one prompt, submitted together."""

    prompt: tuple[int, ...]
    adapter: str | None
    since: int  # the launch at which it came
    requests: dict[int, Request] = field(default_factory=dict[int, Request])


@dataclass(slots=True, eq=False)
class _Line:
    """What waits for one adapter, in order."""

    groups: dict[Waiting, None] = field(default_factory=dict[Waiting, None])
    count: int = 0  # requests in them

    @property
    def first(self) -> Waiting:
        return next(iter(self.groups))


class Queues:
    """First come, first served within an adapter; `adapter` is the one being served."""

    def __init__(self) -> None:
        self.adapter: str | None = None
        self.lines: dict[str | None, _Line] = {}  # none is empty
        self.turned = 0  # the launch at which `adapter` began

    def __len__(self) -> int:
        return sum(line.count for line in self.lines.values())

    @property
    def count(self) -> int:
        """Requests that wait for the adapter being served."""
        return self.lines[self.adapter].count if self.adapter in self.lines else 0

    def add(self, requests: Iterable[Request], now: int) -> dict[int, Waiting]:
        """Put them at the end, those of one prompt together; the group of each."""
        groups: dict[tuple[str | None, tuple[int, ...]], Waiting] = {}
        owner: dict[int, Waiting] = {}
        last: Waiting | None = None
        for request in requests:
            # mostly the group of the request before, which is quickly seen
            if last is None or request.prompt is not last.prompt or request.adapter != last.adapter:
                key = request.adapter, request.prompt
                last = groups.get(key) or groups.setdefault(key, self._begin(request, now))
            last.requests[request.id] = request
            owner[request.id] = last
        for group in groups.values():
            self.lines[group.adapter].count += len(group.requests)
        return owner

    def _begin(self, request: Request, now: int) -> Waiting:
        """A group of its own, at the end of its adapter's line."""
        group = Waiting(request.prompt, request.adapter, now)
        self.lines.setdefault(request.adapter, _Line()).groups[group] = None
        return group

    def leave(self, group: Waiting, ids: Iterable[int]) -> None:
        """These requests of the group wait no more."""
        line = self.lines[group.adapter]
        for number in ids:
            del group.requests[number]
            line.count -= 1
        if not group.requests:
            del line.groups[group]
        if not line.groups:
            del self.lines[group.adapter]

    def ahead(self, most: int) -> Iterator[Waiting]:
        """The groups of the adapter being served, from the first; they may leave meanwhile."""
        line = self.lines.get(self.adapter)
        return iter(list(islice(line.groups, most)) if line else [])

    def overdue(self, now: int) -> bool:
        """Whether another adapter has waited long enough, counted from when this one began: each gets its turn."""
        if len(self.lines) <= (self.adapter in self.lines):
            return False
        others = (line.first.since for adapter, line in self.lines.items() if adapter != self.adapter)
        return now - max(min(others), self.turned) >= SWITCH_AFTER

    def turn(self, now: int) -> bool:
        """Nothing runs: go on with the adapter that has waited longest, if this one is done or has had its turn."""
        if self.adapter in self.lines and not self.overdue(now):
            return False
        others = [line.first for adapter, line in self.lines.items() if adapter != self.adapter]
        if not others:
            return False
        self.adapter, self.turned = min(others, key=lambda group: group.since).adapter, now
        return True
