"""Float32 copies of parameters that compute in half precision: gradients add up in them, the optimiser steps them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Masters:
    """One float32 copy for each parameter.

    bfloat16 has 8 bits of mantissa: a step of less than 1/512 of a weight would be lost, and so would a micro-batch's
    gradient beside the sum of many. The gradient of each backward pass is moved into the copy as soon as it is there.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._copies = {p: nn.Parameter(p.detach().float()) for p in parameters}
        for p in self._copies:
            p.register_post_accumulate_grad_hook(self._take)

    def of(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Their copies, in order."""
        return [self._copies[p] for p in parameters]

    def _take(self, p: Tensor) -> None:
        copy, p_grad = self._copies[p], p.grad  # pyright: ignore[reportArgumentType]
        assert p_grad is not None, "the hook runs when there is one"
        if copy.grad is None:
            copy.grad = p_grad.float()
        else:
            copy.grad += p_grad
        p.grad = None

    @torch.no_grad()
    def publish(self, *_: object) -> None:
        """Round every copy into its parameter; the optimiser calls it after each step."""
        mine, copies = list[Tensor](self._copies), list[Tensor](self._copies.values())
        torch._foreach_copy_(mine, copies)  # pyright: ignore[reportPrivateImportUsage]


def trained(policy: nn.Module, masters: Masters | None) -> dict[str, nn.Parameter]:
    """What the optimiser steps, by name: the parameters, or their float32 copies."""
    found = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    return found if masters is None else dict(zip(found, masters.of(list(found.values())), strict=True))
