"""Cases that need processes of their own: Triton's interpreter is chosen before Triton is imported, and ranks are
processes."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "hone.checkpoint.state",
)  # once for all ranks: they take seconds


def started(*arguments: str, cwd: Path | None = None) -> None:
    """Python on one thread, which finds the modules of this folder."""
    found = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    subprocess.run([sys.executable, *arguments], check=True, cwd=cwd, env=environment)


def written_by(program: Path, path: Path) -> Path:
    """The file that the program wrote to this path."""
    started(str(program), str(path))
    return path


def by_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What work(*args) gave on each of so many ranks over gloo.

    They are forks of a process that has computed nothing: where there is a GPU, autograd refuses to run in others.
    """
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    with short_names():
        get_temp_dir()  # of the forkserver's socket: it is made once
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            _rank, args=(ranks, folder, work, args), nprocs=ranks, start_method="forkserver"
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


@contextmanager
def short_names() -> Iterator[None]:
    """Temporary files in /tmp: the path of a socket has at most 107 characters, and TMPDIR may have more."""
    before, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    found = work(*args)
    dist.barrier()  # a rank that is gone would break the connections of one that is slower
    dist.destroy_process_group()
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
