"""From a padded table to hidden states and back. Only this module knows of packing and shared prompts.

A token's hidden state depends only on the tokens up to it, so the rows of a group share those of their prompt. The
prompt of eight answers is computed once, forward and backward.
Shapes: B rows and T columns of the table, L lines of W slots for the decoder, N chosen positions, D hidden.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hone.errors import HoneError
from hone.model.backends.registry import Backend, backends_for
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder, Mask
from hone.model.rows import GroupedRows, Ints, Rows, Spans, Tables, make_tiles, row_attention
from hone.types import Batch, to_device

LAYOUTS = ("padded", "packed", "shared")
LINE = 512  # slots of a packed line, unless a row is longer
SHARE = 0.7  # of the free memory that activations may take; logits, gradients and temporary tensors need the rest
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The decoder's input, and the place of each cell of the table in it."""

    tokens: Tensor  # int64 [L, W]  0 in empty slots, so that padding ids are never looked up
    slot: Tensor  # int64 [B, T]  index into L * W; 0 on padding
    real: Tensor  # bool  [B, T]
    longest: int  # tokens of the longest row
    positions: Tensor | None = None  # int64 [L, W]  None: they count up from the left
    mask: Mask = None  # bool  [L, 1, W, W]  None: causal; Rows: of a list

    def gather(self, x_LWD: Tensor, at_N: Tensor) -> Tensor:
        """The hidden states of the chosen cells of the table, [N, D]; at_N: from `cells`."""
        return x_LWD.flatten(0, 1)[self.slot.flatten()[at_N]]

    def to(self, device: torch.device) -> "Lines":
        """A copy on the device, which may still be in transfer."""
        return move_record(self, device)

    def spread(self, x_LW: Tensor) -> Tensor:
        """One number per slot -> [B, T], 0 on padding."""
        return torch.where(self.real, x_LW.flatten()[self.slot], 0.0)


def move_record(x: Any, device: torch.device) -> Any:
    """The record with its tensors, and those of records in it, on the device."""
    if isinstance(x, Tensor):
        return to_device(x, device)
    if not is_dataclass(x):
        return x
    return replace(x, **{f.name: move_record(getattr(x, f.name), device) for f in fields(x)})  # pyright: ignore


def first_fit_decreasing(lengths: list[int], width: int) -> tuple[list[int], list[int]]:
    """The line and first slot of each row: longest rows first, each into the first line with room."""
    line, start, used = [0] * len(lengths), [0] * len(lengths), list[int]()
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if not lengths[row]:
            continue
        fits = (i for i, filled in enumerate(used) if filled + lengths[row] <= width)
        at = next(fits, len(used))
        if at == len(used):
            used.append(0)
        line[row], start[row] = at, used[at]
        used[at] += lengths[row]
    return line, start


def lay_out(inputs: Tensor, real: Tensor, *, layout: str = "padded") -> Lines:
    """Lines without the padding before tokens: "padded" one row a line, "packed" several rows in lines of LINE slots.

    A row longer than LINE makes all lines as long. A table without real tokens gives one empty slot, so that a forward
    pass still reaches every parameter.
    """
    if layout not in ("padded", "packed"):
        raise HoneError(f'unknown layout "{layout}": use one of {", ".join(LAYOUTS)}')
    lengths = real.sum(-1).tolist()
    longest = max(lengths, default=0)
    if layout == "padded":
        lines, starts = list(range(len(lengths))), [0] * len(lengths)
    else:
        lines, starts = first_fit_decreasing(lengths, max(longest, LINE))
    shape = (max(lines, default=0) + 1, max([s + n for s, n in zip(starts, lengths, strict=True)] + [1]))

    rank = real.cumsum(-1) - 1  # index in the row; meaningless on padding
    origin = torch.tensor([at * shape[1] + s for at, s in zip(lines, starts, strict=True)], dtype=torch.long)
    slot = torch.where(real, origin.to(real.device)[:, None] + rank, 0)

    def place(x_BT: Tensor) -> Tensor:
        empty = x_BT.new_zeros(shape[0] * shape[1])
        return empty.index_put((slot[real],), x_BT[real]).view(shape)

    if not any(starts):  # no line is shared: causal is enough
        return Lines(tokens=place(inputs), slot=slot, real=real, longest=longest)
    row = torch.arange(1, len(lengths) + 1, device=real.device)[:, None].expand_as(slot)
    return Lines(
        tokens=place(inputs),
        slot=slot,
        real=real,
        longest=longest,
        positions=place(rank),
        mask=block_causal(place(row)),
    )


