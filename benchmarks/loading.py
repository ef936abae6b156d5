"""Loading the real 135M model: seconds and peak memory against transformers, each in a process of its own.

Both load float32 onto the CPU and then read four tokens, so that weights which are only mapped are really there.
CPU seconds are the ones to trust where the machine is shared.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.form import Row, main, row
from hone.errors import HoneError
from hone.model.formats.cache import resolve

NAME = "smollm2-135m"
BEGIN = """
import resource, sys, time
import torch
torch.set_num_threads(1)
def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
folder, ids = sys.argv[1], torch.tensor([[19556, 28, 905, 30]])
"""
END = """
import json
seconds, cpu = time.perf_counter() - start, time.process_time() - begun
print(json.dumps({"seconds": seconds, "cpu": cpu, "megabytes": megabytes() - before, "sum": float(sum_of)}))
"""
OURS = """
from hone.data.text.tokenizer import Tokenizer
from hone.model.formats.folder import load_decoder
before, start, begun = megabytes(), time.perf_counter(), time.process_time()
model, tokenizer = load_decoder(folder), Tokenizer.load(folder)
with torch.no_grad():
    sum_of = model.lm_head(model(ids)).abs().sum()
"""
THEIRS = """
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
before, start, begun = megabytes(), time.perf_counter(), time.process_time()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
with torch.no_grad():
    sum_of = model(ids).logits.abs().sum()
"""


def once(program: str, folder: Path) -> dict[str, float]:
    """One loading in a fresh interpreter; memory is what the peak grew by after the imports."""
    command = [sys.executable, "-c", BEGIN + program + END, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(quick: bool) -> Sequence[Row]:
    """Medians over loadings that take turns, after one of each that warms the disk."""
    try:
        folder = resolve(NAME)
    except HoneError as error:
        raise SystemExit(f"{error} (`make real-model`)") from error
    programs = {"ours": OURS, "theirs": THEIRS}
    first = {name: once(program, folder) for name, program in programs.items()}
    if abs(first["ours"]["sum"] / first["theirs"]["sum"] - 1) > 1e-4:
        raise SystemExit("the two loaded different models: their logits differ")
    rounds = [{name: once(p, folder) for name, p in programs.items()} for _ in range(3 if quick else 9)]

    def median(name: str, what: str) -> float:
        return round(statistics.median(r[name][what] for r in rounds), 3)

    found = ((median("ours", w), median("theirs", w)) for w in ("seconds", "cpu", "megabytes"))
    seconds, cpu, memory = found
    weights = (folder / "model.safetensors").stat().st_size / 2**20
    return [
        row("load", seconds[0], unit="s", goal="no slower", ok=seconds[0] <= 1.05 * seconds[1], peer=seconds[1]),
        row("load, one core", cpu[0], unit="CPU s", goal="no slower", ok=cpu[0] <= 1.05 * cpu[1], peer=cpu[1]),
        row("peak memory", memory[0], unit="MiB", goal="no more", ok=memory[0] <= 1.05 * memory[1], peer=memory[1]),
        row(
            "peak over weights", round(memory[0] / weights, 3), unit="x", goal="below 1.3", ok=memory[0] < 1.3 * weights
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
