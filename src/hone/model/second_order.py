"""Whether gradients will be differentiated again: fused layers and attention have no second gradient."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

_callers = [0]


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Layers and attention are plain operations in here (TRPO)."""
    _callers[0] += 1
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _callers[0] -= 1


def once() -> bool:
    """Whether nobody differentiates twice."""
    return not _callers[0]
