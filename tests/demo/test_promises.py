"""What the README promises of `make demo`, on each seed: minutes each, so `make test-slow` runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo import SEEDS

ROOT = Path(__file__).parents[2]
JOURNEY = """
import json, sys
from pathlib import Path
from benchmarks.demo import journey, rows_of
seed = int(sys.argv[1])
table, seconds = journey(seed, Path(sys.argv[2]), quick=False)
print(json.dumps(rows_of(table, seconds, seed, quick=False)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_method_lifts_held_out_accuracy(tmp_path: Path, seed: int) -> None:
    """In a process of its own: the memory of other tests and of their children is not the demo's."""
    command = [sys.executable, "-c", JOURNEY, str(seed), str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [f"{row['name']} {row['ours']:.1f}, goal {row['goal']}" for row in rows if not row["ok"]] == []
