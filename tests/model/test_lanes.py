"""Passes side by side: the numbers of passes one after the other, in their order, whatever happens in between."""

from typing import Any

import pytest
import torch
from fast_models import model
from row_cases import DEVICES, ROWS, batch_of

from hone.model.backends.fused import cuda_graphs
from hone.model.backends.fused.streams import LANES, lane, side_by_side
from hone.model.policy import Policy, frozen_copy
from hone.train.annotate import evaluate

WANT = frozenset({"logp", "entropy"})


def test_calls_take_turns_in_the_lanes_and_leave_them():
    seen: list[int] = []
    found = side_by_side([lambda i=i: seen.append(lane()) or i for i in range(5)], torch.device("cpu"), lambda _: [])
    assert found == [0, 1, 2, 3, 4]
    assert seen == [1, 2, 1, 2, 1]
    assert LANES == 2
    assert lane() == 0


def test_a_call_that_fails_leaves_its_lane():
    def failing() -> int:
        raise ValueError(lane())

    with pytest.raises(ValueError, match="2"):
        side_by_side([lambda: 1, failing], torch.device("cpu"), lambda _: [])
    assert lane() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_slices_read_side_by_side_are_the_batch_read_at_once(device: str):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    policy = frozen_copy(Policy(model("llama", dtype).to(device)))
    policy.decoder.fast_layers, policy.decoder.graphs = True, True
    batch = batch_of(*ROWS["many rows"], device)
    whole = evaluate(policy, batch, WANT, rows=len(batch))
    for _ in range(4):  # recorded on the way, and replayed from then on
        sliced = evaluate(policy, batch, WANT, rows=21)
        for name in WANT:
            a, b = getattr(whole, name).double(), getattr(sliced, name).double()
            assert (a - b).norm() <= (1e-12 if device == "cpu" else 0.02) * a.norm()
    keys: list[Any] = list(cuda_graphs._known[policy.decoder].passes)
    assert {key[0][1] for key in keys} == {0, 1, 2}, "each lane has recordings of its own"
