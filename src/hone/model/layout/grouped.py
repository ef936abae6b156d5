"""Rows of tokens as one list in which what a row has in common with the first of its group stands once.

All that says where a token went follows from four numbers a row, by adding: no walk over the cells of the table. In
numpy, on one thread: torch's indexing wakes all of them for a few thousand numbers, and where other work has the cores
each time takes milliseconds.
Shapes: B rows of W cells, U tokens in the list.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints, Flags = NDArray[np.int64], NDArray[np.bool_]


@dataclass(frozen=True)
class Grouped:
    """By row; the tokens a row has alone lie together in the list, row after row."""

    lengths: Ints  # [B]
    first: Ints  # [B]  the first row of its group
    common: Ints  # [B]  with how many tokens it begins as that one does; 0 for the first itself

    @staticmethod
    def of(tokens_BW: Ints, lengths: Ints, group: Ints) -> "Grouped":
        """Tokens after a row's end may be anything."""
        first = leaders(group)
        others = np.flatnonzero(first != np.arange(len(first)))
        most = np.minimum(lengths, lengths[first])[others]
        width, common = int(most.max(initial=0)), np.zeros_like(lengths)
        same = tokens_BW[others, :width] == tokens_BW[first[others], :width]
        alike = np.where(same.all(-1), width, same.argmin(-1)) if width else 0
        common[others] = np.minimum(alike, most)
        return Grouped(lengths, first, common)

    @cached_property
    def own(self) -> Ints:
        """How many tokens each row has alone, [B]"""
        return self.lengths - self.common

    @cached_property
    def start(self) -> Ints:
        """Where they begin in the list, and its end, [B + 1]"""
        return ends(self.own)

    @property
    def tokens(self) -> int:
        """U"""
        return int(self.start[-1])

    def cells(self, rows: int, width: int) -> NDArray[np.int32]:
        """The list's index of each cell of a table, -1 where no token is, [rows, width]"""
        found, column = np.full((rows, width), -1, np.int32), np.arange(width, dtype=np.int32)
        by_row = self.start[:-1] - self.common, self.start[self.first], self.common, self.lengths
        alone, with_first, common, lengths = (x.astype(np.int32)[:, None] for x in by_row)
        index = np.where(column >= common, alone, with_first)
        index += column
        np.copyto(found[: len(index)], index, where=column < lengths)
        return found

    def each(self, by_row: Ints) -> Ints:
        """A row's number for every token it has alone, plus the token's column, [U]"""
        return np.repeat(by_row + self.common - self.start[:-1], self.own) + np.arange(self.tokens)


def ends(counts: Ints) -> Ints:
    """0, and where each ends."""
    return np.concatenate([[0], counts.cumsum()])


def leaders(group: Ints) -> Ints:
    """The number of the first row of each row's group, [B]"""
    _, first, of = np.unique(group, return_index=True, return_inverse=True)
    return first[of]
