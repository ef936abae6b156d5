"""Outcomes remembered by content: the same completion of the same task is judged once.

Only for rewards that read one completion and its task; what is invalid is asked for again.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.errors import HoneError
from hone.reward.score import Reward
from hone.types import Outcome, Rollout


@dataclass(frozen=True)
class Cached(Reward):
    """A reward that remembers its last so many outcomes, and calls for equal completions once."""

    inner: Reward = field(kw_only=True)
    size: int = field(kw_only=True)
    known: OrderedDict[bytes | int, Outcome] = field(default_factory=OrderedDict[bytes | int, Outcome], kw_only=True)
    lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        keys = [content(r) or i for i, r in enumerate(rollouts)]
        with self.lock:
            found = {key: self.known[key] for key in keys if key in self.known}
        asked = {key: r for key, r in zip(keys, rollouts, strict=True) if key not in found}
        found |= zip(asked, self.inner(list(asked.values())), strict=True)
        with self.lock:
            for key, outcome in found.items():
                if isinstance(key, bytes) and outcome.valid:
                    self.known[key] = outcome
                    self.known.move_to_end(key)
            while len(self.known) > self.size:
                self.known.popitem(last=False)
        return [found[key] for key in keys]


def content(rollout: Rollout) -> bytes:
    """What stands for a completion and its task; nothing where the task holds what JSON cannot."""
    task = rollout.task
    whole = (rollout.text, None if task is None else (task.prompt, task.answer, task.extra, task.id))
    try:
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).digest()
    except (TypeError, ValueError, RecursionError):
        return b""


def cached(reward: Reward, *, size: int) -> Reward:
    """The same reward with a memory of so many outcomes; none where it is 0."""
    if not size:
        return reward
    if not reward.one_by_one or "rollout" in reward.names:
        raise HoneError(f"reward {reward.name} reads more than one completion and its task: leave out parts.cache")
    return Cached(reward.function, inner=reward, size=size)
