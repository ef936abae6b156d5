"""Threads of the host and its garbage: those asked for, or what suits where the numbers are computed."""

import gc
import weakref

import pytest
import torch

from hone.train.threads import freeze_objects, threads


@pytest.mark.parametrize(
    ("device", "asked", "offloaded", "expected"),
    [
        ("cpu", 0, False, None),
        ("cpu", 3, False, 3),
        ("cuda", 0, False, 1),
        ("cuda", 0, True, None),
        ("cuda", 5, True, 5),
    ],
)
def test_one_thread_beside_a_gpu_that_does_all(device: str, asked: int, offloaded: bool, expected: int | None):
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # else torch's own number might be 1 too
    try:
        assert threads(torch.device(device), asked=asked, offloaded=offloaded) == (expected or 2)
    finally:
        torch.set_num_threads(before)


def test_what_a_run_is_made_of_is_not_looked_at_again_until_it_ends():
    def interrupted() -> None:
        with freeze_objects():
            assert gc.get_freeze_count() > 1_000
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.get_freeze_count() < 1_000


@pytest.mark.parametrize("old", [False, True])
def test_young_garbage_is_gone_before_and_old_garbage_after(old: bool):
    class Loop:
        def __init__(self) -> None:
            self.me = self

    loop = Loop()
    seen = weakref.ref(loop)
    if old:
        gc.collect()  # what is alive in it is looked at last from then on
    del loop
    with freeze_objects():
        assert (seen() is None) != old
    gc.collect()
    assert seen() is None
