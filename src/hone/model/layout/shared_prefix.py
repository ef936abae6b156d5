"""A table laid out as one list of tokens: no padding, and what the rows of a group have in common only once.

A token's hidden state depends on the tokens before it and on nothing else, so the rows of a group share those of their
prompt: eight answers to a question cost one reading of it, forward and backward.
"""

import numpy as np
import torch
from torch import Tensor

from hone.model.backends.fused import shared_attention
from hone.model.decoder import Decoder
from hone.model.layout import forward
from hone.model.layout.forward import Lines, lay_out
from hone.model.layout.grouped import Grouped, Ints
from hone.model.layout.ragged import Rows, Tables
from hone.model.layout.spans import Spans, tiled
from hone.model.second_order import once
from hone.types import Batch

LAYOUTS = (*forward.LAYOUTS, "shared")


def lines_of(batch: Batch, decoder: Decoder, *, layout: str, line: int | None = None) -> Lines:
    """The batch as the decoder is fed it; one that takes no lists gets rows with their padding instead of sharing."""
    at, device = batch.host, batch.targets.device
    if layout != "shared" or not decoder.takes_lists:
        how = {} if layout == "shared" else {"layout": layout, "line": line}
        return lay_out(at.inputs, at.real, **how).to(device)  # pyright: ignore[reportArgumentType]
    return lay_out_shared(at.inputs, at.real, at.group, kernels=by_kernels(decoder, device)).to(device)


def by_kernels(decoder: Decoder, device: torch.device) -> bool:
    """Whether rows are attended to by kernels of our own, which have no second gradient."""
    dtype = decoder.computes_in or decoder.model.embed_tokens.weight.dtype
    return once() and shared_attention.usable(device, dtype, decoder.config.head_dim)


def lay_out_shared(inputs: Tensor, real: Tensor, group: Tensor, *, kernels: bool = False) -> Lines:
    """One line of all different tokens; without kernels a table that it would not shorten is laid out as it is."""
    there, tokens = real.cpu().numpy(), inputs.cpu().numpy()
    lengths = there.sum(-1)
    B, W = len(there), int(lengths.max()) if len(there) else 0
    filled = np.arange(there.shape[1]) < lengths[:, None]
    straight = np.array_equal(filled, there)
    if not straight:
        compact = np.zeros_like(tokens)
        compact[filled] = tokens[there]  # both go row by row, left to right
        tokens = compact
    rows = Grouped.of(tokens, lengths, group.cpu().numpy())
    if not rows.tokens or (rows.tokens == B * W and not kernels):
        return lay_out(inputs, real)
    cells = np.maximum(rows.cells(B, there.shape[1]), 0).astype(np.int64)
    if not straight:
        cells = np.where(there, np.take_along_axis(cells, (there.cumsum(-1) - 1).clip(min=0), 1), 0)
    return Lines(
        tokens=torch.from_numpy(tokens.ravel()[rows.each(np.arange(B) * tokens.shape[1])])[None],
        slot=torch.from_numpy(cells),
        real=real.cpu(),
        longest=W,
        positions=torch.from_numpy(rows.each(np.zeros_like(lengths)))[None],
        mask=_in_tiles(rows) if kernels else _in_tables(rows),
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


def _in_tiles(rows: Grouped) -> Rows:
    """The rows shared out among a GPU's programs."""
    spans, tiles = tiled(rows)
    return Rows(spans=spans, by=tiles)


def _in_tables(rows: Grouped) -> Rows:
    """The rows' cells put together by length."""
    lengths, place, end = rows.lengths.tolist(), np.zeros_like(rows.lengths), 0
    cells, parts, shapes = rows.cells(len(lengths), max(lengths)), list[Ints](), list[tuple[int, int]]()
    for chosen in tables(lengths):
        n, W = len(chosen), lengths[chosen[0]]
        parts.append(np.maximum(cells[chosen, :W], 0).ravel())
        place[chosen] = np.arange(n) * W + end
        shapes.append((n, W))
        end += n * W
    flat, owner = np.concatenate(parts).astype(np.int64), rows.each(place)
    by = Tables(cells=torch.from_numpy(flat), shapes=tuple(shapes), owner=torch.from_numpy(owner))
    return Rows(spans=Spans.of(rows), by=by)
