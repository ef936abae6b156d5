"""From a padded table to hidden states and back: packing is known here and nowhere else.

Shapes: B rows and T columns of the table, L lines of W slots for the decoder, N chosen positions, D hidden.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hone.errors import HoneError
from hone.model.backends.fused.cuda_graphs import hidden_by_graph
from hone.model.decoder import Decoder, Mask
from hone.model.layout.recompute import crowded
from hone.types import sent

LAYOUTS = ("padded", "packed")
LINE = 512  # slots of a packed line, unless a row is longer


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
        return moved(self, device)

    def spread(self, x_LW: Tensor) -> Tensor:
        """One number per slot -> [B, T], 0 on padding."""
        return torch.where(self.real, x_LW.flatten()[self.slot], 0.0)


def moved(x: Any, device: torch.device) -> Any:
    """A record and the records in it, their tensors sent."""
    if isinstance(x, Tensor):
        return sent(x, device)
    if not is_dataclass(x):
        return x
    return replace(x, **{f.name: moved(getattr(x, f.name), device) for f in fields(x)})  # pyright: ignore


def wide(x: Tensor) -> Tensor:
    """At least float32: log-probs and values are never kept in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


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


def lay_out(inputs: Tensor, real: Tensor, *, layout: str = "padded", line: int | None = None) -> Lines:
    """Real tokens moved together: "padded" one row a line, "packed" several, at most `line` slots a line.

    A table without real tokens gives one empty slot, so that a forward pass still reaches every parameter.
    """
    if layout not in LAYOUTS:
        raise HoneError(f'unknown layout "{layout}": use "padded" or "packed"')
    lengths = real.sum(-1).tolist()
    longest = max(lengths, default=0)
    if layout == "padded":
        lines, starts = list(range(len(lengths))), [0] * len(lengths)
    else:
        if line is not None and longest > line:
            raise HoneError(f"a row has {longest} tokens, a packed line holds {line}: raise it or shorten the row")
        lines, starts = first_fit_decreasing(lengths, line or max(longest, LINE))
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


def hidden_states(decoder: Decoder, lines: Lines, *, checkpoint_layers: bool | None = False) -> Tensor:
    """[L, W, D]; checkpoint_layers: layers keep only their inputs for the backward pass; None: where memory is short"""
    context = decoder.config.max_position_embeddings
    if lines.longest > context:
        raise HoneError(
            f"a row has {lines.longest} tokens, the model's context is {context}: "
            "shorten it, or use a model with a longer context"
        )
    if checkpoint_layers is None:
        checkpoint_layers = decoder.takes_lists and crowded(decoder, lines.tokens.numel())
    if decoder.takes_lists and not checkpoint_layers:
        hidden = hidden_by_graph(decoder, lines.tokens, lines.positions, lines.mask)
        if hidden is not None:
            return hidden
    return decoder(lines.tokens, positions=lines.positions, mask=lines.mask, checkpoint_layers=checkpoint_layers)


def cells(where: Tensor, device: torch.device | None = None) -> Tensor:
    """The numbers of the True cells of a table [B, T], row by row, [N]; device: where they are read"""
    return sent(where.flatten().nonzero().squeeze(1), device or where.device)


def scatter(x_N: Tensor, at_N: Tensor, like_BT: Tensor) -> Tensor:
    """The inverse of `Lines.gather` for one number per cell: [N] -> [B, T], 0 elsewhere."""
    return x_N.new_zeros(like_BT.numel()).index_copy(0, at_N, x_N).view(like_BT.shape)
