"""Where rows lie in a list, and how kernels share them out: every token once, few sizes, the longest first."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from each import each
from row_cases import ROWS, batch_of

from hone.model.rows import NOWHERE, TILE, GroupedRows, Spans, make_tiles, round_size
from hone.model.rows import ROWS as ROUND


def grouped(lengths: list[int], group: list[int], common: int | list[int]) -> GroupedRows:
    batch = batch_of(lengths, group, common)
    return GroupedRows.of(batch.inputs.numpy(), np.array(lengths), np.array(group))


@each("name", ROWS)
def test_every_token_is_in_one_tile(name: str):
    rows = grouped(*ROWS[name])
    spans, tiles = make_tiles(rows)
    own = spans.start.diff()
    seen = np.zeros(round_size(rows.tokens), int)
    for row, at in zip(tiles.row.tolist(), tiles.at.tolist(), strict=True):
        if at != NOWHERE:
            assert at % TILE == 0
            first = int(spans.start[row]) + at
            seen[first : first + min(TILE, int(own[row]) - at)] += 1
    assert (seen == 1).all()
    assert (own[len(rows.own) :] <= TILE).all(), "rows that fill the list up would cost more than they are worth"
    assert not spans.common[len(rows.own) :].any()


@each("name", ROWS)
def test_a_row_and_those_that_begin_with_it(name: str):
    rows = grouped(*ROWS[name])
    spans, tiles = make_tiles(rows)
    exact = Spans.of(rows)
    for a, b in ((spans.start, exact.start), (spans.prefix, exact.prefix), (spans.common, exact.common)):
        assert torch.equal(a[: len(b)], b)
    begin, member = tiles.begin.tolist(), tiles.member.tolist()
    for row in range(len(begin) - 1):
        others = [r for r in range(len(rows.own)) if rows.common[r] and rows.first[r] == row]
        assert member[begin[row] : begin[row + 1]] == others


@pytest.mark.parametrize("name", ["a prompt of several tiles", "rows of several tiles", "many rows"])
def test_tiles_whose_keys_most_queries_see_come_first(name: str):
    rows = grouped(*ROWS[name])
    spans, tiles = make_tiles(rows)
    own, work = spans.start.diff(), list[int]()
    for row, at in zip(tiles.row.tolist(), tiles.at.tolist(), strict=True):
        if at != NOWHERE:
            see = [int(rows.own[r]) for r in range(len(rows.own)) if rows.first[r] == row and rows.common[r] > at]
            work.append(int(own[row]) - at + sum(see))
    assert work == sorted(work, reverse=True)
    assert work[0] > work[-1]


@each("name", ROWS)
def test_tiles_whose_queries_see_the_most_keys_are_asked_first(name: str):
    spans, tiles = make_tiles(grouped(*ROWS[name]))
    assert sorted(tiles.order.tolist()) == list(range(len(tiles.row)))
    seen = [int(tiles.at[tile] + spans.common[tiles.row[tile]]) for tile in tiles.order.tolist()]
    there = [n for n in seen if n < NOWHERE]
    assert there == sorted(there, reverse=True)
    assert all(n >= NOWHERE for n in seen[len(there) :])


def test_lists_of_one_round_size_and_about_as_many_rows_are_one_size():
    """One recording of a pass serves them all."""
    shapes = {
        tuple(len(getattr(x, f.name)) for x in (spans, tiles) for f in fields(x))
        for lengths in ([40] * 30, [44, *[40] * 28, 30], [300, 300, 300, 290], [1] * 10 + [119] * 10)
        for spans, tiles in [make_tiles(grouped(lengths, list(range(len(lengths))), 0))]
    }
    T = 1_216 // TILE + ROUND
    assert shapes == {(ROUND + 1, ROUND, ROUND, T, T, T, ROUND, ROUND + 1)}


@each("tokens", [1, 63, 64, 65, 4_000, 65_536, 65_537])
def test_a_list_is_filled_up_by_little(tokens: int):
    size = round_size(tokens)
    assert tokens <= size < tokens + max(64, tokens / 32 + 1)
    assert round_size(size) == size
