"""What the host lays out for the kernels, against loops that say it token by token."""

import numpy as np
import pytest
import torch

from hone.engine.params import SampleParams
from hone.engine.runner import PromptChunk, Seat
from hone.engine.runners.cuda.attention_launch import QUERIES
from hone.engine.runners.cuda.draw_state import STOPS, DrawState
from hone.engine.runners.cuda.prompts import lay, passes, tiles_for
from hone.engine.runners.cuda.rows import DeviceRows

VOCAB, WIDTH, ROWS = 300, 12, 7
NAMES = ("token", "position", "count", "limit", "active", "top_k", "temperature", "top_p", "min_p", "penalty",
         "seed", "request", "stop_ids")  # fmt: skip


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


@pytest.mark.parametrize("room", [64, 100, 1_000])
def test_prompts_lie_end_to_end_with_a_tile_for_every_few_tokens(room: int):
    parts = [
        PromptChunk(prompt=prompt(n, n), start=start, end=n, blocks=tuple(range(n, n + -(-n // 32))))
        for n, start in ((1, 0), (70, 32), (33, 0), (200, 64), (64, 63))
    ]
    seen = dict[tuple[int, ...], list[int]]()
    for pieces in passes(parts, room):
        laid = lay(pieces, size=room, prompts=8, width=WIDTH)
        tokens, tiles, table, at = [], [], np.zeros((8, WIDTH), dtype=np.int32), 0
        for owner, piece in enumerate(pieces):
            tokens += [(piece.prompt[i], i, owner) for i in range(piece.start, piece.end)]
            for first in range(piece.start, piece.end, QUERIES):
                tiles.append((owner, at + first - piece.start, first, min(QUERIES, piece.end - first)))
            table[owner, : len(piece.blocks)] = piece.blocks
            at += piece.end - piece.start
            seen.setdefault(piece.prompt, []).extend(range(piece.start, piece.end))
        tokens += [(0, 0, -1)] * (room - len(tokens))
        tiles += [(0, 0, 0, 0)] * (tiles_for(room, 8) - len(tiles))
        np.testing.assert_array_equal(laid.tokens.T, tokens)
        np.testing.assert_array_equal(laid.tiles, tiles)
        np.testing.assert_array_equal(laid.table, table)
        flat = [x.ravel() for x in (laid.tokens, laid.tiles, laid.table)]
        np.testing.assert_array_equal(laid.whole, np.concatenate(flat))
    expected = {p.prompt: list(range(p.start, len(p.prompt) - 1)) for p in parts}
    assert seen == {key: places for key, places in expected.items() if places}


def seats() -> list[PromptChunk]:
    """Settings at their bounds; row 3 of none."""
    settings = [
        SampleParams(max_tokens=9, stop_ids=frozenset(range(STOPS)), seed=2**64 - 1, temperature=1e300),
        SampleParams(max_tokens=9, stop_ids=frozenset(), top_k=2**40, top_p=0.5, min_p=0.25, temperature=0),
        SampleParams(max_tokens=9, stop_ids=frozenset({7, 3}), repetition_penalty=1.5, seed=2**63),
    ]
    where = ((5, 0, 2**64 - 1), (0, 1, 2**32 + 1), (6, 2, 0), (1, 0, 17))
    made = [
        Seat(row=row, random_id=request, params=settings[i], limit=9 + row, blocks=tuple(range(row, row + 2 + i)))
        for row, i, request in where
    ]
    return [
        PromptChunk(prompt=prompt(40, 1), start=0, end=40, blocks=(5, 6), seats=tuple(made[:2])),
        PromptChunk(prompt=prompt(3, 2), start=0, end=3, blocks=(6,), seats=tuple(made[2:])),
        PromptChunk(prompt=prompt(50, 3), start=0, end=40, blocks=(1, 2)),
    ]


def expected_state() -> DrawState:
    """Seated one by one; a prompt's last token is read next."""
    state = DrawState.empty(ROWS, VOCAB, "cpu", seen=True)
    for part in seats():
        for s in part.seats:
            state.seat(s.row, s.params, request=s.random_id, limit=s.limit, read=part.prompt)
            state.position[s.row] -= 1
    return state


def check(rows: DeviceRows, state: DrawState, order: list[int]) -> None:
    """Row i is what row order[i] is in the state."""
    for name in NAMES:
        assert torch.equal(getattr(rows.draw, name), getattr(state, name)[order]), name


def test_seats_are_laid_as_one_by_one_and_leave_the_other_rows_alone():
    rows = DeviceRows(ROWS, VOCAB, WIDTH, torch.device("cpu"))
    rows.seat(seats())
    check(rows, expected_state(), list(range(ROWS)))
    for part in seats():
        for s in part.seats:
            assert rows.table[s.row].tolist() == [*s.blocks, *[0] * (WIDTH - len(s.blocks))]
    assert rows.table[3].tolist() == [0] * WIDTH
    before = rows.words.clone()
    rows.seat([])
    assert torch.equal(rows.words, before)


def test_a_row_that_moves_takes_all_it_has_along_and_stops_where_it_was():
    rows, state = DeviceRows(ROWS, VOCAB, WIDTH, torch.device("cpu")), expected_state()
    rows.seat(seats())
    table = rows.table.clone()
    rows.move([(6, 2), (5, 3)])
    state.active[[5, 6]] = 0
    order = [0, 1, 6, 5, 4, 5, 6]
    state.active[[2, 3]], moved = 0, rows.draw.active.tolist()
    assert moved == [1, 1, 1, 1, 0, 0, 0]
    rows.draw.active[[2, 3]] = 0
    check(rows, state, order)
    assert torch.equal(rows.table, table[order])
    assert rows.uses[[2, 3]].tolist() == rows.uses[[6, 5]].tolist()
