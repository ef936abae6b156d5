"""Inputs of a recorded pass: tensors that stay where they are and receive each batch's numbers.

Shapes: U tokens in a list, R rows, S keys of all rows; all rounded up.
"""

from collections.abc import Hashable
from dataclasses import fields, replace

import torch
from torch import Tensor

from hone.model.decoder import Mask
from hone.model.even import Even
from hone.model.filled import round_size, up
from hone.model.ragged import Rows
from hone.model.varlen import Spans

ROWS, LENGTH = 64, 128  # to multiples of which rows and their lengths are rounded up


def size_of(x: Tensor, mask: Mask) -> Hashable:
    """What has to be equal for one recording to serve two batches."""
    if not isinstance(mask, Rows):
        return tuple(x.shape)
    s = mask.spans
    if isinstance(s, Even):
        return (*x.shape, s.shape)
    most = up(s.most_queries, LENGTH), up(s.most_keys, LENGTH)
    return (*x.shape, up(len(s.queries), ROWS), round_size(len(s.cells)), *most, s.shares, mask.window)


class Still:
    """x [1, U, D], positions and rows."""

    def __init__(self, x: Tensor, positions: Tensor | None, mask: Mask, *, grad: bool) -> None:
        self.x = torch.empty_like(x).detach().requires_grad_(grad)
        self.positions = None if positions is None else torch.empty_like(positions)
        self.mask: Mask = mask
        if isinstance(mask, Rows) and x.is_cuda:
            self.mask = replace(mask, spans=_roomy(mask.spans), cells=mask.cells[:0], owner=mask.owner[:0], shapes=())

    @torch.no_grad()
    def take(self, x: Tensor, positions: Tensor | None, mask: Mask) -> None:
        """This batch's numbers."""
        self.x.copy_(x)
        if self.positions is not None and positions is not None:
            self.positions.copy_(positions)
        if isinstance(self.mask, Rows) and isinstance(mask, Rows) and x.is_cuda:
            _fill(self.mask.spans, mask.spans)
        else:
            self.mask = mask


def _roomy(spans: Spans | Even) -> Spans | Even:
    """The same fields with room for more rows and keys."""
    if isinstance(spans, Even):
        return replace(spans, **{name: torch.zeros_like(x) for name, x in spans.tensors().items()})
    rows, keys = up(len(spans.queries), ROWS), round_size(len(spans.cells))
    sizes = {"cells": keys, "order": keys, "begin": len(spans.begin), "queries": rows, "keys": rows}
    made = {name: getattr(spans, name).new_zeros(n) for name, n in sizes.items()}
    most = {"most_queries": up(spans.most_queries, LENGTH), "most_keys": up(spans.most_keys, LENGTH)}
    return replace(spans, **made, **most)


def _fill(still: Spans | Even, spans: Spans | Even) -> None:
    """Rows past the last have no tokens; cells past the last are read and used by nobody."""
    for name in (f.name for f in fields(spans)):
        old, new = getattr(still, name), getattr(spans, name)
        if isinstance(old, Tensor):
            old[: len(new)].copy_(new)
            if name in ("queries", "keys"):
                old[len(new) :].copy_(new[-1:])
