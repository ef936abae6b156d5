"""What the README promises of `make demo`, on each seed: minutes each, so `make test-slow` runs them."""

from pathlib import Path

import pytest

from benchmarks.demo import SEEDS, journey, rows_of


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_method_lifts_held_out_accuracy(tmp_path: Path, seed: int) -> None:
    table, seconds = journey(seed, tmp_path / "demo", quick=False)
    missed = [
        f"{row['name']} {row['ours']:.1f}, goal {row['goal']}"
        for row in rows_of(table, seconds, seed, quick=False)
        if not row["ok"]
    ]
    assert not missed
