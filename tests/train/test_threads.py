"""Threads of the host: those asked for, or what suits where the numbers are computed."""

import pytest
import torch

from hone.train.threads import threads


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
