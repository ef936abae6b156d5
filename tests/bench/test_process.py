"""What benchmarks/process.py claims: a mean gain beyond 2.92 standard errors of three seeds."""

from pathlib import Path

import pytest

from benchmarks.process import CLAIMS, Bench, claims


def benches(gains: list[float]) -> list[Bench]:
    """Seeds whose every method is so much better than what it has to beat."""
    made = [Bench(Path(), Path(), Path(), seed=n, quick=True) for n in range(len(gains))]
    for bench, gain in zip(made, gains, strict=True):
        for peer in {peer for _, _, peer in CLAIMS}:
            bench.found[peer] = 10.0
        for ours in {ours for _, ours, _ in CLAIMS} - bench.found.keys():
            bench.found[ours] = 10.0 + gain
    return made


@pytest.mark.parametrize(
    ("gains", "met"), [([1.0, 2.0, 3.0], True), ([0.0, 2.0, 4.0], False), ([-1.0, -1.0, -1.0], False)]
)
def test_a_gain_counts_beyond_the_seeds_spread(gains: list[float], met: bool) -> None:
    # errors of the mean: 1 / sqrt(3) and 2 / sqrt(3), times 2.92: 1.69 and 3.37
    row = next(r for r in claims(benches(gains)) if "afterwards" in r["name"])
    assert (row["ours"], row["ok"]) == (pytest.approx(sum(gains) / 3), met)
    assert row["seeds"] == gains


def test_one_seed_claims_nothing() -> None:
    assert {(r["goal"], r["ok"]) for r in claims(benches([-5.0]))} == {(None, True)}
