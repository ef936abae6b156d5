"""Changes weights for a moment and restores them bit for bit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn

from hone.train.learner import Learner

BLOCK = 2**17  # numbers of a tensor that are changed: the first rows of a large one, which costs next to nothing
SCALE = 0.3  # root mean square of the noise, relative to that of the tensor


@contextmanager
def perturb_weights(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, noise of 0.3 times each tensor's root mean square (0.1 where it is all zero) is added to it."""
    parts = [p.detach().view(-1)[:BLOCK] for p in parameters]
    before = [part.clone() for part in parts]
    generator = torch.Generator().manual_seed(0)
    try:
        for p, part in zip(parameters, parts, strict=True):
            size = rms(p) or 0.1 / SCALE  # the half of an adapter that starts at zero
            part.add_((torch.randn(len(part), generator=generator) * SCALE * size).to(p.device, p.dtype))
        yield
    finally:
        put_back(parts, before)


def rms(x: torch.Tensor) -> float:
    """The root mean square of its numbers."""
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.float32)) / max(x.numel(), 1) ** 0.5


@torch.no_grad()
def put_back(parameters: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """p <- value"""
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


@contextmanager
def restore_after(learner: Learner, parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Inside, the learner may step. After it, weights, moments and counters are restored. Yields the old weights."""
    before = [p.detach().clone() for p in parameters]
    moments = deepcopy(learner.optimizer.state_dict())
    counters = learner.updates, learner.version, dict(learner.control)
    try:
        yield before
    finally:
        put_back(parameters, before)
        learner.optimizer.load_state_dict(moments)
        learner.updates, learner.version, learner.control = counters
        learner.optimizer.zero_grad(set_to_none=True)
