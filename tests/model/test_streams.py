"""Passes side by side: the numbers of passes one after the other, in their order, whatever happens in between."""

from typing import Any

import pytest
import torch
from fast_models import model
from row_cases import DEVICES, ROWS, batch_of

from hone.model.backends.fused import cuda_graphs
from hone.model.backends.fused.streams import STREAMS, CudaStreams, run_on_streams, stream_number
from hone.model.policy import Policy, frozen_copy
from hone.train.annotate import forward_in_slices

WANT = frozenset({"logp", "entropy"})


def test_calls_take_turns_on_the_streams_and_leave_them():
    seen: list[int] = []
    found = run_on_streams(
        [lambda i=i: seen.append(stream_number()) or i for i in range(5)], torch.device("cpu"), lambda _: []
    )
    assert found == [0, 1, 2, 3, 4]
    assert seen == [1, 2, 1, 2, 1]
    assert STREAMS == 2
    assert stream_number() == 0


def test_a_call_that_fails_leaves_its_stream():
    def failing() -> int:
        raise ValueError(stream_number())

    with pytest.raises(ValueError, match="2"):
        run_on_streams([lambda: 1, failing], torch.device("cpu"), lambda _: [])
    assert stream_number() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_slices_read_side_by_side_are_the_batch_read_at_once(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CudaStreams, "covers", lambda *_: None)  # on a CPU the same steps are taken
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    policy = frozen_copy(Policy(model("llama", dtype).to(device)))
    policy.decoder.backends = ("fused", "graphs")
    batch = batch_of(*ROWS["many rows"], device)
    whole = forward_in_slices(policy, batch, WANT, rows=len(batch))
    for _ in range(4):  # recorded on the way, and replayed from then on
        sliced = forward_in_slices(policy, batch, WANT, rows=21)
        for name in WANT:
            a, b = getattr(whole, name).double(), getattr(sliced, name).double()
            assert (a - b).norm() <= (1e-12 if device == "cpu" else 0.02) * a.norm()
    keys: list[Any] = list(cuda_graphs._known[policy.decoder].passes)
    assert {key[0][1] for key in keys} == {0, 1, 2}, "each stream has recordings of its own"
