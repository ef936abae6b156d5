"""Statistics reduce to the same means however the tokens were cut."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.log.stats import Stats

torch.set_num_threads(1)


def merged(parts: list[Stats]) -> Stats:
    """What one would be that everything was added to."""
    whole = Stats()
    for part in parts:
        whole.merge(part)
    return whole


def of_tokens(values: torch.Tensor, mask: torch.Tensor) -> Stats:
    stats = Stats()
    stats.add("entropy", torch.where(mask, values, 0.0).sum(), mask.sum())
    stats.add("rows", float(len(values)), 1)
    if mask.any():
        stats.peak("gap", values[mask].max())
    return stats


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 10_000))
def test_any_split_of_the_tokens_gives_the_same_means(rows: int, cuts: list[int], seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 5, generator=make, dtype=torch.float64)
    mask = torch.rand(rows, 5, generator=make) < 0.6
    bounds = [0, *sorted(min(c, rows) for c in cuts), rows]
    parts = [of_tokens(values[a:b], mask[a:b]) for a, b in pairwise(bounds)]
    whole = of_tokens(values, mask).means()
    split = merged(parts).means()
    assert split.keys() == whole.keys()
    for name in whole.keys() - {"rows"}:
        assert split[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-12)


def test_a_mean_of_means_would_be_wrong() -> None:
    # parts of 1 and 3 tokens: (6 + 3) / 4 = 2.25, where the mean of the parts' means is 3.5
    a, b = Stats(), Stats()
    a.add("loss", 6.0, 1)
    b.add("loss", 3.0, 3)
    assert merged([a, b]).means() == {"loss": 2.25}
    assert a.means() == {"loss": 6.0}, "adding leaves its parts alone"


def test_a_name_with_count_zero_is_absent_even_when_its_sum_is_nan() -> None:
    stats = Stats()
    stats.add("reward", math.nan, 0)
    stats.add("kl", torch.tensor(0.0), torch.tensor(0))
    assert stats.means() == {}


def test_a_sum_can_be_built_before_it_is_counted() -> None:
    stats = Stats()
    stats.add("loss", torch.tensor(0.25), 0)
    stats.add("loss", torch.tensor(0.5), 0)
    stats.add("loss", 0.0, 1)
    assert stats.means() == {"loss": 0.75}


def test_a_nan_that_was_counted_is_not_hidden() -> None:
    stats = Stats()
    stats.add("loss", math.nan, 1)
    stats.peak("gap", 1.0)
    stats.peak("gap", math.nan)
    stats.peak("gap", 2.0)
    assert math.isnan(stats.means()["loss"])
    assert math.isnan(stats.means()["gap"])


@pytest.mark.parametrize("kinds", [(float, float), (float, torch.tensor), (torch.tensor, float), (torch.tensor,) * 2])
def test_maxima_of_floats_and_tensors(kinds) -> None:
    stats = Stats()
    stats.peak("gap", kinds[0](3.0))
    stats.peak("gap", kinds[1](-4.0))
    other = Stats()
    other.peak("gap", kinds[1](2.0))
    assert merged([other, stats]).means() == {"gap": 3.0}


class Unread(torch.Tensor):
    """Whoever waits for its value is told so."""

    def tolist(self) -> Any:
        raise RuntimeError("read back")

    item = cpu = numpy = __float__ = __bool__ = tolist  # pyright: ignore


def test_adding_reads_no_tensor_back() -> None:
    stats = Stats()
    for _ in range(3):
        stats.add("loss", torch.zeros(()).as_subclass(Unread), torch.ones(()).as_subclass(Unread))
        stats.peak("gap", torch.zeros(()).as_subclass(Unread))
    with pytest.raises(RuntimeError, match="read back"):
        stats.means()


def test_a_tensor_changed_in_place_later_does_not_change_the_statistic() -> None:
    total = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    stats = Stats()
    stats.add("loss", total, 1)
    stats.peak("gap", total)
    with torch.no_grad():
        total.fill_(100.0)
    assert stats.means() == {"loss": 2.0, "gap": 2.0}


def test_low_precision_sums_do_not_lose_counts() -> None:
    # 1000 x 1.0 in bfloat16 arithmetic sticks at 256.
    stats = Stats()
    for _ in range(1000):
        stats.add("loss", torch.tensor(1.0, dtype=torch.bfloat16), 0)
    stats.add("loss", 0.0, 1)
    assert stats.means() == {"loss": 1000.0}


def test_plain_goes_through_json_and_back() -> None:
    stats = Stats()
    stats.add("loss", torch.tensor(3.0), torch.tensor(4))
    stats.add("empty", 0.0, 0)
    stats.peak("gap", torch.tensor(0.5))
    again = Stats.of(json.loads(json.dumps(stats.plain())))
    assert again.plain() == stats.plain()
    assert again.means() == {"loss": 0.75, "gap": 0.5}


def test_ranks_may_hold_different_names() -> None:
    a, b = Stats(), Stats()
    a.add("kl", 1.0, 2)
    b.add("reward", 3.0, 3)
    assert merged([a, b, Stats()]).means() == {"kl": 0.5, "reward": 1.0}
    assert merged([]).means() == {}


def test_wrong_uses_raise() -> None:
    stats = Stats()
    stats.add("loss", 1.0, 1)
    stats.peak("gap", 1.0)
    with pytest.raises(ValueError, match="sum it first"):
        stats.add("kl", torch.ones(2), 2)
    with pytest.raises(ValueError, match="maximum"):
        stats.add("gap", 1.0, 1)
    with pytest.raises(ValueError, match="mean"):
        stats.peak("loss", 1.0)
