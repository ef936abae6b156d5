"""A table laid out as one list of tokens: no padding, and what the rows of a group have in common only once.

A token's hidden state depends on the tokens before it and on nothing else, so the rows of a group share those of their
prompt: eight answers to a question cost one reading of it, forward and backward.
"""

import torch
from torch import Tensor

from hone.model import forward
from hone.model.decoder import Decoder
from hone.model.forward import Lines, lay_out
from hone.model.ragged import Rows
from hone.model.varlen import Spans
from hone.types import Batch

LAYOUTS = (*forward.LAYOUTS, "shared")


def lines_of(batch: Batch, decoder: Decoder, *, layout: str, line: int | None = None) -> Lines:
    """The batch as the decoder is fed it; one that takes no lists gets rows with their padding instead of sharing."""
    at, device = batch.host, batch.targets.device
    if layout != "shared" or not decoder.takes_lists:
        how = {} if layout == "shared" else {"layout": layout, "line": line}
        return lay_out(at.inputs, at.real, **how).to(device)  # pyright: ignore[reportArgumentType]
    return lay_out_shared(at.inputs, at.real, at.group).to(device)


def lay_out_shared(inputs: Tensor, real: Tensor, group: Tensor) -> Lines:
    """One line of all different tokens; a table that it would not shorten is laid out with its padding."""
    lengths = real.sum(-1)
    B, W = len(real), int(lengths.max()) if len(real) else 0
    rank = (real.cumsum(-1) - 1).clamp(min=0)  # place in the row; meaningless on padding
    columns = torch.arange(W, device=real.device)
    filled = columns < lengths[:, None]
    compact = inputs.new_zeros(B, W)
    compact[filled] = inputs[real]  # both go row by row, left to right
    first = leaders(group)
    own = filled & (columns >= _in_common(compact, filled, first)[:, None])
    number = own.flatten().cumsum(0).view(B, W) - 1
    cells = torch.where(own, number, number[first]).where(filled, 0)
    if not 0 < int(own.sum()) < B * W:
        return lay_out(inputs, real)
    return Lines(
        tokens=compact[own][None],
        slot=torch.where(real, cells.gather(1, rank), 0),
        real=real,
        longest=W,
        positions=columns.expand(B, W)[own][None],
        mask=_in_tables(cells, lengths, own, filled),
    )


def tables(lengths: list[int]) -> list[list[int]]:
    """The rows that have tokens, longest first, in tables whose rows fill at least three quarters of the width."""
    found = list[list[int]]()
    for row in sorted((r for r, n in enumerate(lengths) if n), key=lambda r: -lengths[r]):
        if found and 4 * lengths[row] >= 3 * lengths[found[-1][0]]:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _in_tables(cells_BW: Tensor, lengths_B: Tensor, own_BW: Tensor, filled_BW: Tensor) -> Rows:
    """The rows' cells put together by length; `place` is where each cell of [B, W] went."""
    lengths, place = lengths_B.tolist(), torch.zeros_like(cells_BW)
    parts, shapes, end = list[Tensor](), list[tuple[int, int]](), 0
    for rows in tables(lengths):
        n, W = len(rows), lengths[rows[0]]
        index = torch.tensor(rows, device=cells_BW.device)
        parts.append(cells_BW[index, :W].flatten())
        place[index, :W] = torch.arange(end, end + n * W, device=index.device).view(n, W)
        shapes.append((n, W))
        end += n * W
    spans = Spans.of(cells_BW, filled_BW, own_BW, lengths)
    return Rows(cells=torch.cat(parts), shapes=tuple(shapes), owner=place[own_BW], spans=spans)


def leaders(group: Tensor) -> Tensor:
    """The number of the first row of each row's group, [B]"""
    _, of = group.unique(return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    return torch.full_like(rows, len(group)).scatter_reduce(0, of, rows, "amin")[of]


def _in_common(compact: Tensor, filled: Tensor, first: Tensor) -> Tensor:
    """With how many tokens a row begins as its leader does; a leader has none in common with itself, [B]"""
    same = (compact == compact[first]) & filled & filled[first]
    found = same.cumprod(-1).sum(-1)
    return found.where(first != torch.arange(len(first), device=first.device), 0)
