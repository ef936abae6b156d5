"""A list of tokens filled up to a round size with rows that nobody reads, so that few sizes come up again and again.

Shapes: U tokens in the list, R rows.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.ragged import Rows, Tables
from hone.model.spans import TILE, Spans, Tiles, round_size


def filled(tokens_1U: Tensor, positions_1U: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
    """Tokens, positions and rows of a round size; the tokens that are added stand in rows of their own."""
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