def block_causal(document_LW: Tensor) -> Tensor:
    """True where a slot attends: to the same document, not to later slots. Empty slots are a document of their own."""
    W = document_LW.shape[1]
    same = document_LW[:, :, None] == document_LW[:, None, :]
    return (same & torch.ones(W, W, dtype=torch.bool, device=same.device).tril())[:, None]


def lines_of(batch: Batch, decoder: Decoder, *, layout: str) -> Lines:
    """The batch in this layout. A decoder that takes no rows gets padded lines in the place of shared ones."""
    at, device = batch.host, batch.targets.device
    if layout != "shared" or not decoder.takes_rows:
        return lay_out(at.inputs, at.real, layout="padded" if layout == "shared" else layout).to(device)
    return lay_out_shared(at.inputs, at.real, at.group, kernels=has_row_kernels(decoder, device)).to(device)


def has_row_kernels(decoder: Decoder, device: torch.device) -> bool:
    """Whether a backend has attention kernels for the decoder's rows. They have no second gradient."""
    dtype = decoder.compute_dtype or decoder.model.embed_tokens.weight.dtype
    return row_attention(device, dtype, decoder.config.head_dim) is not None


def lay_out_shared(inputs: Tensor, real: Tensor, group: Tensor, *, kernels: bool = False) -> Lines:
    """One line in which a shared prefix is there once. Without kernels, a table with nothing to share stays padded."""
    is_real, tokens = real.cpu().numpy(), inputs.cpu().numpy()
    lengths = is_real.sum(-1)
    B, W = len(is_real), int(lengths.max()) if len(is_real) else 0
    left_aligned = np.arange(is_real.shape[1]) < lengths[:, None]
    is_left_aligned = np.array_equal(left_aligned, is_real)
    if not is_left_aligned:
        compact = np.zeros_like(tokens)
        compact[left_aligned] = tokens[is_real]  # both go row by row, left to right
        tokens = compact
    rows = GroupedRows.of(tokens, lengths, group.cpu().numpy())
    if not rows.tokens or (rows.tokens == B * W and not kernels):
        return lay_out(inputs, real)
    cells = np.maximum(rows.cells(B, is_real.shape[1]), 0).astype(np.int64)
    if not is_left_aligned:
        cells = np.where(is_real, np.take_along_axis(cells, (is_real.cumsum(-1) - 1).clip(min=0), 1), 0)
    return Lines(
        tokens=torch.from_numpy(tokens.ravel()[rows.each(np.arange(B) * tokens.shape[1])])[None],
        slot=torch.from_numpy(cells),
        real=real.cpu(),
        longest=W,
        positions=torch.from_numpy(rows.each(np.zeros_like(lengths)))[None],
        mask=_as_tiles(rows) if kernels else _as_tables(rows),
    ).to(inputs.device)


def rows_by_length(lengths: list[int]) -> list[list[int]]:
    """The rows with tokens, longest first, in groups where each row is at least 3/4 as long as the longest."""
    found = list[list[int]]()
    for row in sorted((r for r, n in enumerate(lengths) if n), key=lambda r: -lengths[r]):
        if found and 4 * lengths[row] >= 3 * lengths[found[-1][0]]:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _as_tiles(rows: GroupedRows) -> Rows:
    """The rows split into tiles for GPU kernels."""
    spans, tiles = make_tiles(rows)
    return Rows(spans=spans, by=tiles)


