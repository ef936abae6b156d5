"""Copies of parameters that the optimiser steps in their place: gradients add up in them.

In float32 where the parameters compute in half precision; in the host's memory where a GPU's is short.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hone.model.vocab.distribution import wide


class Masters:
    """One copy for each parameter, of at least float32.

    bfloat16 has 8 bits of mantissa: a step of less than 1/512 of a weight would be lost, and so would a micro-batch's
    gradient beside the sum of many. The gradient of each backward pass is moved into the copy as soon as it is there.
    device: where the copies are, their gradients and the optimiser's moments with them; None: beside the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, device: torch.device | None = None) -> None:
        self._copies = {p: nn.Parameter(wide(p).detach().to(device or p.device, copy=True)) for p in parameters}
        for p in self._copies:
            p.register_post_accumulate_grad_hook(self._take)

    @property
    def half(self) -> bool:
        """Whether parameters are kept in fewer bits than their copies."""
        return any(p.dtype != copy.dtype for p, copy in self._copies.items())

    def of(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Their copies, in order."""
        return [self._copies[p] for p in parameters]

    def _take(self, p: Tensor) -> None:
        copy, p_grad = self._copies[p], p.grad  # pyright: ignore[reportArgumentType]
        assert p_grad is not None, "the hook runs when there is one"
        if copy.grad is None:
            copy.grad = p_grad.to(copy.device, copy.dtype)
        else:
            copy.grad += p_grad.to(copy.device)
        p.grad = None

    @torch.no_grad()
    def publish(self, *_: object) -> None:
        """Round every copy into its parameter; the optimiser calls it after each step."""
        mine, copies = list[Tensor](self._copies), list[Tensor](self._copies.values())
        torch._foreach_copy_(mine, copies)  # pyright: ignore[reportPrivateImportUsage]


def trained(policy: nn.Module, masters: Masters | None) -> dict[str, nn.Parameter]:
    """What the optimiser steps, by name: the parameters, or their copies."""
    found = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    return found if masters is None else dict(zip(found, masters.of(list(found.values())), strict=True))
