"""The streams of random numbers are numpy's, to the bit, however many are made at once and wherever one begins."""

import numpy as np
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.engine.draw import AHEAD, RandomStreams, philox_uniforms

WORD = st.integers(0, 2**64 - 1)
EDGES = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]


def stream(seed: int, request: int, start: int, count: int) -> list[float]:
    """numpy's own; a block of it is 4 doubles."""
    bits = np.random.Philox(key=np.array([seed, request], dtype=np.uint64))
    bits.advance(start // 4)
    return np.random.Generator(bits).random(start % 4 + count)[start % 4 :].tolist()


def test_a_million_doubles_in():
    whole = np.random.Generator(np.random.Philox(key=np.array([3, 2**64 - 1], dtype=np.uint64))).random(10**6 + 1)
    assert philox_uniforms([3], [2**64 - 1], [10**6], 1).item() == whole[-1]
    assert stream(3, 2**64 - 1, 10**6, 1) == [whole[-1]]  # what the other tests compare with
    assert (philox_uniforms(3, 2**64 - 1, 999_000, 1001)[:, 0] == whole[999_000:]).all()


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.tuples(WORD, WORD, st.integers(0, 10**6)), min_size=1, max_size=9), count=st.integers(1, 11))
def test_many_streams_at_once_are_numpys(rows: list[tuple[int, int, int]], count: int):
    seeds, requests, start = (np.array(x, dtype=np.uint64) for x in zip(*rows, strict=True))
    table = philox_uniforms(seeds, requests, start, count)
    assert table.T.tolist() == [stream(*row, count) for row in rows]


@each("seed", EDGES)
def test_edges_of_the_key(seed: int):
    table = philox_uniforms(seed, np.array(EDGES, dtype=np.uint64), 0, 6)
    assert table.T.tolist() == [stream(seed, request, 0, 6) for request in EDGES]
    assert ((table >= 0) & (table < 1)).all()


def test_no_rows_give_no_numbers():
    assert philox_uniforms([], [], 0, 3).shape == (3, 0)


def test_rows_go_at_their_own_pace():
    # rows join, leave and move at random; each must see its own stream in order, with no double left out
    chance, streams = np.random.default_rng(0), RandomStreams(7)
    place: dict[int, tuple[int, int]] = {}
    written = 0
    for turn in range(400):
        free = [row for row in range(7) if row not in place]
        if free and chance.random() < 0.2:
            place[free[0]] = (turn, 0)
            streams.seat(free[0], seed=5, request=turn)
        if place and free and chance.random() < 0.1:
            a = int(chance.choice(list(place)))
            b = free[-1] if free[-1] not in place else a
            if a != b:
                streams.move(a, b)
                place[b] = place.pop(a)
        rows = np.array([row for row in place if chance.random() < 0.8], dtype=np.int64)
        for row, double in zip(rows.tolist(), streams.next(rows), strict=True):
            request, count = place[row]
            assert double == stream(5, request, count, 1)[0]
            place[row] = (request, count + 1)
            written += 1
        for row in [row for row, (_, count) in place.items() if count > 3 * AHEAD or chance.random() < 0.002]:
            del place[row]
    assert written > 1000
