"""A recorded pass keeps the memory that it needs, whatever other code does to torch's caches."""

import pytest
import torch

from hone.model.kernels.recording import Recording


@pytest.mark.gpu
def test_a_recording_outlives_the_scratch_memory_that_cublas_had():
    a = torch.randn(3_000, 3_000, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def run() -> None:
        torch.mm(a, a.t(), out=out)

    def fill() -> list[torch.Tensor]:
        return [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]

    run()
    expected = out.clone()
    first = Recording(run, None)
    second = Recording(run, None)
    del first
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does when it records
    torch.cuda.empty_cache()
    others = fill()
    out.zero_()
    second.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert all(x.isnan().all() for x in others)
