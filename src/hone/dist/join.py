"""The processes that torchrun starts, as the ranks of one run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hone.errors import HoneError

LOST = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")


def started_as() -> tuple[int, int]:
    """(rank, number of ranks) by what torchrun says of this process; (0, 1) where it did not start it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(device: str = "auto") -> Iterator[None]:
    """Inside, the processes of torchrun are ranks that wait for each other; a process alone stays alone."""
    if started_as()[1] == 1 or dist.is_initialized():
        yield
        return
    gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if gpu:
        _take_gpu(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    except (ValueError, RuntimeError) as error:
        raise HoneError(f"the ranks do not find each other ({error}): start them with torchrun") from error
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in LOST):
            raise HoneError("another rank has ended, and this one cannot go on alone: see what it said") from error
        raise
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def _take_gpu(device: str) -> None:
    """Each rank of a machine has a GPU of its own."""
    if ":" in device:
        raise HoneError(f"train.device is {device} for every rank: leave the number out, each takes a GPU of its own")
    here, there_are = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if here >= there_are:
        raise HoneError(f"rank {here} of this machine finds {there_are} GPUs: start as many with --nproc-per-node")
    torch.cuda.set_device(here)
