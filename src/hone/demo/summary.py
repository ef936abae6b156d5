"""What the journey shows at its end: the table, the samples, the machine."""

import os
import platform
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hone.algo.select import reward_of
from hone.demo.stages import ORDER, STARTS
from hone.log import sinks
from hone.log.progress import duration
from hone.storage import names
from hone.types import Group

NAMES = {
    "pretrain": "pre-training",
    "sft": "SFT",
    "reward": "reward model",
    "grpo": "GRPO with a verifier",
    "ppo": "PPO with the reward model",
    "dpo": "DPO on preference pairs",
}
SHOWN = 6  # problems whose answers are shown through the stages


def rows(done: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a stage. The reward model answers no problems, so its row has only seconds."""
    return [
        {
            "stage": NAMES[stage],
            **({"start": NAMES[STARTS[stage]]} if stage in STARTS else {}),
            **{key: done[stage].get("marks", {}).get(key) for key in ("accuracy", "greedy", "format", "length", "kl")},
            "seconds": done[stage]["train_seconds"],
        }
        for stage in ORDER
        if stage in done
    ]


def show(table: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """The table on the terminal."""
    # 79 columns: a table that wraps cannot be read
    shown = Table(title="Held-out problems, never seen in any stage", box=SIMPLE, padding=0)
    for heading in ("stage", "accuracy", "greedy", "format", "length", "KL from SFT", "seconds"):
        shown.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    for row in table:
        shares = [_cell(row[key], lambda x: f"{100 * x:.1f} %") for key in ("accuracy", "greedy", "format")]
        others = _cell(row["length"], "{:.1f}".format), _cell(row["kl"], "{:z.3f}".format)
        shown.add_row(row["stage"], *shares, *others, f"{row['seconds']:.0f}")
    (console or Console()).print(shown)


def _cell(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)


def time_taken(table: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """How long the whole took, beside the stages of the table.

    >>> time_taken([{"seconds": 70.0}, {"seconds": 5.0}], 100.0)
    'The whole took 1:40: 1:15 in the stages above, the rest for data, preference pairs and the held-out problems.'
    """
    stages = duration(sum(row["seconds"] for row in table))
    rest = "the rest for data, preference pairs and the held-out problems"
    return f"The whole took {duration(seconds)}: {stages} in the stages above, {rest}."


def curves(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Each stage's metrics by step."""
    files = {NAMES[stage]: out / stage / names.METRICS for stage in ORDER}
    return {name: sinks.read(path) for name, path in files.items() if path.is_file()}


def samples_of(groups: Sequence[Group], stage: str) -> list[dict[str, Any]]:
    """The first answer to each of the first problems, to be compared between stages."""
    return [
        {
            "stage": NAMES[stage],
            "problem": r.task.prompt if r.task else "",
            "prompt": r.task.prompt if r.task else "",
            "completion": r.text,
            "answer": r.task.answer if r.task else "",
            "correct": reward_of(r) == 1,
            "reward": reward_of(r),
            "length": sum(r.mask),
            "stop": str(r.stop),
        }
        for r in (g[0] for g in groups[:SHOWN])
    ]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peak_memory_mib": _peak_memory() // 1024,
    }


def _peak_memory() -> int:
    """KiB at most, of this process or the one of its children that had most."""
    status, children = Path("/proc/self/status"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if status.is_file():  # ru_maxrss would begin with the peak of the process that has started this one
        own = re.search(r"^VmHWM:\s+(\d+)", status.read_text(), re.M)
        return max(int(own[1]) if own else 0, children)
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, children)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
