"""Inputs of a recorded pass: tensors that stay where they are and receive each batch's numbers."""

from collections.abc import Hashable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from hone.model.decoder import Mask
from hone.model.ragged import Rows
from hone.model.spans import Spans, Tiles

T = TypeVar("T", Spans, Tiles)


def size_of(x: Tensor, mask: Mask) -> Hashable:
    """What has to be equal for one recording to serve two batches: lists of a round size have as many tiles."""
    rows = (type(mask.by), len(mask.spans.start), mask.window) if isinstance(mask, Rows) else ()
    return (*x.shape, *rows)


class Still:
    """x [1, U, D], positions and rows."""

    def __init__(self, x: Tensor, positions: Tensor | None, mask: Mask, *, grad: bool) -> None:
        self.x = torch.empty_like(x).detach().requires_grad_(grad)
        self.positions = None if positions is None else torch.empty_like(positions)
        self.mask: Mask = mask
        if isinstance(mask, Rows) and isinstance(mask.by, Tiles):
            self.mask = replace(mask, spans=_alike(mask.spans), by=_alike(mask.by), asked=None)

    @torch.no_grad()
    def take(self, x: Tensor, positions: Tensor | None, mask: Mask) -> None:
        """This batch's numbers."""
        self.x.copy_(x)
        if self.positions is not None and positions is not None:
            self.positions.copy_(positions)
        if isinstance(self.mask, Rows) and isinstance(mask, Rows) and isinstance(mask.by, Tiles):
            torch._foreach_copy_(list(_tensors(self.mask)), list(_tensors(mask)))  # pyright: ignore
        else:
            self.mask = mask


def _alike(x: T) -> T:
    """The same fields in memory of their own."""
    return replace(x, **{f.name: torch.empty_like(getattr(x, f.name)) for f in fields(x)})


def _tensors(rows: Rows) -> Iterator[Tensor]:
    return (getattr(x, f.name) for x in (rows.spans, rows.by) for f in fields(x))
