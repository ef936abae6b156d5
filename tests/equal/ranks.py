"""One trajectory computed by several processes over gloo, each with its own share of the rows."""

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from safetensors.torch import load_file, save_file
from ways import CASES, Trajectory, Way, trajectory


def by_ranks(ranks: int, ways: dict[str, Way], names: Iterable[str] = CASES) -> dict[tuple[str, str], list[Trajectory]]:
    """(case, way) -> the trajectory as each rank saw it; one start of the processes for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_work, args=(ranks, ways, list(names), folder, sys.path), nprocs=ranks)  # pyright: ignore
        found = [_read(Path(folder) / str(rank)) for rank in range(ranks)]
    return {key: [by_rank[key] for by_rank in found] for key in found[0]}


def _work(rank: int, ranks: int, ways: dict[str, Way], names: list[str], folder: str, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    metrics: dict[str, Any] = {}
    weights = dict[str, torch.Tensor]()
    for name in names:
        for way_name, way in ways.items():
            done = trajectory(CASES[name], way)
            metrics[f"{name}|{way_name}"] = done.metrics
            weights |= {f"{name}|{way_name}|{i:03}": w for i, w in enumerate(done.weights)}
    dist.destroy_process_group()
    save_file(weights, f"{folder}/{rank}.safetensors")
    Path(f"{folder}/{rank}.json").write_text(json.dumps(metrics))


def _read(stem: Path) -> dict[tuple[str, str], Trajectory]:
    metrics = json.loads(stem.with_suffix(".json").read_text())
    weights = load_file(stem.with_suffix(".safetensors"))
    found = dict[tuple[str, str], Trajectory]()
    for key, logged in metrics.items():
        name, way = key.split("|")
        found[name, way] = Trajectory([weights[k] for k in sorted(weights) if k.startswith(f"{key}|")], logged)
    return found
