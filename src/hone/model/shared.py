"""A table laid out as one list of tokens: no padding, and what the rows of a group have in common only once.

A token's hidden state depends on the tokens before it and on nothing else, so the rows of a group share those of their
prompt: eight answers to a question cost one reading of it, forward and backward.
In numpy, on one thread: torch's indexing wakes all of them for a few thousand numbers, and where other work has the
cores each time takes milliseconds.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.model import forward
from hone.model.decoder import Decoder
from hone.model.forward import Lines, lay_out
from hone.model.ragged import Rows
from hone.model.varlen import Spans
from hone.types import Batch

LAYOUTS = (*forward.LAYOUTS, "shared")
Ints, Flags = NDArray[np.int64], NDArray[np.bool_]


def lines_of(batch: Batch, decoder: Decoder, *, layout: str, line: int | None = None) -> Lines:
    """The batch as the decoder is fed it; one that takes no lists gets rows with their padding instead of sharing."""
    at, device = batch.host, batch.targets.device
    if layout != "shared" or not decoder.takes_lists:
        how = {} if layout == "shared" else {"layout": layout, "line": line}
        return lay_out(at.inputs, at.real, **how).to(device)  # pyright: ignore[reportArgumentType]
    return lay_out_shared(at.inputs, at.real, at.group).to(device)


def lay_out_shared(inputs: Tensor, real: Tensor, group: Tensor) -> Lines:
    """One line of all different tokens; a table that it would not shorten is laid out with its padding."""
    there, tokens = real.cpu().numpy(), inputs.cpu().numpy()
    lengths = there.sum(-1)
    B, W = len(there), int(lengths.max()) if len(there) else 0
    rank = (there.cumsum(-1) - 1).clip(min=0)  # place in the row; meaningless on padding
    columns = np.arange(W)
    filled = columns < lengths[:, None]
    compact = np.zeros((B, W), tokens.dtype)
    compact[filled] = tokens[there]  # both go row by row, left to right
    first = leaders(group.cpu().numpy())
    own = filled & (columns >= _in_common(compact, filled, first)[:, None])
    number = own.cumsum().reshape(B, W) - 1
    cells = np.where(filled, np.where(own, number, number[first]), 0)
    if not 0 < own.sum() < B * W:
        return lay_out(inputs, real)
    return Lines(
        tokens=torch.from_numpy(compact[own])[None],
        slot=torch.from_numpy(np.where(there, np.take_along_axis(cells, rank, 1), 0)),
        real=real.cpu(),
        longest=W,
        positions=torch.from_numpy(np.broadcast_to(columns, (B, W))[own])[None],
        mask=_in_tables(cells, lengths, own, filled),
    ).to(inputs.device)


def tables(lengths: list[int]) -> list[list[int]]:
    """The rows that have tokens, longest first, in tables whose rows fill at least three quarters of the width."""
    found = list[list[int]]()
    for row in sorted((r for r, n in enumerate(lengths) if n), key=lambda r: -lengths[r]):
        if found and 4 * lengths[row] >= 3 * lengths[found[-1][0]]:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _in_tables(cells_BW: Ints, lengths_B: Ints, own_BW: Flags, filled_BW: Flags) -> Rows:
    """The rows' cells put together by length; `place` is where each cell of [B, W] went."""
    lengths, place = lengths_B.tolist(), np.zeros_like(cells_BW)
    parts, shapes, end = list[Ints](), list[tuple[int, int]](), 0
    for rows in tables(lengths):
        n, W = len(rows), lengths[rows[0]]
        parts.append(cells_BW[rows, :W].ravel())
        place[rows, :W] = np.arange(end, end + n * W).reshape(n, W)
        shapes.append((n, W))
        end += n * W
    return Rows(
        cells=torch.from_numpy(np.concatenate(parts)),
        shapes=tuple(shapes),
        owner=torch.from_numpy(place[own_BW]),
        spans=Spans.of(cells_BW, filled_BW, own_BW),
    )


def leaders(group: Ints) -> Ints:
    """The number of the first row of each row's group, [B]"""
    _, first, of = np.unique(group, return_index=True, return_inverse=True)
    return first[of]


def _in_common(compact: Ints, filled: Flags, first: Ints) -> Ints:
    """With how many tokens a row begins as its leader does; a leader has none in common with itself, [B]"""
    same = (compact == compact[first]) & filled & filled[first]
    found = np.logical_and.accumulate(same, -1).sum(-1)
    return np.where(first != np.arange(len(first)), found, 0)
