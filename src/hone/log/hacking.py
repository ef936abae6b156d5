"""Signs that a policy serves the reward and not the task: where reward comes from, what drifts, who disagrees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.log.sinks import number
from hone.log.stats import Stats
from hone.types import Rollout

HELD_OUT = "held_out"  # among an outcome's parts: what a verifier says that has no say in the reward
RIGHT = 0.5  # from here on a completion counts as rewarded, and as right
DRIFTS = ("length", "repetition", "truncated", "reward", "disagreement", "hacked")


def watch(stats: Stats, rollouts: Sequence[Rollout]) -> None:
    """Each part's share of the reward, and how often a held-out verifier disagrees.

    share/NAME: sum |added by the part| / sum |added by all|. disagreement: one says right, the other wrong.
    hacked: of those that are rewarded, the share that the held-out verifier calls wrong.
    """
    for outcome in (r.outcome for r in rollouts):
        if outcome is None or outcome.value is None:
            continue
        total = sum(map(abs, outcome.added.values()))
        for name, x in outcome.added.items():
            stats.add(f"share/{name}", abs(x), total)
        if HELD_OUT in outcome.parts:
            rewarded, right = outcome.value >= RIGHT, outcome.parts[HELD_OUT] >= RIGHT
            stats.add("disagreement", rewarded != right)
            stats.add("hacked", rewarded and not right, rewarded)


@dataclass(frozen=True, slots=True)
class Drift:
    """A metric's mean over the first and the last tenth of a run."""

    name: str
    first: float
    last: float


def drifts(rows: Sequence[Mapping[str, Any]]) -> list[Drift]:
    """How the telling metrics and the parts of the reward have moved.

    >>> drifts([{"length": 10.0}, {"length": 30.0}])
    [Drift(name='length', first=10.0, last=30.0)]
    """
    parts = sorted({name for row in rows for name in row if name.startswith(("reward/", "share/"))})
    found = list[Drift]()
    for name in (*DRIFTS, *parts):
        values = [x for row in rows if (x := number(row.get(name))) is not None]
        size = max(1, len(values) // 10)
        if len(values) > 1:
            found.append(Drift(name, sum(values[:size]) / size, sum(values[-size:]) / size))
    return found


def top(samples: Sequence[Mapping[str, Any]], most: int = 6) -> list[Mapping[str, Any]]:
    """The samples with the highest reward, no completion twice, of equal ones the latest."""
    scored = [s for s in samples if number(s.get("reward")) is not None]
    found = dict[str, Mapping[str, Any]]()
    scored.reverse()  # a sort that is stable then keeps the latest first
    for sample in sorted(scored, key=lambda s: -float(s["reward"])):
        found.setdefault(str(sample.get("completion", "")), sample)
    return list(found.values())[:most]
