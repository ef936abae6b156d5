"""Where the rows of a list lie, and how their attention is shared out among the programs of a GPU's kernels.

Shapes: U tokens in the list, R rows, T tiles.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.model.layout.grouped import Grouped, Ints, ends

TILE, ROWS = 64, 64  # own tokens of a row that one program has; rows are rounded up to so many
NOWHERE = 1 << 30  # past the end of every list
FINEST, SHARE = 64, 32  # a list is filled up to steps of so many tokens, and by at most one part in so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the tokens of each row lie."""

    start: Tensor  # int32 [R + 1]  its own; they end where the next row's begin
    prefix: Tensor  # int32 [R]  those that it has in common with another row
    common: Tensor  # int32 [R]  how many

    @staticmethod
    def of(rows: Grouped) -> "Spans":
        return _spans(rows.start, rows.start[rows.first], rows.common)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """What the programs of the kernels have to do: as many for all lists that are filled up to one size."""

    row: Tensor  # int32 [T]  the row whose own tokens are in it; those whose keys the most queries see come first
    at: Tensor  # int32 [T]  how many of them come before; NOWHERE: there is nothing to do
    order: Tensor  # int32 [T]  the tiles, those whose queries see the most keys first
    member: Tensor  # int32 [R]  rows that begin with another's tokens, by that one
    begin: Tensor  # int32 [R + 1]  where those of each row begin


def round_size(tokens: int) -> int:
    """The least round number of tokens that holds so many: few come up again and again."""
    step = _step(tokens)
    return -(-tokens // step) * step


def _step(tokens: int) -> int:
    return max(FINEST, 1 << max(0, (tokens // SHARE).bit_length() - 1))


def tiled(rows: Grouped) -> tuple[Spans, Tiles]:
    """With room for the tokens that fill the list up, in rows of their own, and for more rows."""
    start, prefix, common = _roomy(rows)
    R = len(common)
    others = np.flatnonzero(rows.common)
    leader = rows.first[others]
    count = -(-np.diff(start) // TILE)
    row = np.repeat(np.arange(R), count)
    at = (np.arange(len(row)) - np.repeat(ends(count)[:-1], count)) * TILE
    reach = np.zeros(R, np.int64)  # how many of a row's tokens others begin with, of which some see the last
    np.maximum.at(reach, leader, rows.common[others])
    seen = np.diff(start)[row] - at + np.bincount(leader, rows.own[others], R)[row] * (at < reach[row])
    first = np.argsort(-seen, kind="stable")  # a program that begins last and takes longest is waited for
    row, at = row[first], at[first]
    rest = int(start[-1]) // TILE + R - len(row)
    tiles = Tiles(
        row=_ints(np.pad(row, (0, rest))),
        at=_ints(np.pad(at, (0, rest), constant_values=NOWHERE)),
        order=_ints(np.append(np.argsort(-(common[row] + at), kind="stable"), np.arange(rest) + len(row))),
        member=_ints(np.pad(others[leader.argsort(kind="stable")], (0, R - len(others)))),
        begin=_ints(ends(np.bincount(leader, minlength=R))),
    )
    return _spans(start, prefix, common), tiles


def _roomy(rows: Grouped) -> tuple[Ints, Ints, Ints]:
    """Start, prefix and common of a round number of rows: the list's, those that fill it up, a tile each, and empty
    ones."""
    U, B = rows.tokens, len(rows.own)
    size = round_size(U)
    R = -(-(B + _step(U) // TILE) // ROWS) * ROWS
    start = np.minimum(U + TILE * (np.arange(R + 1) - B), size)
    start[: B + 1] = rows.start
    prefix, common = np.zeros(R, np.int64), np.zeros(R, np.int64)
    prefix[:B], common[:B] = rows.start[rows.first], rows.common
    return start, prefix, common


def _spans(start: Ints, prefix: Ints, common: Ints) -> Spans:
    return Spans(start=_ints(start), prefix=_ints(prefix), common=_ints(common))


def _ints(x: NDArray[Any]) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))
