"""A list of tokens filled up to a round size with rows that nobody reads, so that few sizes come up again and again.

Shapes: U tokens in the list, S cells of all rows, R rows.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.even import Even, rounded
from hone.model.ragged import Rows
from hone.model.varlen import Spans

FINEST = 64  # tokens
SHARE = 32  # a list is filled up by at most one part in so many


def round_size(tokens: int) -> int:
    """The least round number of tokens that holds so many."""
    return rounded(tokens, parts=SHARE, finest=FINEST)


def up(n: int, step: int) -> int:
    """n, or the next multiple of `step`."""
    return -(-n // step) * step


def filled(tokens_1U: Tensor, positions_1U: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
    """Tokens, positions and rows of a round size; the tokens that are added stand in rows of their own."""
    U = tokens_1U.numel()
    more = round_size(U) - U
    if not more:
        return tokens_1U, positions_1U, rows
    device = tokens_1U.device
    tokens = F.pad(tokens_1U, (0, more))
    if isinstance(rows.spans, Even):
        return tokens, F.pad(positions_1U, (0, more)), replace(rows, spans=rows.spans.filled(more))
    width = min(more, rows.spans.most_queries)
    widths = [width] * (more // width) + [more % width] * (more % width > 0)
    added = torch.arange(U, U + more, device=device, dtype=rows.cells.dtype)
    positions = torch.cat([positions_1U, ((added - U) % width)[None]], -1)
    return tokens, positions, Rows(
        cells=torch.cat([rows.cells, added]),
        shapes=(*rows.shapes, *((1, w) for w in widths)),
        owner=torch.cat([rows.owner, added - U + len(rows.cells)]),
        spans=_more_spans(rows.spans, added, torch.tensor(widths, device=device).cumsum(0).int()),
        window=rows.window,
    )  # fmt: skip


def _more_spans(spans: Spans, added: Tensor, ends: Tensor) -> Spans:
    """With one row more for each end, made of the added tokens."""
    cells = len(spans.cells)
    place = added - added[0]
    return replace(
        spans,
        cells=torch.cat([spans.cells, added.int()]),
        order=torch.cat([spans.order, (place + cells).int()]),
        begin=torch.cat([spans.begin, spans.begin[-1] + place.int() + 1]),
        queries=torch.cat([spans.queries, spans.queries[-1] + ends]),
        keys=torch.cat([spans.keys, spans.keys[-1] + ends]),
    )
