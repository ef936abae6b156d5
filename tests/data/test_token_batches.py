"""Batches by tokens: never over the budget, rows of one length together, every group once, resumed exactly."""

import json
from collections import Counter
from copy import copy

import pytest

from hone.data.feed.source import Source
from hone.data.feed.token_batches import TokenBatches, by_length
from hone.errors import HoneError
from hone.types import Rollout


def group(*lengths):
    return [Rollout(tokens=[1] * n, mask=[True] * n) for n in lengths]


def name(g):
    return tuple(len(r.tokens) for r in g)


def area(batch):
    return sum(len(g) for g in batch) * max(len(r.tokens) for g in batch for r in g)


ROWS = [group(3 + (7 * i) % 31) for i in range(40)]


def feed(seed=1, tokens=64, window=15):
    return TokenBatches(Source(ROWS, seed=seed), tokens=tokens, seed=seed, window=window)


def test_the_cut_by_hand():
    # sorted 2 2 3 5 6; budget 8: 2+2 -> 2 x 2; a third would make 3 x 3 = 9 > 8; 3 alone, for 2 x 5 = 10; 5; 6
    batches = by_length([group(5), group(2), group(6), group(3), group(2)], tokens=8)
    assert [[name(g) for g in b] for b in batches] == [[(2,), (2,)], [(3,)], [(5,)], [(6,)]]
    pairs = by_length([group(2, 3), group(1, 2), group(4, 4)], tokens=12)
    assert [[name(g) for g in b] for b in pairs] == [[(1, 2), (2, 3)], [(4, 4)]]  # 4 rows x 3 = 12


def test_no_batch_is_over_the_budget_and_no_row_is_left_behind():
    source = feed()
    batches = [source.step() for _ in range(200)]
    assert max(map(area, batches)) <= 64
    seen, there = Counter(name(g) for b in batches for g in b), Counter(map(name, ROWS))
    assert seen.keys() == there.keys()
    rounds = [seen[n] / there[n] for n in there]
    assert max(rounds) - min(rounds) <= 1  # nothing is met much more often than the rest


def test_every_group_comes_as_often_as_the_feed_gives_it():
    source = feed(window=40)
    for _ in range(3):  # a window of the whole data is an epoch
        taken = []
        while len(taken) < 40:
            taken += source.step()
        assert sorted(map(name, taken)) == sorted(map(name, ROWS))


def test_less_padding_than_without():
    plain = Source(ROWS, seed=1).take(40)
    source, spent, used = feed(window=40), 0, 0
    while used < sum(len(g[0].tokens) for g in ROWS):
        batch = source.step()
        spent, used = spent + area(batch), used + sum(len(r.tokens) for g in batch for r in g)
    padded = sum(area(plain[i : i + 3]) for i in range(0, 40, 3))
    assert used / spent > 0.8 > sum(len(g[0].tokens) for g in ROWS) / padded


def test_batches_come_in_shuffled_order():
    source = feed(window=40)
    longest = [max(name(g)[0] for g in source.step()) for _ in range(8)]
    assert longest != sorted(longest)
    assert [feed(seed=s, window=40).step() for s in range(5)] != [feed(seed=0, window=40).step()] * 5


def test_resuming_goes_on_exactly_from_every_batch():
    source = feed()
    whole = [[name(g) for g in source.step()] for _ in range(40)]
    first = feed()
    for position in range(30):
        again = feed()
        again.step()
        again.load(json.loads(json.dumps(first.state())))
        assert [[name(g) for g in copy(again).step()]] == whole[position : position + 1]
        assert [[name(g) for g in again.step()] for _ in range(8)] == whole[position : position + 8]
        first.step()


def test_single_groups_can_be_taken_and_the_rest_of_the_batch_follows():
    one, other = feed(), feed()
    batch = one.step()
    taken = other.take(1)
    state = other.state()
    assert taken + other.step() == batch
    again = feed()
    again.load(state)
    assert again.step() == batch[1:]
    assert one.step() == other.step()


def test_a_row_over_the_budget_and_another_setting_are_refused():
    with pytest.raises(HoneError, match=r"a row has 33 tokens: raise train\.tokens \(20\)"):
        feed(tokens=20, window=40).step()
    state = feed().state()
    for other in (feed(tokens=65), feed(window=16)):
        with pytest.raises(HoneError, match="cannot resume: the batches'"):
            other.load(state)
    with pytest.raises(HoneError, match="cannot resume: the batches' seed"):
        feed(seed=2).load(state)
    for change in ({"window": None}, {"position": 15}, {"position": -1}):
        with pytest.raises(HoneError, match="no place"):
            feed().load({**state, **change})
