"""Counts of one shard: what came in, what was dropped by which rule, and how long each step took."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SHOWN = 3  # examples a rule
CUT = 160  # characters of an example


class Tally:
    """The counts of a shard in work. `plain` is the form that is stored."""

    def __init__(self) -> None:
        self.documents = 0
        self.bytes = 0
        self.dropped: dict[str, list[int]] = {}  # rule -> documents, bytes
        self.examples: dict[str, list[dict[str, Any]]] = {}
        self.steps: dict[str, list[float]] = {}  # step -> bytes, processor seconds

    def add_document(self, size: int) -> None:
        """A record was read."""
        self.documents += 1
        self.bytes += size

    def drop(self, rule: str, size: int, **example: Any) -> None:
        """A document was dropped; the first few are shown, with the text cut."""
        counts = self.dropped.setdefault(rule, [0, 0])
        counts[0] += 1
        counts[1] += size
        shown = self.examples.setdefault(rule, [])
        if len(shown) < SHOWN:
            shown.append({**example, "text": example["text"][:CUT]})

    @contextmanager
    def timed(self, step: str, size: int) -> Iterator[None]:
        """Add processor time. Elapsed time would count what others do on the same cores."""
        began = time.process_time()
        yield
        totals = self.steps.setdefault(step, [0, 0.0])
        totals[0] += size
        totals[1] += time.process_time() - began

    def plain(self) -> dict[str, Any]:
        """The tally as JSON."""
        return dict(vars(self))


def merge(into: Tally, values: Mapping[str, Any]) -> None:
    """Add a shard's counts; examples of earlier shards come first."""
    into.documents += values["documents"]
    into.bytes += values["bytes"]
    for name, counts in values["dropped"].items():
        into.dropped[name] = [a + b for a, b in zip(into.dropped.get(name, [0, 0]), counts, strict=True)]
        into.examples[name] = [*into.examples.get(name, []), *values["examples"][name]][:SHOWN]
    for step, counts in values["steps"].items():
        into.steps[step] = [a + b for a, b in zip(into.steps.get(step, [0, 0.0]), counts, strict=True)]
