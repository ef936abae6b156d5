"""A policy of which each rank holds a part: the parts that the optimiser steps, and the whole gathered again."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Iterator as Passes
from typing import Any

import torch
from torch import Tensor, nn

from hone.dist import collect
from hone.dist.collect import is_sharded, local_part
from hone.dist.spread import (
    cut_part,
    fsdp_units,
    full_from_part,
    full_tensor,
    materialise,
    mesh_of,
    meta_copy,
    reshard,
    shard,
)
from hone.model.decoder import Decoder
from hone.model.policy import OwnCritic, Policy, frozen_policy
from hone.model.scorer import ScalarHead, Scorer
from hone.storage.files import optimizer_tensors
from hone.train.optim import parameters_of
from hone.types import Batch


class Shards:
    """The decoders spread over all ranks; a scalar head stays whole on each of them.

    The optimiser steps `parts_of(parameters)`: plain tensors in the memory of this rank's parts. Trained weights keep
    their type and compute in `half`; frozen ones are stored in `half`.
    each: sum gradients over ranks after every micro-batch, so that no rank ever holds all of them.
    """

    def __init__(
        self, policy: Policy | Scorer, *, device: torch.device, half: torch.dtype | None = None, each: bool = False
    ) -> None:
        self.policy, self.half, self.each, self.device = policy, half, each, device
        self._bare = meta_copy(saved_part(policy))
        for decoder in decoders_of(policy):
            shard_decoder(decoder, device=device, half=half)
        for head in (m for m in policy.modules() if isinstance(m, ScalarHead)):
            head.to(device)
        self._named = dict(policy.named_parameters())
        spread_parameters = [p for p in self.trained().values() if is_sharded(p)]
        self._parts: dict[nn.Parameter, nn.Parameter] = {p: nn.Parameter(local_part(p)) for p in spread_parameters}
        self._origin = {part: p for p, part in self._parts.items()}
        self._published: Decoder | None = None

    # --- what the optimiser steps ---

    @property
    def parts(self) -> frozenset[nn.Parameter]:
        """The parts that this rank steps. Other ranks hold the rest of each."""
        return frozenset(self._origin)

    @property
    def sizes(self) -> dict[Tensor, int]:
        """How many numbers all ranks hold of each part together."""
        return {part: p.numel() for part, p in self._origin.items()}

    def parts_of(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parts that the optimiser steps instead of the parameters, in order."""
        return [self._parts.get(p, p) for p in parameters]

    def trained(self) -> dict[str, nn.Parameter]:
        """The policy's own trained parameters, by name."""
        return {name: p for name, p in self._named.items() if p.requires_grad}

    def passes(self, micro: Iterable[Batch], empty: Batch) -> Passes[Batch]:
        """The same number of micro-batches on every rank. After the last one the parts have the summed gradients.

        empty: the micro-batch of a rank that has no more of its own: each pass gathers layers, which takes all ranks.
        """
        todo = collect.pad_to_largest(micro, empty)
        for i, batch in enumerate(todo):
            self.sum_gradients(self.each or i == len(todo) - 1)
            yield batch
        for p, part in self._parts.items():
            part.grad = None if p.grad is None else local_part(p.grad)
            p.grad = None

    def sum_gradients(self, now: bool) -> None:
        """Set whether the next backward pass sums gradients over ranks."""
        for unit in fsdp_units(self.policy):
            unit.set_requires_gradient_sync(now, recurse=False)

    # --- the whole model ---

    def frozen_copy(self) -> Policy:
        """A copy of the policy without gradients, spread in the same way."""
        assert isinstance(self.policy, Policy)
        reshard(self.policy)
        twin = self.make_empty(torch.device("meta")).requires_grad_(False)
        assert isinstance(twin, Decoder)
        shard(twin, mesh_of(self.device), half=self.half)
        materialise(twin, self.device)
        with torch.no_grad():
            for x, y in zip(twin.parameters(), self.policy.decoder.parameters(), strict=True):
                local_part(x).copy_(local_part(y))
        return frozen_policy(twin, self.policy)

    @property
    def sampled(self) -> Decoder:
        """The weights of the last `publish`. A sampler may be reading them."""
        return self._published if self._published is not None else self.publish()

    def publish(self) -> Decoder:
        """Gather the policy's decoder on every rank, always into the same memory, which the sampler reads."""
        twin = self._published if self._published is not None else self.make_empty(self.device)
        assert isinstance(twin, Decoder)
        self._published = twin
        self._gather(twin)
        return twin

    def saved(self) -> Decoder | Scorer:
        """The model as it is now, on the first rank's CPU; every rank takes part, and the others get a skeleton."""
        twin = self.make_empty(torch.device("meta" if collect.world()[0] else "cpu"))
        self._gather(twin)
        if isinstance(twin, Scorer) and isinstance(self.policy, Scorer):
            twin.separator = self.policy.separator
        return twin

    def _gather(self, twin: Decoder | Scorer) -> None:
        """Copy one weight after the other, so that a device holds only one of them beside its parts and the twin."""
        reshard(self.policy)
        with torch.no_grad():
            for x, y in zip(twin.parameters(), saved_part(self.policy).parameters(), strict=True):
                full = full_tensor(y)
                if not x.is_meta:
                    x.copy_(full)

    def make_empty(self, device: torch.device) -> Decoder | Scorer:
        """The model with uninitialised weights; on the meta device they take no memory."""
        twin = copy.deepcopy(self._bare)
        twin = twin if self.half is None else twin.to(self.half)
        return twin if device.type == "meta" else materialise(twin, device)

    # --- checkpoints: whole tensors on the first rank ---

    def whole_weights(self) -> dict[str, Tensor]:
        """The trained weights by name; every rank takes part."""
        reshard(self.policy)
        return {name: on_first_rank(full_tensor(p)) for name, p in self.trained().items()}

    def whole_moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The optimiser's tensors by the names of optimizer_tensors; every rank takes part."""
        tensors = optimizer_tensors(optimizer)
        like = {name: self._like(optimizer, name, x) for name, x in tensors.items()}
        return {
            name: on_first_rank(x if like[name] is None else full_from_part(x, like[name]))
            for name, x in tensors.items()
        }

    def own_moments(self, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of `whole_moments`, whatever number of ranks saved them."""
        like = {name: self._like(optimizer, name, x) for name, x in moments.items()}
        return {name: x if like[name] is None else cut_part(x, like[name]) for name, x in moments.items()}

    def _like(self, optimizer: torch.optim.Optimizer, name: str, x: Tensor) -> Any:
        """The parameter whose layout this state has; None: it is whole on every rank."""
        parameters, index = parameters_of(optimizer), int(name.partition(".")[0])
        return self._origin.get(parameters[index]) if x.ndim and index < len(parameters) else None

    def whole_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of tensors that are spread; every rank takes part."""
        return {name: on_first_rank(full_tensor(x)) for name, x in state.items()}

    @torch.no_grad()
    def load(self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Load whole weights into parameters that are spread."""
        reshard(self.policy)
        for name, p in parameters.items():
            local_part(p).copy_(cut_part(weights[name], p) if is_sharded(p) else weights[name])


def on_first_rank(x: Tensor) -> Tensor:
    """Move a tensor to the CPU of the first rank; the others drop it."""
    return x.cpu() if collect.world()[0] == 0 else x.new_empty(0)


def decoders_of(policy: Policy | Scorer) -> list[Decoder]:
    """The policy's own decoder, and a critic's."""
    critic = policy.critic if isinstance(policy, Policy) else None
    return [policy.decoder, *([critic.decoder] if isinstance(critic, OwnCritic) else [])]


def saved_part(policy: Policy | Scorer) -> Decoder | Scorer:
    """The part that is a model of its own: the decoder, if a policy has a critic."""
    return policy.decoder if isinstance(policy, Policy) else policy


def shard_decoder(decoder: Decoder, *, device: torch.device, half: torch.dtype | None) -> None:
    """Spread the decoder over ranks from any device. Weights that are not trained are stored in half precision."""
    for p in decoder.parameters() if half is not None else ():
        if not p.requires_grad:
            p.data = p.data.to(half)
    shard(decoder, mesh_of(device), half=half)
