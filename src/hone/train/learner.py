"""The learner: a policy, its optimiser, and the rest of what a checkpoint has to hold of training."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from hone.algo.table import Algorithm
from hone.errors import HoneError
from hone.model.decoder import reads_many_rows
from hone.model.policy import Policy, frozen_copy
from hone.train import optim
from hone.train.cut import BUNDLED, CACHE, fitting, micro_batches
from hone.train.guard import Guard
from hone.train.masters import Masters, trained
from hone.types import Batch, Model

if TYPE_CHECKING:
    from hone.train.shards import Shards  # loading torch's sharding takes half a second


class Trainable(Model, Protocol):
    """A model whose parameters are the actor's and the critic's; `old` is what KL(old || now) compares with."""

    old: Any

    def actor_parameters(self) -> list[nn.Parameter]: ...

    def critic_parameters(self) -> list[nn.Parameter]: ...


@dataclass(slots=True, kw_only=True)
class Learner:
    """The policy with its optimiser, and all else that changes from update to update."""

    policy: Trainable
    optimizer: torch.optim.Optimizer
    schedule: optim.Schedule = optim.constant
    reference: Model | None = None
    masters: Masters | None = None  # copies that are stepped: of a model in half precision, or on the host
    shards: "Shards | None" = None  # where each rank holds a part of the weights
    micro_rows: int = 64
    micro_tokens: int = 0  # in place of micro_rows, where it is set
    clip_norm: float = 1.0
    updates: int = 0  # optimiser steps taken
    guard: Guard = field(default_factory=Guard)  # of updates that are not finite
    version: int = 0  # iterations done: the version of the weights the sampler reads
    moved: bool = False  # whether weights may be others than when the last iteration ended
    control: dict[str, float] = field(default_factory=dict[str, float])  # adaptive numbers, by column

    @property
    def device(self) -> torch.device:
        """Where the policy computes, and its batches have to be."""
        if self.masters is None:
            return optim.parameters_of(self.optimizer)[0].device
        return next(cast(nn.Module, self.policy).parameters()).device  # the copies may be elsewhere

    def end(self) -> None:
        """An iteration is done."""
        self.version, self.moved = self.version + 1, False

    def trained(self) -> dict[str, nn.Parameter]:
        """What gradients end up in, by name."""
        policy = cast(nn.Module, self.policy)
        return trained(policy, self.masters) if self.shards is None else self.shards.trained()

    def frozen_copy(self) -> Policy:
        """The policy as it is now, without gradients."""
        return frozen_copy(cast(Policy, self.policy)) if self.shards is None else self.shards.frozen_copy()

    def rows_of(self, batch: Batch) -> int:
        """How many rows of the batch are in memory at once when they are only read."""
        longest = int(batch.host.real.sum(-1).max()) if len(batch) else 0
        most = BUNDLED if reads_many_rows(cast(nn.Module, self.policy)) else CACHE
        fit = fitting(longest, rows=self.micro_rows, tokens=self.micro_tokens, device=self.device, most=most)
        return max(1, fit // self.guard.divisor)

    def cut(self, batch: Batch, unit: int) -> Iterator[Batch]:
        """The micro-batches of an update."""
        return micro_batches(
            batch, rows=self.micro_rows, tokens=self.micro_tokens, unit=unit, divisor=self.guard.divisor
        )

    def halve(self, batch: Batch, unit: int) -> None:
        """Smaller micro-batches from here on, or HoneError where they cannot be: memory ran out on this batch."""
        before = self._largest(batch, unit)
        if before <= unit:
            tokens = int(batch.real.sum(-1).max()) if len(batch) else 0
            raise HoneError(
                f"out of memory with {before} rows at once, of up to {tokens} tokens: set train.recompute=always, "
                "train.micro_rows=1, or shorter rows (model.context, sample.max_tokens)"
            )
        while (now := self._largest(batch, unit)) == before:
            self.guard.divisor *= 2
        if self.shards is not None:  # other ranks are in the middle of a pass that takes this one too
            self.guard.leave()
            raise HoneError(
                f"out of memory with {before} rows at once: resume, which goes on with at most {now} on every rank "
                "(torchrun --max-restarts=3 -m hone run RECIPE --resume does so by itself)"
            )
        self.guard.events.append(f"out of memory with {before} rows at once: at most {now} from here on")

    def _largest(self, batch: Batch, unit: int) -> int:
        return max((len(micro) for micro in self.cut(batch, unit)), default=0)

    def begin(self, algo: Algorithm) -> None:
        """Give each adaptive number its start unless a checkpoint has given it a value."""
        for c in algo.control:
            self.control.setdefault(c.column, c.start)