def _as_tables(rows: GroupedRows) -> Rows:
    """The rows in tables of rows of similar length."""
    lengths, place, end = rows.lengths.tolist(), np.zeros_like(rows.lengths), 0
    cells, parts, shapes = rows.cells(len(lengths), max(lengths)), list[Ints](), list[tuple[int, int]]()
    for chosen in rows_by_length(lengths):
        n, W = len(chosen), lengths[chosen[0]]
        parts.append(np.maximum(cells[chosen, :W], 0).ravel())
        place[chosen] = np.arange(n) * W + end
        shapes.append((n, W))
        end += n * W
    flat, owner = np.concatenate(parts).astype(np.int64), rows.each(place)
    by = Tables(cells=torch.from_numpy(flat), shapes=tuple(shapes), owner=torch.from_numpy(owner))
    return Rows(spans=Spans.of(rows), by=by)


def activation_numbers(config: DecoderConfig) -> int:
    """Numbers that a layer keeps for each token: two residual streams, queries, keys, values, the output of attention,
    gate and up."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return 2 * config.hidden_size + heads * config.head_dim + 2 * config.intermediate_size


def exceeds_memory(decoder: Decoder, tokens: int) -> bool:
    """Whether the activations of so many tokens take more than SHARE of a GPU's free memory; never on a CPU."""
    weight, config = decoder.model.embed_tokens.weight, decoder.config
    needed = tokens * config.num_hidden_layers * activation_numbers(config) * weight.element_size()
    return needed > SHARE * _free(weight.device)


def _free(device: torch.device) -> float:
    """Bytes; a CPU's memory is not bounded here."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory - torch.cuda.memory_allocated(device)


class PassBackend(Backend):
    """Computes a whole call of the decoder, for example by replaying a recorded one."""

    def covers(self, decoder: Decoder, lines: Lines) -> str | None:
        """The reason why it cannot compute this pass, or None if it can."""
        raise NotImplementedError

    def hidden_states(self, decoder: Decoder, lines: Lines) -> Tensor:
        """[L, W, D]; there may be further slots at the end of a list, which are padding."""
        raise NotImplementedError


class Streams(Backend):
    """Runs passes without gradients in parallel."""

    def covers(self, device: torch.device) -> str | None:
        """The reason why it has no streams on this device, or None if it has."""
        raise NotImplementedError

    def run(
        self, passes: Iterable[Callable[[], T]], device: torch.device, tensors: Callable[[T], Iterable[Tensor]]
    ) -> list[T]:
        """The results of the passes, in their order."""
        raise NotImplementedError


def run_passes(
    passes: Iterable[Callable[[], T]], device: torch.device, tensors: Callable[[T], Iterable[Tensor]]
) -> list[T]:
    """The results of the passes, in their order; in parallel if a backend can. tensors: those of a result."""
    for backend in backends_for(Streams):
        if backend.covers(device) is None:
            return backend.run(passes, device, tensors)
    return [one() for one in passes]


def hidden_states(decoder: Decoder, lines: Lines, *, checkpoint_layers: bool | None = False) -> Tensor:
    """[L, W, D]; checkpoint_layers: recompute layers in the backward pass; None: where memory is short"""
    context = decoder.config.max_position_embeddings
    if lines.longest > context:
        raise HoneError(
            f"a row has {lines.longest} tokens, the model's context is {context}: "
            "shorten it, or use a model with a longer context"
        )
    if checkpoint_layers is None:
        checkpoint_layers = decoder.takes_rows and exceeds_memory(decoder, lines.tokens.numel())
    if decoder.takes_rows and not checkpoint_layers:
        for backend in backends_for(PassBackend):
            if backend.covers(decoder, lines) is None:
                return backend.hidden_states(decoder, lines)
    return decoder(lines.tokens, positions=lines.positions, mask=lines.mask, checkpoint_layers=checkpoint_layers)


def cells(where: Tensor, device: torch.device | None = None) -> Tensor:
    """The indices of the True cells of a table [B, T], row by row, [N]; device: where to put them"""
    return to_device(where.flatten().nonzero().squeeze(1), device or where.device)


def scatter(x_N: Tensor, at_N: Tensor, like_BT: Tensor) -> Tensor:
    """The inverse of `Lines.gather` for one number per cell: [N] -> [B, T], 0 elsewhere."""
    return x_N.new_zeros(like_BT.numel()).index_copy(0, at_N, x_N).view(like_BT.shape)
