"""What a recorded pass reads: inputs that stay where they are and receive each batch's numbers, and leaves in the place
of weights while it is recorded. Lists of tokens are padded to a round size, so that few sizes come up again and again.

Shapes: U tokens in the list, R rows.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.model.decoder import Decoder, Mask
from hone.model.rows import TILE, Rows, Spans, Tables, Tiles, round_size

T = TypeVar("T", Spans, Tiles)


def size_of(x: Tensor, mask: Mask) -> Hashable:
    """What has to be equal for one recording to serve two batches: lists of a round size have as many tiles."""
    rows = (type(mask.by), len(mask.spans.start), mask.window) if isinstance(mask, Rows) else ()
    return (*x.shape, *rows)


class GraphInputs:
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


class GraphWeights:
    """Leaves that share the weights' memory, for autograd remembers on which stream it first met a weight itself."""

    def __init__(self, decoder: Decoder) -> None:
        self.places = list[tuple[nn.Module, str, nn.Parameter, Tensor]]()
        made = dict[nn.Parameter, Tensor]()
        for module in (*decoder.model.layers.modules(), decoder.model.norm):
            for name, p in module.named_parameters(recurse=False):
                leaf = made.setdefault(p, p.detach().requires_grad_(p.requires_grad))
                self.places.append((module, name, p, leaf))
        self.trained = [(p, leaf) for p, leaf in made.items() if p.requires_grad]

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, the decoder computes with them."""
        try:
            for module, name, _, leaf in self.places:
                module._parameters[name] = leaf  # pyright: ignore[reportArgumentType]
            yield
        finally:
            for module, name, p, _ in self.places:
                module._parameters[name] = p


def pad_to_size(tokens_1U: Tensor, positions_1U: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
    """Tokens, positions and rows of a round size; the tokens that are added stand in rows that nobody reads."""
    U = tokens_1U.numel()
    more = round_size(U) - U
    if not more:
        return tokens_1U, positions_1U, rows
    tokens, positions = F.pad(tokens_1U, (0, more)), F.pad(positions_1U, (0, more))
    if isinstance(rows.by, Tiles):  # which have room for them
        return tokens, positions, rows
    device, by = tokens_1U.device, rows.by
    n, rest = divmod(more, TILE)
    added, widths = torch.arange(U, U + more, device=device), [TILE] * n + [rest] * (rest > 0)
    by = Tables(
        cells=torch.cat([by.cells, added]),
        shapes=(*by.shapes, *[(n, TILE)] * (n > 0), *[(1, rest)] * (rest > 0)),
        owner=torch.cat([by.owner, added - U + len(by.cells)]),
    )
    return tokens, positions, replace(rows, by=by, spans=_longer(rows.spans, torch.tensor(widths, device=device)))


def _longer(spans: Spans, widths: Tensor) -> Spans:
    """With one row more of each width."""
    ends = spans.start[-1] + widths.cumsum(0).int()
    return Spans(
        start=torch.cat([spans.start, ends]),
        prefix=torch.cat([spans.prefix, ends - widths.int()]),
        common=F.pad(spans.common, (0, len(widths))),
    )
