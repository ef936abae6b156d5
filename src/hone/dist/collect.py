"""Sums over ranks. With one process each is the identity, so the learner has one code path."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world() -> tuple[int, int]:
    """(rank, number of ranks)"""
    return (dist.get_rank(), dist.get_world_size()) if _many() else (0, 1)


def total(x: Tensor) -> Tensor:
    """The sum of x over ranks, on every rank; x itself is left alone."""
    if not _many():
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x


def total_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over ranks: weights already carry the global denominators."""
    if not _many():
        return
    for p in parameters:
        if p.grad is None:  # a rank without rows takes part all the same
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)


def gather(item: object) -> list[object]:
    """Every rank's plain Python object, in order of rank."""
    if not _many():
        return [item]
    items: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items
