"""Rows of tokens as one list without padding. A prefix that a row shares with its group's first row is there once.

This module computes where each token is in the list, splits the rows into tiles for GPU kernels, and computes attention
over the rows. Four numbers a row locate its tokens. They are computed in numpy on one thread: torch's indexing wakes
all threads for a few thousand numbers, which takes milliseconds on busy cores.
Attention is the only operation on several tokens, so nothing else needs the rows. Kernels read the rows in the list.
Without kernels, rows of similar length form a table, so that few cells are padding.
Shapes: B rows of W cells, U tokens in the list, R rows and T tiles of kernels, S cells of all tables, n rows of W cells
in one of them, H query heads, K key-value heads, E head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.model.backends.registry import Backend, backends_for, differentiates_once

Ints = NDArray[np.int64]
TILE, ROWS = 64, 64  # own tokens of a row in one tile; the number of rows is a multiple of ROWS
NOWHERE = 1 << 30  # a position beyond the end of every list
FINEST_STEP, PADDING_SHARE = (
    64,
    32,
)  # lists are padded to a multiple of FINEST_STEP or more, by at most 1 / PADDING_SHARE


@dataclass(frozen=True)
class GroupedRows:
    """Numbers of tokens by row. A row's own tokens, those that it does not share, are contiguous in the list."""

    lengths: Ints  # [B]
    first: Ints  # [B]  the first row of its group
    common: Ints  # [B]  the length of the prefix that it shares with that row; 0 for the first row itself

    @staticmethod
    def of(tokens_BW: Ints, lengths: Ints, group: Ints) -> "GroupedRows":
        """Tokens after a row's end may be anything."""
        first = first_rows(group)
        others = np.flatnonzero(first != np.arange(len(first)))
        most = np.minimum(lengths, lengths[first])[others]
        width, common = int(most.max(initial=0)), np.zeros_like(lengths)
        same = tokens_BW[others, :width] == tokens_BW[first[others], :width]
        alike = np.where(same.all(-1), width, same.argmin(-1)) if width else 0
        common[others] = np.minimum(alike, most)
        return GroupedRows(lengths, first, common)

    @cached_property
    def own(self) -> Ints:
        """The number of each row's own tokens, [B]"""
        return self.lengths - self.common

    @cached_property
    def start(self) -> Ints:
        """Where the own tokens of each row begin in the list, and the list's end, [B + 1]"""
        return offsets(self.own)

    @property
    def tokens(self) -> int:
        """U"""
        return int(self.start[-1])

    def cells(self, rows: int, width: int) -> NDArray[np.int32]:
        """The index in the list of each cell of a table, -1 where there is no token, [rows, width]"""
        found, column = np.full((rows, width), -1, np.int32), np.arange(width, dtype=np.int32)
        by_row = self.start[:-1] - self.common, self.start[self.first], self.common, self.lengths
        alone, with_first, common, lengths = (x.astype(np.int32)[:, None] for x in by_row)
        index = np.where(column >= common, alone, with_first)
        index += column
        np.copyto(found[: len(index)], index, where=column < lengths)
        return found

    def each(self, by_row: Ints) -> Ints:
        """For each token of the list, the number of its row plus the token's column, [U]"""
        return np.repeat(by_row + self.common - self.start[:-1], self.own) + np.arange(self.tokens)


def offsets(counts: Ints) -> Ints:
    """0 and the cumulative sums: where each part begins, and the end."""
    return np.concatenate([[0], counts.cumsum()])


def first_rows(group: Ints) -> Ints:
    """The index of the first row of each row's group, [B]"""
    _, first, of = np.unique(group, return_index=True, return_inverse=True)
    return first[of]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the tokens of each row are in the list."""

    start: Tensor  # int32 [R + 1]  of its own tokens, which end where the next row's begin
    prefix: Tensor  # int32 [R]  where the prefix begins that it shares with another row
    common: Tensor  # int32 [R]  the length of that prefix

    @staticmethod
    def of(rows: GroupedRows) -> "Spans":
        return _spans(rows.start, rows.start[rows.first], rows.common)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The tiles of the kernels, one for each program. Lists of the same padded size have the same number of tiles."""

    row: Tensor  # int32 [T]  the row whose own tokens are in the tile; tiles whose keys most queries see come first
    at: Tensor  # int32 [T]  the tile's first own token; NOWHERE: the tile is empty
    order: Tensor  # int32 [T]  the tiles by the number of keys that their queries see, the most first
    member: Tensor  # int32 [R]  rows that share a prefix, sorted by the row that has it
    begin: Tensor  # int32 [R + 1]  where the members of each row begin


