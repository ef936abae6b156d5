"""Adapters switched: one decoder answers as its base model or with any adapter it holds."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from hone.errors import HoneError
from hone.model.lora import Adapter, adapted_layers, adapter_names, check_adapter
from hone.model.policy import Policy
from hone.model.vocab.distribution import LogRows
from hone.types import Batch, Forward


@contextmanager
def use_adapter(decoder: nn.Module, name: str | None) -> Iterator[None]:
    """Inside, the decoder has this adapter on, or none; which one is trained does not change."""
    if name is not None:
        check_adapter(decoder, name)
    before = [(m, m.selected, m.enabled) for _, m in adapted_layers(decoder)]
    try:
        for module, selected, _ in before:
            module.selected, module.enabled = selected if name is None else name, name is not None
        yield
    finally:
        for module, selected, enabled in before:
            module.selected, module.enabled = selected, enabled


def adapter_off(decoder: nn.Module) -> AbstractContextManager[None]:
    """Inside, the decoder is its base model."""
    return use_adapter(decoder, None)


def adapters_of(decoder: nn.Module) -> dict[str, Adapter]:
    """The parts of the selected adapter by layer."""
    return {layer: m.adapter for layer, m in adapted_layers(decoder) if m.adapter is not None}


def lora_state(decoder: nn.Module) -> dict[str, Tensor]:
    """The selected adapter alone, with PEFT's endings of the names."""
    return {
        f"{layer}.{part}.weight": getattr(adapter, part).detach()
        for layer, adapter in adapters_of(decoder).items()
        for part in ("lora_A", "lora_B")
    }


class ReferenceView:
    """The policy with its adapters off and no gradient: the reference, at no memory cost."""

    def __init__(self, policy: Policy) -> None:
        if not adapter_names(policy.decoder):
            raise HoneError("the policy has no adapters to switch off: use frozen_copy(policy) as its reference")
        self.policy = policy

    @torch.no_grad()
    def __call__(self, batch: Batch, want: frozenset[str]) -> Forward:
        with adapter_off(self.policy.decoder):
            return self.policy(batch, want)

    @torch.no_grad()
    def log_rows(self, batch: Batch) -> LogRows:
        with adapter_off(self.policy.decoder):
            return self.policy.log_rows(batch)
