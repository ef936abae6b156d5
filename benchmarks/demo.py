"""The demo's promises, on three seeds: GRPO lifts held-out accuracy by 25 points, PPO and DPO lift it, in 6 minutes.

Each seed runs in a process of its own, as a user runs it. --quick runs one seed of a shorter journey and checks only
that every stage works and how long it takes.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.form import Row, main, row

SEEDS = (0, 1, 2)


def journey(seed: int, out: Path, *, quick: bool) -> tuple[dict, float]:
    """`hone demo` with this seed: its table and its wall-clock seconds."""
    command = [sys.executable, "-m", "hone", "demo", "--seed", str(seed), "--out", str(out)]
    start = time.perf_counter()
    subprocess.run([*command, *(["--quick"] if quick else [])], check=True, stdout=sys.stderr)
    return json.loads((out / "table.json").read_text()), time.perf_counter() - start


def rows_of(table: dict, seconds: float, seed: int, *, quick: bool) -> list[Row]:
    """The promises of one seed."""
    done, memory = table["done"], table["machine"]["peak_memory_mib"]
    accuracy = {stage: 100 * done[stage]["marks"]["accuracy"] for stage in ("sft", "grpo", "ppo", "dpo")}
    found = [
        row(f"seed {seed}: seconds", seconds, unit="s", goal="<= 360", ok=seconds <= 360),
        row(f"seed {seed}: peak memory", memory, unit="MiB", goal="< 2048", ok=memory < 2048),
    ]
    if quick:
        return found
    for stage, least in (("grpo", 25.0), ("ppo", 0.0), ("dpo", 0.0)):
        lift = accuracy[stage] - accuracy["sft"]
        goal = f">= {least:g}" if least else "> 0"
        ok = lift >= least if least else lift > 0
        name = f"seed {seed}: {stage} over sft"
        found.append(row(name, lift, unit="points of held-out accuracy", goal=goal, ok=ok))
    return found


def measure(quick: bool) -> list[Row]:
    """All seeds, one after the other."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS[: 1 if quick else None]:
            table, seconds = journey(seed, Path(folder) / str(seed), quick=quick)
            found += rows_of(table, seconds, seed, quick=quick)
            print(json.dumps(found[-5:]), file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