def round_size(tokens: int) -> int:
    """The least round number that is not below `tokens`. There are few round numbers, so the same sizes come again."""
    step = _step(tokens)
    return -(-tokens // step) * step


def _step(tokens: int) -> int:
    return max(FINEST_STEP, 1 << max(0, (tokens // PADDING_SHARE).bit_length() - 1))


def make_tiles(rows: GroupedRows) -> tuple[Spans, Tiles]:
    """Spans and tiles of a padded list: the tokens that pad it are rows of their own, and further rows are empty."""
    start, prefix, common = _round_rows(rows)
    R = len(common)
    others = np.flatnonzero(rows.common)
    leader = rows.first[others]
    count = -(-np.diff(start) // TILE)
    row = np.repeat(np.arange(R), count)
    at = (np.arange(len(row)) - np.repeat(offsets(count)[:-1], count)) * TILE
    shared = np.zeros(R, np.int64)  # the longest prefix of a row that another row shares
    np.maximum.at(shared, leader, rows.common[others])
    seen = np.diff(start)[row] - at + np.bincount(leader, rows.own[others], R)[row] * (at < shared[row])
    # the longest programs begin first, or the others would wait for them at the end
    first = np.argsort(-seen, kind="stable")
    row, at = row[first], at[first]
    rest = int(start[-1]) // TILE + R - len(row)
    tiles = Tiles(
        row=_ints(np.pad(row, (0, rest))),
        at=_ints(np.pad(at, (0, rest), constant_values=NOWHERE)),
        order=_ints(np.append(np.argsort(-(common[row] + at), kind="stable"), np.arange(rest) + len(row))),
        member=_ints(np.pad(others[leader.argsort(kind="stable")], (0, R - len(others)))),
        begin=_ints(offsets(np.bincount(leader, minlength=R))),
    )
    return _spans(start, prefix, common), tiles


def _round_rows(rows: GroupedRows) -> tuple[Ints, Ints, Ints]:
    """Start, prefix and common of a round number of rows: the list's, the padding in rows of a tile, and empty rows."""
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


class RowAttention(Backend):
    """Attention over the rows of a list by kernels, without tables."""

    def covers(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """The reason why it cannot compute attention for such heads on this device, or None if it can."""
        raise NotImplementedError

    def attend(self, q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, tiles: Tiles, *, window: int) -> Tensor:
        """Causal attention in each row, [U, H, E]; window: the sliding window in tokens, 0: none."""
        raise NotImplementedError


def row_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> RowAttention | None:
    """The first backend that covers such heads; None: tables."""
    if not differentiates_once():
        return None
    return next((b for b in backends_for(RowAttention) if b.covers(device, dtype, head_dim) is None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Rows of similar length as tables."""

    cells: Tensor  # int64 [S]  index into the list; arbitrary after the row's end
    shapes: tuple[tuple[int, int], ...]  # (n, W) of each table
    owner: Tensor  # int64 [U]  of each token, the cell whose output is taken; a shared token has several cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a list: which tokens each has."""

    spans: Spans
    by: Tables | Tiles  # Tables: attention in plain torch; Tiles: by GPU kernels
    window: int = 0  # the sliding window in columns; 0: none
    needed: Tensor | None = None  # bool [U]  tokens whose hidden states are read; the others' may be arbitrary

    def attend(self, q_1HUE: Tensor, k_1KUE: Tensor, v_1KUE: Tensor, *, shares_keys: bool) -> Tensor:
        """Causal attention in each row, [1, U, H E]."""
        by = self.by
        if isinstance(by, Tiles):
            kernels = row_attention(q_1HUE.device, q_1HUE.dtype, q_1HUE.shape[3])
            if kernels is not None:
                # x[0] would copy its gradient
                q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q_1HUE, k_1KUE, v_1KUE))
                return kernels.attend(q, k, v, self.spans, by, window=self.window).flatten(1)[None]
            by = _one_table(self.spans, q_1HUE.shape[2])  # a critic's decoder may have heads of another size
        tables = zip(*(_tables(x, by) for x in (q_1HUE, k_1KUE, v_1KUE)), strict=True)
        out = torch.cat([self._table(q, k, v, shares_keys) for q, k, v in tables])
        return F.embedding(by.owner, out)[None]

    def _table(self, q_nHWE: Tensor, k_nKWE: Tensor, v_nKWE: Tensor, shares_keys: bool) -> Tensor:
        """[n W, H E]"""
        n, _, W, _ = q_nHWE.shape
        mask = self._band(W, q_nHWE.device) if 0 < self.window < W else None
        out = F.scaled_dot_product_attention(
            q_nHWE, k_nKWE, v_nKWE, attn_mask=mask, is_causal=mask is None, enable_gqa=shares_keys
        )
        return out.transpose(1, 2).reshape(n * W, -1)

    def _band(self, W: int, device: torch.device) -> Tensor:
        """True where a column attends: not to later ones, nor beyond the window, [W, W]"""
        column = torch.arange(W, device=device)
        distance = column[:, None] - column
        return (distance >= 0) & (distance < self.window)


def _tables(x_1HUE: Tensor, by: Tables) -> Iterator[Tensor]:
    """[n, H, W, E] each, by F.embedding: its gradient sums over the rows that share a token, in parallel."""
    _, heads, _, size = x_1HUE.shape
    flat = x_1HUE[0].transpose(0, 1).reshape(-1, heads * size)
    parts = F.embedding(by.cells, flat).split([n * W for n, W in by.shapes])
    return (part.view(*shape, heads, size).transpose(1, 2) for part, shape in zip(parts, by.shapes, strict=True))


def _one_table(spans: Spans, tokens: int) -> Tables:
    """One table of all rows that have own tokens, as wide as the longest. Used where kernels do not cover the heads."""
    has_own = (spans.start.diff() > 0) & (spans.start[:-1] < tokens)
    start, end, prefix, common = (
        x[has_own].long()[:, None] for x in (spans.start[:-1], spans.start[1:], spans.prefix, spans.common)
    )
    length = end - start + common
    W = int(length.max())
    column = torch.arange(W, device=start.device)
    cells = torch.where(column < common, prefix + column, start + column - common)
    own = (column >= common) & (column < length) & (cells < tokens)
    owner = torch.zeros(tokens, dtype=torch.int64, device=start.device)
    owner[cells[own]] = own.flatten().nonzero().squeeze(1)
    return Tables(cells=cells.clamp(max=tokens - 1).flatten(), shapes=((len(common), W),), owner=owner)
