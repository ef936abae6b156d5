"""One trajectory computed by several processes over gloo, each with its own share of the rows."""

from collections.abc import Iterable

import apart
from ways import CASES, Trajectory, Way, trajectory


def by_ranks(ranks: int, ways: dict[str, Way], names: Iterable[str] = CASES) -> dict[tuple[str, str], list[Trajectory]]:
    """(case, way) -> the trajectory as each rank saw it; one start of the processes for all of them."""
    found = apart.by_ranks(ranks, trajectories, ways, list(names))
    return {key: [by_rank[key] for by_rank in found] for key in found[0]}


def trajectories(ways: dict[str, Way], names: list[str]) -> dict[tuple[str, str], Trajectory]:
    """What one rank computes."""
    return {(name, each): trajectory(CASES[name], way) for name in names for each, way in ways.items()}
