"""The memory that a recorded pass reads: inputs at a fixed address, into which each batch is copied, and leaves that
replace the weights during the recording. Lists of tokens are padded to a round size, so that there are few sizes.

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
    """What must be equal for two batches to use one recording. Lists of the same round size have as many tiles."""
    rows = (type(mask.by), len(mask.spans.start), mask.window) if isinstance(mask, Rows) else ()
    return (*x.shape, *rows)


class GraphInputs:
    """x [1, U, D], positions and rows."""

    def __init__(self, x: Tensor, positions: Tensor | None, mask: Mask, *, grad: bool) -> None:
        self.x = torch.empty_like(x).detach().requires_grad_(grad)
        self.positions = None if positions is None else torch.empty_like(positions)
        self.mask: Mask = mask
        if isinstance(mask, Rows) and isinstance(mask.by, Tiles):
            self.mask = replace(mask, spans=_empty_like(mask.spans), by=_empty_like(mask.by), needed=None)

    @torch.no_grad()
    def take(self, x: Tensor, positions: Tensor | None, mask: Mask) -> None:
        """Copy a batch into the inputs."""
        self.x.copy_(x)
        if self.positions is not None and positions is not None:
            self.positions.copy_(positions)
        if isinstance(self.mask, Rows) and isinstance(mask, Rows) and isinstance(mask.by, Tiles):
            torch._foreach_copy_(list(_tensors(self.mask)), list(_tensors(mask)))  # pyright: ignore
        else:
            self.mask = mask


def _empty_like(x: T) -> T:
    """Empty tensors of the same shapes."""
    return replace(x, **{f.name: torch.empty_like(getattr(x, f.name)) for f in fields(x)})


def _tensors(rows: Rows) -> Iterator[Tensor]:
    return (getattr(x, f.name) for x in (rows.spans, rows.by) for f in fields(x))


class GraphWeights:
    """Leaves that share the weights' memory: autograd remembers on which stream it first used a weight itself."""

    def __init__(self, decoder: Decoder) -> None:
        self.places = list[tuple[nn.Module, str, nn.Parameter, Tensor]]()
        made = dict[nn.Parameter, Tensor]()
        for module in (*decoder.model.layers.modules(), decoder.model.norm):
            for name, p in module.named_parameters(recurse=False):
                leaf = made.setdefault(p, p.detach().requires_grad_(p.requires_grad))
                self.places.append((module, name, p, leaf))
        self.trained = [(p, leaf) for p, leaf in made.items() if p.requires_grad]

    @contextmanager
    def substitute(self) -> Iterator[None]:
        """Inside, the decoder computes with the leaves."""
        try:
            for module, name, _, leaf in self.places:
                module._parameters[name] = leaf  # pyright: ignore[reportArgumentType]
            yield
        finally:
            for module, name, p, _ in self.places:
                module._parameters[name] = p


def pad_to_size(tokens_1U: Tensor, positions_1U: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
    """Tokens, positions and rows of a round size; the added tokens are in rows that nothing reads."""
    U = tokens_1U.numel()
    more = round_size(U) - U
    if not more:
        return tokens_1U, positions_1U, rows
    tokens, positions = F.pad(tokens_1U, (0, more)), F.pad(positions_1U, (0, more))
    if isinstance(rows.by, Tiles):  # their spans have room for the added tokens
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
    """The spans with one more row of each width."""
    ends = spans.start[-1] + widths.cumsum(0).int()
    return Spans(
        start=torch.cat([spans.start, ends]),
        prefix=torch.cat([spans.prefix, ends - widths.int()]),
        common=F.pad(spans.common, (0, len(widths))),
    )
