"""A batch in parts: minibatches, a step each, of the rows of all ranks; micro-batches, what memory holds at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hone.dist import collect
from hone.types import ABSENT, Batch

CACHE = 4096  # tokens: with more at once a CPU's caches hold too little of them, and each takes longer
BUNDLED = 16_384  # tokens that are only read, where layers take them a bundle at a time: threads share many more evenly


def fitting(longest: int, *, rows: int, tokens: int, device: torch.device, most: int = CACHE) -> int:
    """How many rows of so many tokens are computed at once: `rows`, or what `tokens` hold; on a CPU `most` tokens."""
    fit = tokens // max(1, longest) if tokens else rows
    return max(1, min(fit, most // max(1, longest)) if device.type == "cpu" else fit)


def micro_batches(batch: Batch, *, rows: int, tokens: int = 0, unit: int = 1, divisor: int = 1) -> Iterator[Batch]:
    """Slices of at most about `rows` rows, longest first so that padding is little and memory peaks at once.

    With `tokens`, slices of as many rows as that many tokens hold, padding included, and at least one unit: rows of
    a unit (a preference pair) stay together. Weights are columns by now, so any cut gives the same gradient.
    divisor: by how much slices are smaller than that.
    """
    length = batch.host.real.sum(-1).view(-1, unit).amax(-1)
    units = length.argsort(descending=True, stable=True)
    index = (units[:, None] * unit + torch.arange(unit, device=units.device)).flatten()
    start, widths = 0, length[units].tolist()
    while start < len(index):
        longest = widths[start // unit]  # the first of a slice is its longest
        fit = fitting(longest, rows=rows, tokens=tokens, device=batch.mask.device)
        size = max(1, fit // divisor // unit) * unit
        yield batch.rows(index[start : start + size])
        start += size


def mini_batches(batch: Batch, *, count: int, unit: int, seed: int) -> Iterator[Batch]:
    """The iteration's rows, shuffled by `seed`, in `count` nearly equal parts: one optimiser step each.

    The parts are cut from the rows of all ranks, so that each step learns from the same rows whatever their number.
    """
    return iter((batch,)) if count == 1 else map(batch.rows, parts(batch, count=count, unit=unit, seed=seed))


def parts(batch: Batch, *, count: int, unit: int, seed: int) -> list[Tensor]:
    """The numbers of each part's rows here."""
    rows = collect.count(len(batch))
    here = torch.full((rows,), -1)  # where each row of all ranks lies on this one
    mine = torch.arange(len(batch))
    here[mine if batch.place is ABSENT else batch.host.place.cpu()] = mine
    order = torch.randperm(rows // unit, generator=torch.Generator().manual_seed(seed))
    found = [here[(part[:, None] * unit + torch.arange(unit)).flatten()] for part in order.tensor_split(count)]
    return [index[index >= 0] for index in found]
