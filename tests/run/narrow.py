"""`hone` on ranks of which the second has no room for more than two rows with their gradients."""

import os
import sys
from typing import Any

import torch

from hone.cli import main
from hone.model.policy import Policy


def narrow(function: Any, policy: Policy, batch: Any, want: Any) -> Any:
    """The pass, where it fits."""
    if os.environ["RANK"] == "1" and torch.is_grad_enabled() and len(batch) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return function(policy, batch, want)


if __name__ == "__main__":
    forward = Policy.forward
    Policy.forward = lambda self, batch, want: narrow(forward, self, batch, want)  # pyright: ignore
    sys.exit(main(sys.argv[1:]))
