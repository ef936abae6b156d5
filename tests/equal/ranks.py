"""One trajectory computed by several processes over gloo, each with its own share of the rows."""

from collections.abc import Iterable
from dataclasses import replace

import apart
import pytest
from ways import CASES, Trajectory, Way, alone, furthest, trajectory


def by_ranks(ranks: int, ways: dict[str, Way], names: Iterable[str] = CASES) -> dict[tuple[str, str], list[Trajectory]]:
    """(case, way) -> the trajectory as each rank saw it; one start of the processes for all of them."""
    found = apart.by_ranks(ranks, trajectories, ways, list(names))
    return {key: [by_rank[key] for by_rank in found] for key in found[0]}


def trajectories(ways: dict[str, Way], names: list[str]) -> dict[tuple[str, str], Trajectory]:
    """What one rank computes."""
    return {(name, each): trajectory(CASES[name], way) for name in names for each, way in ways.items()}


def assert_as_alone(name: str, way: Way, seen: list[Trajectory]) -> None:
    """Every rank saw what one process computes that has all rows and weights."""
    one = alone(name, replace(way, shard="none"))
    for each in seen:
        assert furthest(one.weights, each.weights) <= 1e-12, name
        assert [m.keys() for m in each.metrics] == [m.keys() for m in one.metrics], name
        for ours, theirs in zip(one.metrics, each.metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12), name


def assert_alike(name: str, seen: list[Trajectory]) -> None:
    """All ranks hold the same weights to the bit, and log the same."""
    first, *others = seen
    assert all(furthest(first.weights, other.weights) == 0 for other in others), name
    assert all(other.metrics == first.metrics for other in others), name
