"""The processes that torchrun starts, as the ranks of one run."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from hone.errors import HoneError

POLL_SECONDS = 0.02  # seconds between two looks at who has come
LOST = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")


def started_as() -> tuple[int, int]:
    """(rank, number of ranks) by what torchrun says of this process; (0, 1) where it did not start it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join_ranks(device: str = "auto") -> Iterator[None]:
    """Inside, the processes of torchrun are ranks of one group. A process that torchrun did not start stays alone."""
    if started_as()[1] == 1 or dist.is_initialized():
        yield
        return
    gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if gpu:
        _take_gpu(device)
    try:
        store, rank, ranks = next(rendezvous("env://"))
        store = fresh_store(store, rank, ranks)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=ranks)
    except (ValueError, RuntimeError) as error:
        raise HoneError(f"the ranks do not find each other ({error}): start them with torchrun") from error
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in LOST):
            raise HoneError("another rank has ended, and this one cannot go on alone: see what it said") from error
        raise
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def fresh_store(store: Any, rank: int, ranks: int) -> Any:
    """A part of the store that only these processes have written to.

    When torchrun restarts ranks, they get the store of the ranks before. Nobody answers at the addresses in it, and the
    ranks would wait half an hour (PyTorch's issue 135712). The nodes do not agree on how often ranks were started.
    So each rank asks under a random word of its own. Rank 0 answers every word that it sees, old ones too, with the
    name of the new part. It goes on until every rank has written to that part.
    """
    word = uuid.uuid4().hex
    if rank:
        store.set(f"hone/asked/{rank}", word)
        part = PrefixStore(store.get(f"hone/answer/{word}").decode(), store)
        part.set(f"came/{rank}", "")
        return part
    part, missing = PrefixStore(word, store), set(range(1, ranks))
    end = time.monotonic() + store.timeout.total_seconds()
    while missing := {other for other in missing if not part.check([f"came/{other}"])}:
        if time.monotonic() > end:
            raise RuntimeError(f"rank {min(missing)} has not come")
        for asked in (f"hone/asked/{other}" for other in missing):
            if store.check([asked]):
                store.set(f"hone/answer/{store.get(asked).decode()}", word)
        time.sleep(POLL_SECONDS)
    return part


def _take_gpu(device: str) -> None:
    """Each rank of a machine has a GPU of its own."""
    if ":" in device:
        raise HoneError(f"train.device is {device} for every rank: leave the number out, each takes a GPU of its own")
    here, there_are = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if here >= there_are:
        raise HoneError(f"rank {here} of this machine finds {there_are} GPUs: start as many with --nproc-per-node")
    torch.cuda.set_device(here)
