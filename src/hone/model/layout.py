"""From a padded table to hidden states and back: packing and shared prompts are known here and nowhere else.

A token's hidden state depends on the tokens before it and on nothing else, so the rows of a group share those of their
prompt: eight answers to a question cost one reading of it, forward and backward.
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
from hone.model.rows import Grouped, Ints, Rows, Spans, Tables, row_attention, tiled
from hone.types import Batch, to_device

LAYOUTS = ("padded", "packed", "shared")
LINE = 512  # slots of a packed line, unless a row is longer
SHARE = 0.7  # of the free memory that layers may fill: logits, gradients and what is being computed need the rest
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What the decoder is fed, and where each cell of the table went."""

    tokens: Tensor  # int64 [L, W]  0 in empty slots, so that padding ids are never looked up
    slot: Tensor  # int64 [B, T]  index into L * W; 0 on padding
    real: Tensor  # bool  [B, T]
    longest: int  # tokens of the longest row
    positions: Tensor | None = None  # int64 [L, W]  None: they count up from the left
    mask: Mask = None  # bool  [L, 1, W, W]  None: causal; Rows: of a list

    def gather(self, x_LWD: Tensor, at_N: Tensor) -> Tensor:
        """The chosen cells of the table, [N, D]: see `cells`."""
        return x_LWD.flatten(0, 1)[self.slot.flatten()[at_N]]

    def to(self, device: torch.device) -> "Lines":
        """On the way there."""
        return move_tokens(self, device)

    def spread(self, x_LW: Tensor) -> Tensor:
        """One number per slot -> [B, T], 0 on padding."""
        return torch.where(self.real, x_LW.flatten()[self.slot], 0.0)


def move_tokens(x: Any, device: torch.device) -> Any:
    """A record and the records in it, their tensors sent."""
    if isinstance(x, Tensor):
        return to_device(x, device)
    if not is_dataclass(x):
        return x
    return replace(x, **{f.name: move_tokens(getattr(x, f.name), device) for f in fields(x)})  # pyright: ignore


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
    """Real tokens moved together: "padded" one row a line, "packed" several in lines of LINE slots or more.

    A table without real tokens gives one empty slot, so that a forward pass still reaches every parameter.
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

    rank = real.cumsum(-1) - 1  # place in the row; meaningless on padding
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
    """True where a slot may look: the same document, not later. Empty slots are a document of their own."""
    W = document_LW.shape[1]
    same = document_LW[:, :, None] == document_LW[:, None, :]
    return (same & torch.ones(W, W, dtype=torch.bool, device=same.device).tril())[:, None]


def lines_of(batch: Batch, decoder: Decoder, *, layout: str) -> Lines:
    """The batch as the decoder is fed it; one that takes no lists gets rows with their padding instead of sharing."""
    at, device = batch.host, batch.targets.device
    if layout != "shared" or not decoder.takes_lists:
        return lay_out(at.inputs, at.real, layout="padded" if layout == "shared" else layout).to(device)
    return lay_out_shared(at.inputs, at.real, at.group, kernels=by_kernels(decoder, device)).to(device)


def by_kernels(decoder: Decoder, device: torch.device) -> bool:
    """Whether rows are attended to by kernels of our own, which have no second gradient."""
    dtype = decoder.computes_in or decoder.model.embed_tokens.weight.dtype
    return row_attention(device, dtype, decoder.config.head_dim) is not None


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


def activation_numbers(config: DecoderConfig) -> int:
    """Numbers that a layer keeps for each token: two residual streams, queries, keys and values, what attention made of
    them, gate and up."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return 2 * config.hidden_size + heads * config.head_dim + 2 * config.intermediate_size


def exceeds_memory(decoder: Decoder, tokens: int) -> bool:
    """Whether so many tokens would fill the memory of the GPU that is free; never on a CPU."""
    weight, config = decoder.model.embed_tokens.weight, decoder.config
    needed = tokens * config.num_hidden_layers * activation_numbers(config) * weight.element_size()
    return needed > SHARE * _free(weight.device)


def _free(device: torch.device) -> float:
    """Bytes; what a CPU has is the user's business."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory - torch.cuda.memory_allocated(device)


class PassBackend(Backend):
    """Takes the place of a whole call of the decoder: recorded passes that are replayed."""

    def covers(self, decoder: Decoder, lines: Lines) -> str | None:
        """Why it does not compute this pass; None: it does."""
        raise NotImplementedError

    def hidden_states(self, decoder: Decoder, lines: Lines) -> Tensor:
        """[L, W, D]; a list may have more slots at its end than it was given."""
        raise NotImplementedError


class Streams(Backend):
    """Runs passes without gradients beside each other."""

    def covers(self, device: torch.device) -> str | None:
        """Why it has no streams there; None: it has."""
        raise NotImplementedError

    def run(
        self, passes: Iterable[Callable[[], T]], device: torch.device, tensors: Callable[[T], Iterable[Tensor]]
    ) -> list[T]:
        """What the passes give, in their order."""
        raise NotImplementedError


def run_passes(
    passes: Iterable[Callable[[], T]], device: torch.device, tensors: Callable[[T], Iterable[Tensor]]
) -> list[T]:
    """What the passes give, in their order, beside each other where a backend can; tensors: those of a result."""
    for backend in backends_for(Streams):
        if backend.covers(device) is None:
            return backend.run(passes, device, tensors)
    return [one() for one in passes]


def hidden_states(decoder: Decoder, lines: Lines, *, checkpoint_layers: bool | None = False) -> Tensor:
    """[L, W, D]; checkpoint_layers: layers keep only their inputs for the backward pass; None: where memory is short"""
    context = decoder.config.max_position_embeddings
    if lines.longest > context:
        raise HoneError(
            f"a row has {lines.longest} tokens, the model's context is {context}: "
            "shorten it, or use a model with a longer context"
        )
    if checkpoint_layers is None:
        checkpoint_layers = decoder.takes_lists and exceeds_memory(decoder, lines.tokens.numel())
    if decoder.takes_lists and not checkpoint_layers:
        for backend in backends_for(PassBackend):
            if backend.covers(decoder, lines) is None:
                return backend.hidden_states(decoder, lines)
    return decoder(lines.tokens, positions=lines.positions, mask=lines.mask, checkpoint_layers=checkpoint_layers)


def cells(where: Tensor, device: torch.device | None = None) -> Tensor:
    """The numbers of the True cells of a table [B, T], row by row, [N]; device: where they are read"""
    return to_device(where.flatten().nonzero().squeeze(1), device or where.device)


def scatter(x_N: Tensor, at_N: Tensor, like_BT: Tensor) -> Tensor:
    """The inverse of `Lines.gather` for one number per cell: [N] -> [B, T], 0 elsewhere."""
    return x_N.new_zeros(like_BT.numel()).index_copy(0, at_N, x_N).view(like_BT.shape)
