"""A table laid out as one list of tokens: no padding, and what the rows of a group have in common only once.

A token's hidden state depends on the tokens before it and on nothing else, so the rows of a group share those of their
prompt: eight answers to a question cost one reading of it, forward and backward.
"""

import numpy as np
import torch
from torch import Tensor

from hone.model import forward
from hone.model.decoder import Decoder
from hone.model.even import Even
from hone.model.forward import Lines, lay_out
from hone.model.grouped import Grouped, Ints
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
    return lay_out_shared(at.inputs, at.real, at.group, evenly=_evenly(decoder, device)).to(device)


def _evenly(decoder: Decoder, device: torch.device) -> bool:
    """Whether rows of about one length are attended to in one table: its kernels add in no fixed order."""
    if any(decoder.config.windows):
        return False
    if decoder.even_rows is not None:
        return decoder.even_rows
    half = decoder.model.embed_tokens.weight.dtype in (torch.bfloat16, torch.float16)
    return half and device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()


def lay_out_shared(inputs: Tensor, real: Tensor, group: Tensor, *, evenly: bool = False) -> Lines:
    """One line of all different tokens; a table that it would not shorten is laid out with its padding.

    evenly: rows of about one length are to be attended to in one table.
    """
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
    if not 0 < rows.tokens < B * W:
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
        mask=_in_one(even) if evenly and (even := Even.of(rows)) else _in_tables(rows),
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


def _in_one(even: Even) -> Rows:
    """All rows in the table that they are attended to in."""
    none = even.cells[:0]
    return Rows(cells=none, shapes=(even.shape,), owner=none, spans=even)


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
    return Rows(
        cells=torch.from_numpy(np.concatenate(parts).astype(np.int64)),
        shapes=tuple(shapes),
        owner=torch.from_numpy(rows.each(place)),
        spans=Spans.of(rows, cells[cells >= 0]),
    )
