"""How fast a corpus is cleaned: MB/s a core of every step, one worker against two, and rensa against plain numpy."""

import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.form import Row, main, row
from benchmarks.side_by_side import in_turns
from hone.data.corpus import duplicates
from hone.data.corpus.pipeline import clean
from hone.data.corpus.settings import CorpusSettings

PLAY = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare" / "input.txt"
STEPS = ("read", "language", "quality", "toxicity", "exact", "near", "overlap")
FLOOR = 0.2  # MB/s a core: a terabyte in about two months of one core, a day on 64


def source_words() -> list[str]:
    """Shakespeare where it lies beside the repository, else words drawn as unevenly as language uses them."""
    if PLAY.is_file():
        return PLAY.read_text(encoding="utf-8").split()
    draw = random.Random(0)
    kinds = ["the", "of", "and", "to", "that", "with"] + [
        "".join(draw.choices("etaoinshrdlu", k=draw.randrange(3, 9))) for _ in range(8000)
    ]
    return draw.choices(kinds, weights=[1 / (k + 1) for k in range(len(kinds))], k=200_000)


def write_corpus(path: Path, size: int) -> None:
    """Documents of 500 words from anywhere in the text, one in five with some words changed: no two alike."""
    words, draw = source_words(), random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            start = draw.randrange(len(words) - 500)
            part = words[start : start + 500]
            if draw.random() < 0.2:
                part = [draw.choice(words) if draw.random() < 0.3 else word for word in part]
            lines = (" ".join(part[i : i + 10]) for i in range(0, 500, 10))
            file.write("\n".join(lines) + "\n\n")


def numpy_signatures(texts: Sequence[str], permutations: int) -> None:
    """The same work without a library: hash every run, then a linear hash for each permutation."""
    draw = np.random.default_rng(0)
    a, b = (draw.integers(1, 2**63, permutations, dtype=np.uint64) for _ in range(2))
    for text in texts:
        runs = duplicates.shingles(text, 5)
        hashed = np.array([hash(run) & (2**64 - 1) for run in runs], dtype=np.uint64)
        ((hashed[:, None] * a + b) >> np.uint64(32)).min(axis=0)


def measure(quick: bool) -> list[Row]:
    """Processor seconds for the steps, the clock's for the workers."""
    size = 3_000_000 if quick else 24_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        write_corpus(path, size)
        texts = path.read_text(encoding="utf-8").split("\n\n")
        evals = Path(folder) / "eval.txt"
        evals.write_text("\n".join(" ".join(t.split()[:60]) for t in texts[:1000:5]), encoding="utf-8")
        settings = CorpusSettings(evals=(str(evals),), shard_bytes=size // 8)
        clocks: list[float] = []
        for workers in (1, 2):
            began = time.perf_counter()
            report = clean([str(path)], Path(folder) / str(workers), settings, workers=workers)
            clocks.append(time.perf_counter() - began)
        speeds = {step: report["speed"][step]["mb_per_second"] for step in STEPS}
    rows = [
        row(f"corpus {step}", speed, unit="MB/s a core", goal=f">= {FLOOR}", ok=speed >= FLOOR)
        for step, speed in speeds.items()
    ]
    whole = 1 / sum(s["seconds"] / (report["bytes"] / 1e6) for s in report["speed"].values())
    rows.append(row("corpus all steps", whole, unit="MB/s a core", goal=f">= {FLOOR}", ok=whole >= FLOOR))
    gain = clocks[0] / clocks[1]
    # The clock counts what others do on the cores, so the load goes with the number.
    unit = f"times, at load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    rows.append(row("corpus 2 workers over 1", gain, unit=unit, goal=">= 1.2", ok=gain >= 1.2))
    some = texts[:200]
    megabytes = sum(len(text.encode()) for text in some) / 1e6
    sides = {
        "rensa": lambda: duplicates.signatures(some, shingle=5, permutations=128),
        "numpy": lambda: numpy_signatures(some, 128),
    }
    taken = in_turns(sides, repeats=3, clock=time.process_time)
    ours, peer = megabytes / taken["rensa"], megabytes / taken["numpy"]
    rows.append(row("MinHash, rensa over numpy", ours, peer=peer, unit="MB/s", goal=">= numpy", ok=ours >= peer))
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__ or ""))
