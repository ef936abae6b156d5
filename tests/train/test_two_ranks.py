"""Two processes over gloo, in seconds: one update of a method that whitens, with a critic, is that of one process."""

import tempfile

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.algo import ppo
from hone.data.collate import collate
from hone.train.step import annotate, credited, update, weighed

torch.set_num_threads(1)
SHARES = (slice(0, 3), slice(3, 12))  # uneven, and cut across groups


def updated(share: slice) -> tuple[list[Tensor], float]:
    """The weights after one update on this share of the rows, and the gradient's norm: Adam hides its scale."""
    algo = ppo(entropy=0.1)
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8, dtype=torch.float64), lr=0.01, micro_rows=2)
    batch = annotate(collate(tiny.groups_for(algo)).rows(share), algo, learner)
    stats = update(learner, weighed(credited(batch, algo), algo), algo)
    return tiny.parameters_of(learner), stats.means()["grad_norm"]


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    weights, norm = updated(SHARES[rank])
    dist.destroy_process_group()
    save_file(
        {str(i): w.contiguous() for i, w in enumerate(weights)} | {"norm": torch.tensor(norm)}, f"{folder}/{rank}"
    )


def test_two_ranks_with_uneven_shares_take_the_step_of_one() -> None:
    alone, norm = updated(slice(0, 12))
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(_work, args=(folder,), nprocs=2, start_method="fork")  # pyright: ignore
        found = [load_file(f"{folder}/{rank}") for rank in range(2)]
    for seen in found:
        assert float(seen["norm"]) == pytest.approx(norm, rel=1e-6)
        for i, w in enumerate(alone):
            torch.testing.assert_close(seen[str(i)], w, rtol=0, atol=1e-12)
