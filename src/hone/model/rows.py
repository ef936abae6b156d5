"""Rows of tokens as one list without padding. What a row shares with the first row of its group stands there once.

This module says where each token went, shares rows out among a GPU's programs, and computes attention over the rows.
Four numbers a row say where a token went. They are added up in numpy on one thread, without a walk over the cells of
the table: torch's indexing wakes all threads for a few thousand numbers, and takes milliseconds on busy cores.
Only attention looks at more than one token, so only attention puts rows together. Kernels find the rows in the list.
Without kernels, rows of about the same length form a table, so that little of it is padding.
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
TILE, ROWS = 64, 64  # own tokens of a row that one program has; rows are rounded up to so many
NOWHERE = 1 << 30  # past the end of every list
FINEST, SHARE = 64, 32  # a list is filled up to steps of so many tokens, and by at most one part in so many


@dataclass(frozen=True)
class Grouped:
    """Counts by row. The tokens that a row has alone lie together in the list, row after row."""

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
    """The work of the kernels' programs. Lists that are filled up to one size have equally many."""

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
    """Spans and tiles with room for more rows, and for the tokens that fill the list up, in rows of their own."""
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


class RowAttention(Backend):
    """Attends to the rows of a list where they lie, without tables: kernels."""

    def covers(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it does not attend to such heads there; None: it does."""
        raise NotImplementedError

    def attend(self, q_UHE: Tensor, k_UKE: Tensor, v_UKE: Tensor, spans: Spans, tiles: Tiles, *, window: int) -> Tensor:
        """Causal attention in each row, [U, H, E]; window: how many tokens back one looks, 0: all."""
        raise NotImplementedError


def row_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> RowAttention | None:
    """The first backend that attends to such rows; None: tables."""
    if not differentiates_once():
        return None
    return next((b for b in backends_for(RowAttention) if b.covers(device, dtype, head_dim) is None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The rows put together by length."""

    cells: Tensor  # int64 [S]  index into the list; any token after the row's end
    shapes: tuple[tuple[int, int], ...]  # (n, W) of each table
    owner: Tensor  # int64 [U]  the cell, in one of the rows that have the token, where it is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which tokens of the list each row is made of."""

    spans: Spans
    by: Tables | Tiles  # how they are attended to; Tiles: by a GPU's kernels
    window: int = 0  # how many columns back a token looks; 0: all
    asked: Tensor | None = None  # bool [U]  whose hidden states are read; those of others may be anything

    def attend(self, q_1HUE: Tensor, k_1KUE: Tensor, v_1KUE: Tensor, *, shares_keys: bool) -> Tensor:
        """Causal attention in each row, [1, U, H E]."""
        by = self.by
        if isinstance(by, Tiles):
            kernels = row_attention(q_1HUE.device, q_1HUE.dtype, q_1HUE.shape[3])
            if kernels is not None:
                q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q_1HUE, k_1KUE, v_1KUE))  # x[0] copies its gradient
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
        """True where a column may look: not later, and not too far back, [W, W]"""
        at = torch.arange(W, device=device)
        far = at[:, None] - at
        return (far >= 0) & (far < self.window)


def _tables(x_1HUE: Tensor, by: Tables) -> Iterator[Tensor]:
    """[n, H, W, E] each; by an embedding, whose gradient adds up tokens that rows share and is made in parallel."""
    _, heads, _, size = x_1HUE.shape
    flat = x_1HUE[0].transpose(0, 1).reshape(-1, heads * size)
    parts = F.embedding(by.cells, flat).split([n * W for n, W in by.shapes])
    return (part.view(*shape, heads, size).transpose(1, 2) for part, shape in zip(parts, by.shapes, strict=True))


def _one_table(spans: Spans, tokens: int) -> Tables:
    """All rows that ask anything in one, as wide as the longest: where kernels will not do."""
    asks = (spans.start.diff() > 0) & (spans.start[:-1] < tokens)
    start, end, prefix, common = (
        x[asks].long()[:, None] for x in (spans.start[:-1], spans.start[1:], spans.prefix, spans.common)
    )
    length = end - start + common
    W = int(length.max())
    column = torch.arange(W, device=start.device)
    cells = torch.where(column < common, prefix + column, start + column - common)
    own = (column >= common) & (column < length) & (cells < tokens)
    owner = torch.zeros(tokens, dtype=torch.int64, device=start.device)
    owner[cells[own]] = own.flatten().nonzero().squeeze(1)
    return Tables(cells=cells.clamp(max=tokens - 1).flatten(), shapes=((len(common), W),), owner=owner)
