"""Shares and sums over ranks. With one process a share is everything and a sum the number itself, so the learner has
one code path."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hone.errors import HoneError, Unsaved

T = TypeVar("T")


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world() -> tuple[int, int]:
    """(rank, number of ranks)"""
    return (dist.get_rank(), dist.get_world_size()) if _many() else (0, 1)


def share(n: int) -> slice:
    """This rank's part of n things that every rank knows: contiguous, nearly equal, perhaps empty."""
    rank, ranks = world()
    return slice(rank * n // ranks, (rank + 1) * n // ranks)


def places(sizes: Sequence[int]) -> list[int]:
    """The numbers of this rank's rows among all ranks', as one rank alone would count them.

    sizes: its rows in each round; within a round they are counted rank by rank, for shares are contiguous.
    """
    rank, _ = world()
    found, first = list[int](), 0
    for by_rank in zip(*cast(list[Sequence[int]], gather(list(sizes))), strict=True):
        start = first + sum(by_rank[:rank])
        found += range(start, start + by_rank[rank])
        first += sum(by_rank)
    return found


def count(n: int) -> int:
    """The sum of n over ranks."""
    return int(total(torch.tensor(n)))


def largest(n: int) -> int:
    """The largest n of any rank."""
    if not _many():
        return n
    x = torch.tensor(n)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return int(x)


def pad_to_largest(items: Iterable[T], filler: T) -> list[T]:
    """The items, and fillers until every rank has as many."""
    found = list(items)
    return found + [filler] * (largest(len(found)) - len(found))


def total(x: Tensor) -> Tensor:
    """The sum of x over ranks, on every rank; x itself is left alone."""
    if not _many():
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x


def is_sharded(x: Tensor) -> bool:
    """Whether ranks hold parts of it; see dist/spread.py."""
    return hasattr(x, "to_local")


@torch.no_grad()
def local_part(x: Tensor) -> Tensor:
    """This rank's part of it, in its own memory; all of it where it is whole."""
    return cast(Any, x).to_local() if is_sharded(x) else x.detach()


def total_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over ranks: token weights already hold the global denominators.

    Gradients are sent in buckets: a message costs the same for one number as for a million.
    """
    if not _many():
        return
    for bucket in _buckets(parameters):
        for p in bucket:
            if p.grad is None:  # a rank without rows takes part all the same
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        dist.all_reduce(flat)
        for p, summed in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = summed.view_as(p)


def _buckets(parameters: Iterable[torch.nn.Parameter], size: int = 2**24) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters of one dtype in order, about `size` numbers a bucket. Every rank makes the same buckets."""
    bucket, held = list[torch.nn.Parameter](), 0
    for p in parameters:
        if bucket and (held + p.numel() > size or p.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(p)
        held += p.numel()
    if bucket:
        yield bucket


def gather(item: object) -> list[object]:
    """Every rank's plain Python object, in order of rank."""
    if not _many():
        return [item]
    items: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


class RankFailure(Exception):
    """Some rank has failed, and every rank knows it. error: this rank's own error, or one that names the rank."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def agree(error: Exception | None) -> None:
    """Raise the error. If any of several ranks has one, RankFailure on every rank, so that none waits for another."""
    if not _many():
        if error is not None:
            raise error
        return
    if largest(int(error is not None)):
        said = gather("" if error is None else error_text(error))
        rank = next(rank for rank, text in enumerate(said) if text)
        raise RankFailure(error or HoneError(f"rank {rank} could not go on: {said[rank]}")) from error


def error_text(error: Exception) -> str:
    """An error as part of a line: the message of a HoneError, or type and message of another error."""
    return str(error) if isinstance(error, HoneError) else f"{type(error).__name__}: {error}"


def together(do: Callable[[], T]) -> T:
    """The result of `do` on this rank, unless it fails on any rank; see `agree`."""
    if not _many():
        return do()
    try:
        result = do()
    except Exception as error:
        agree(error)
        raise
    agree(None)
    return result


def once(do: Callable[[], T]) -> T | None:
    """The first rank does it while the others wait; they get None. If it fails, every rank gets an error."""
    if not _many():
        return do()
    result, failure = None, None
    if dist.get_rank() == 0:
        try:
            result = do()
        except Exception as error:
            failure = error
    said = gather(str(failure) if failure is not None else "")[0]
    unsaved = gather(isinstance(failure, Unsaved) and failure.elsewhere)[0] if said else False
    if failure is not None:
        raise failure
    if unsaved:
        raise Unsaved(f"the first rank could not save: {said}")
    if said:
        raise HoneError(f"the first rank could not go on: {said}")
    return result
