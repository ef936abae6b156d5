"""Which rollouts to learn from: [Group] -> [Group], before they become tensors."""

from collections.abc import Callable
from dataclasses import replace

from hone.types import Group, Rollout, Stop

Select = Callable[[list[Group]], list[Group]]


def reward_of(rollout: Rollout) -> float | None:
    """The reward, or None where it is invalid or missing."""
    return rollout.outcome.value if rollout.outcome else None


def _valued(group: Group) -> list[tuple[float, Rollout]]:
    return [(value, r) for r in group if (value := reward_of(r)) is not None]


def everything(groups: list[Group]) -> list[Group]:
    """All of them."""
    return groups


def chain(groups: list[Group], *, stages: tuple[Select, ...]) -> list[Group]:
    """One selection after the other."""
    for stage in stages:
        groups = stage(groups)
    return groups


def varied(groups: list[Group]) -> list[Group]:
    """Drop groups whose valid rewards are all equal: they carry no signal  (DAPO)"""
    return [g for g in groups if len({value for value, _ in _valued(g)}) > 1]


def overlong_penalty(length: int, *, limit: int, margin: int) -> float:
    """0 up to limit-margin tokens, then down in a line to -1 at the limit  (DAPO)

    >>> [overlong_penalty(n, limit=100, margin=20) for n in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    free = limit - margin
    return max(-1.0, min(0.0, (free - length) / margin))


def shape_overlong(groups: list[Group], *, limit: int = 0, margin: int = 0) -> list[Group]:
    """Add the overlong penalty to each valid reward; 0 takes the rollout's own limit, and a fifth of it as margin."""

    def shaped(r: Rollout) -> Rollout:
        if r.outcome is None or r.outcome.value is None:
            return r
        top = limit or r.limit
        penalty = overlong_penalty(sum(r.mask), limit=top, margin=margin or max(1, top // 5))
        parts = {**r.outcome.parts, "overlong": penalty}
        added = {**r.outcome.added, "overlong": penalty}
        return replace(r, outcome=replace(r.outcome, value=r.outcome.value + penalty, parts=parts, added=added))

    return [[shaped(r) for r in g] for g in groups]


def drop_truncated(groups: list[Group]) -> list[Group]:
    """Leave out rollouts that the length limit cut off: they are neither right nor wrong  (DAPO's overlong filter)"""
    kept = [[r for r in g if r.stop is not Stop.LENGTH] for g in groups]
    return [g for g in kept if g]


def verified(groups: list[Group], *, threshold: float = 1.0, keep: int = 0) -> list[Group]:
    """Rows that reach the threshold, each text once, at most `keep` a prompt (0: all)  (expert iteration)"""
    kept: list[Group] = []
    for g in groups:
        passed: dict[tuple[int, ...], Rollout] = {}
        for value, r in _valued(g):
            if value >= threshold:
                passed.setdefault(tuple(r.tokens), r)
        if passed:
            kept.append(list(passed.values())[: keep or None])
    return kept


def best_and_worst(groups: list[Group]) -> list[Group]:
    """A (chosen, rejected) pair from each group with a winner  (online DPO)"""
    pairs: list[Group] = []
    for g in varied(groups):
        ranked = sorted(_valued(g), key=lambda pair: -pair[0])
        pairs.append([ranked[0][1], ranked[-1][1]])
    return pairs
