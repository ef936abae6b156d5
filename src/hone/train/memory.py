"""Memory that runs out: what was tried is forgotten, and tried again with less at once."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
SIGNS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of errors that torch has no class of its own for


def ran_out(error: Exception) -> bool:
    """Whether it is memory that was missing."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in SIGNS)


def release() -> None:
    """Give back what torch keeps for later: it may lie in pieces that are too small."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def retried(attempt: Callable[[], T], smaller: Callable[[], None]) -> T:
    """What the attempt returns, which begins anew each time memory has run out and `smaller` has not refused."""
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
        # not in the handler: the error's traceback holds all that the attempt had in memory
        release()
        smaller()
