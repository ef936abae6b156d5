"""Shares, places and sums over ranks: what each rank is given, and that one process is the case of one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from apart import by_ranks

from hone.dist import collect

torch.set_num_threads(1)


def test_alone_a_share_is_everything_and_a_sum_is_the_number() -> None:
    assert list(range(7))[collect.share(7)] == list(range(7))
    assert collect.places([2, 0, 3]) == [0, 1, 2, 3, 4]
    assert collect.count(4) == 4
    assert collect.gather("x") == ["x"]
    assert collect.world() == (0, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 16])
def test_shares_are_contiguous_nearly_equal_and_lose_nothing(n: int, ranks: int, monkeypatch) -> None:
    parts = list[list[int]]()
    for rank in range(ranks):
        monkeypatch.setattr(collect, "world", lambda rank=rank: (rank, ranks))
        parts.append(list(range(n))[collect.share(n)])
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_buckets_keep_the_order_the_type_and_the_size() -> None:
    sizes = [3, 4, 2, 9, 1, 1]
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    parameters.append(torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    buckets = list(collect._buckets(parameters, size=8))
    assert [[p.numel() for p in b] for b in buckets] == [[3, 4], [2], [9], [1, 1], [2]]
    assert [id(p) for b in buckets for p in b] == [id(p) for p in parameters]


def of_rank() -> dict[str, Any]:
    """What only several processes can show."""
    rank = dist.get_rank()
    grown = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]
    if rank:  # the other has no gradient at all
        for p in grown:
            p.grad = torch.arange(p.numel(), dtype=p.dtype)
    collect.total_gradients(grown)
    x = torch.tensor([1.0 + rank])
    return {
        "places": collect.places([1 + rank, 2]),
        "count": collect.count(rank + 3),
        "total": collect.total(x).tolist(),
        "own": x.tolist(),
        "gradients": [p.grad.tolist() for p in grown if p.grad is not None],
        "gather": collect.gather(rank),
    }


def test_two_ranks_count_as_one_would() -> None:
    seen = by_ranks(2, of_rank)
    assert [s["places"] for s in seen] == [[0, 3, 4], [1, 2, 5, 6]]
    for rank, s in enumerate(seen):
        assert (s["count"], s["total"], s["own"]) == (7, [3.0], [1.0 + rank])
        assert s["gradients"] == [[0.0, 1.0], [0.0, 1.0, 2.0]]
        assert s["gather"] == [0, 1]
