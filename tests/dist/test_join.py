"""Ranks that are started again find each other, whatever those before have left in the store."""

import random
import threading
import time
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from hone.dist.join import fresh_store

PORTS = count()


def store_of(seconds: float) -> Any:
    """Empty; whoever waits for a key in it gives up after so long."""
    store: Any = HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    return store


def read(store: Any, ranks: int, *, late: float) -> list[str]:
    """What each rank of one start reads where rank 0 has written, each in its own thread."""
    found = dict[int, str]()

    def come(rank: int) -> None:
        time.sleep(late * random.Random(rank).random())
        part = fresh_store(store, rank, ranks)
        if not rank:
            part.set("port", str(next(PORTS)))
        found[rank] = part.get("port").decode()

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_start_has_a_part_of_the_store_to_itself(ranks: int):
    store = store_of(30)
    seen = [read(store, ranks, late=0.2) for _ in range(4)]
    assert all(len(set(start)) == 1 for start in seen)
    assert len({start[0] for start in seen}) == 4


def test_ranks_that_came_and_went_before_they_were_answered_are_no_trouble():
    store = store_of(30)
    store.set("hone/asked/1", "a rank that is gone")
    store.set("hone/asked/2", "another")
    assert len(set(read(store, 3, late=0.3))) == 1


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(RuntimeError, match="rank 1 has not come"):
        fresh_store(store_of(0.2), 0, 2)
