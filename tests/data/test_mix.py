"""Mixes: the proportions hold at every row, each part is read in its own order, and resuming is exact."""

import json
import math
from copy import copy
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.feed.assemble import Mixture, next_part
from hone.data.feed.source import Source
from hone.errors import HoneError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=7))
def test_after_any_number_of_rows_each_part_has_its_share_to_within_one_row(weights):
    shares = [Fraction(w, sum(weights)) for w in weights]
    bound = 1 - Fraction(1, 2 * len(shares) - 2)
    taken = [0] * len(shares)
    for n in range(1, 300):
        taken[next_part(shares, taken)] += 1
        assert all(abs(n * share - t) <= bound for share, t in zip(shares, taken, strict=True))


def mixed(weights=(0.7, 0.3), seed=1):
    parts = {"a": Source([f"a{i}" for i in range(10)], seed=seed), "b": Source([f"b{i}" for i in range(4)], seed=seed)}
    return Mixture(parts, weights)


def test_the_order_by_hand():
    # shares 3/4 and 1/4; owed after n rows: n share - taken. k = 2, so a part is asked when owed >= 1/2,
    # and the one whose debt reaches 1/2 soonest comes first: a, a, b, a, and again
    assert [row[0] for row in mixed((3, 1)).take(12)] == list("aabaaabaaaba")


def test_proportions_are_exact_and_each_part_keeps_its_own_order():
    source = mixed()
    rows = source.take(1000)
    for part, share, size in (("a", 700, 10), ("b", 300, 4)):
        own = [row for row in rows if row[0] == part]
        assert len(own) == share
        assert own == Source([f"{part}{i}" for i in range(size)], seed=1).take(share)
    assert source.progress() == {"epoch/a": 70.0, "epoch/b": 75.0}
    assert len(source) == 14


def test_resuming_goes_on_exactly_from_every_place():
    whole = mixed().take(80)
    for position in range(60):
        first = mixed()
        first.take(position)
        again = mixed()
        again.take(5)
        again.load(json.loads(json.dumps(first.state())))
        assert copy(again).take(20) == whole[position : position + 20]
        assert again.take(20) == whole[position : position + 20]


def test_another_weight_or_part_and_a_damaged_state_are_refused():
    state = mixed().state()
    for other in (mixed((0.6, 0.4)), Mixture({"a": Source("xy", seed=1)}, [1.0])):
        with pytest.raises(HoneError, match="cannot resume: the mix's"):
            other.load(state)
    with pytest.raises(HoneError, match="cannot resume: the data's"):
        mixed(seed=2).load(state)
    for change in ({"taken": [1]}, {"taken": [1, -1]}, {"parts": []}):
        with pytest.raises(HoneError, match="damaged"):
            mixed().load({**state, **change})
    assert mixed((7, 3)).state() == state  # only the proportion matters


def test_weights_must_be_above_zero():
    for weights in ((1.0, 0.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan)):
        with pytest.raises(HoneError, match="needs a weight above 0"):
            mixed(weights)
