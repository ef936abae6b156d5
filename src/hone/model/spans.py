"""Where the rows of a list lie, and how their attention is shared out among the programs of a GPU's kernels.

Shapes: U tokens in the list, R rows, T tiles.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.model.grouped import Grouped, ends

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

    row: Tensor  # int32 [T]  the row whose own tokens are in it
    at: Tensor  # int32 [T]  how many of them come before; NOWHERE: there is nothing to do
    member: Tensor  # int32 [R]  rows that begin with another's tokens, by that one
    begin: Tensor  # int32 [R + 1]  where those of each row begin


def round_size(tokens: int) -> int:
    """The least round number of tokens that holds so many: few come up again and again."""
    step = max(FINEST, 1 << max(0, (tokens // SHARE).bit_length() - 1))
    return -(-tokens // step) * step


def tiled(rows: Grouped) -> tuple[Spans, Tiles]:
    """With room for the tokens that fill the list up, in rows of their own, and for more rows."""
    U, B = rows.tokens, len(rows.own)
    size = round_size(U)
    more = -(-(size - U) // TILE)
    R = -(-(B + more) // ROWS) * ROWS
    start = np.full(R + 1, size)
    start[: B + 1] = rows.start
    start[B + 1 : B + 1 + more] = np.minimum(U + TILE * np.arange(1, more + 1), size)
    prefix, common = np.zeros(R, np.int64), np.zeros(R, np.int64)
    prefix[:B], common[:B] = rows.start[rows.first], rows.common
    others = np.flatnonzero(rows.common)
    leader = rows.first[others]
    member = np.zeros(R, np.int64)
    member[: len(others)] = others[leader.argsort(kind="stable")]
    asking, reach = np.bincount(leader, weights=rows.own[others], minlength=R), np.zeros(R, np.int64)
    np.maximum.at(reach, leader, rows.common[others])
    row, at = _cut(np.diff(start), room=size // TILE + R, asking=asking, reach=reach)
    tiles = Tiles(
        row=_ints(row), at=_ints(at), member=_ints(member), begin=_ints(ends(np.bincount(leader, minlength=R)))
    )
    return _spans(start, prefix, common), tiles


def _cut(
    own: NDArray[np.int64], *, room: int, asking: NDArray[Any], reach: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and place of every tile, those whose keys the most queries see first: a program that begins last and takes
    longest is waited for. asking: the other rows' tokens that see a row's first `reach`."""
    count = -(-own // TILE)
    row = np.repeat(np.arange(len(own)), count)
    at = (np.arange(len(row)) - np.repeat(ends(count)[:-1], count)) * TILE
    order = np.argsort(at - own[row] - asking[row] * (at < reach[row]), kind="stable")
    rest = room - len(row)
    return np.pad(row[order], (0, rest)), np.pad(at[order], (0, rest), constant_values=NOWHERE)


def _spans(start: NDArray[Any], prefix: NDArray[Any], common: NDArray[Any]) -> Spans:
    return Spans(start=_ints(start), prefix=_ints(prefix), common=_ints(common))


def _ints(x: NDArray[Any]) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))
