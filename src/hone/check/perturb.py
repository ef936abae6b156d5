"""Weights moved for a moment and put back bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn

from hone.train.learner import Learner


@contextmanager
def moved(parameters: Sequence[nn.Parameter], *, scale: float = 0.3, seed: int = 0) -> Iterator[None]:
    """Inside, noise of `scale` times each tensor's root mean square (0.1 where it is all zero) is added to it."""
    before = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for p in parameters:
                size = float(p.square().mean().sqrt()) or 0.1 / scale  # the half of an adapter that starts at zero
                p.add_((torch.randn(p.shape, generator=generator) * scale * size).to(p.device, p.dtype))
        yield
    finally:
        put_back(parameters, before)


@torch.no_grad()
def put_back(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """p <- value"""
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


@contextmanager
def kept(learner: Learner, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, the learner may step; after it, weights, moments and counters are as they were."""
    before = [p.detach().clone() for p in parameters]
    moments = deepcopy(learner.optimizer.state_dict())
    counters = learner.updates, learner.version, dict(learner.control)
    try:
        yield
    finally:
        put_back(parameters, before)
        learner.optimizer.load_state_dict(moments)
        learner.updates, learner.version, learner.control = counters
        learner.optimizer.zero_grad(set_to_none=True)
