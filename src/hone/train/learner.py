"""The learner: a policy, its optimiser, and the rest of what a checkpoint has to hold of training.

Also how a batch is cut: into minibatches, an update each, of the rows of all ranks; into micro-batches, what memory
holds at once; and into smaller ones where memory runs out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from hone.algo.table import Algorithm
from hone.dist import collect
from hone.errors import HoneError
from hone.model.decoder import reads_many_rows
from hone.model.policy import Policy, frozen_copy
from hone.train import optim
from hone.train.guard import Guard
from hone.train.optim import Masters, trained
from hone.types import ABSENT, Batch, ForwardModel

if TYPE_CHECKING:
    from hone.train.shards import Shards  # loading torch's sharding takes half a second

T = TypeVar("T")
CACHE = 4096  # tokens at once on a CPU: more do not fit its caches, and each takes longer
BUNDLED = 16_384  # the same of passes without gradients that bundle rows: threads share many tokens more evenly
OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # errors that torch has no class of its own for


class Trainable(ForwardModel, Protocol):
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
    reference: ForwardModel | None = None
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
        """Where the policy computes. Its batches have to be there."""
        if self.masters is None:
            return optim.parameters_of(self.optimizer)[0].device
        return next(cast(nn.Module, self.policy).parameters()).device  # masters may be on another device

    def end_iteration(self) -> None:
        """Count one iteration more."""
        self.version, self.moved = self.version + 1, False

    def trained(self) -> dict[str, nn.Parameter]:
        """The tensors that gradients end up in, by name."""
        policy = cast(nn.Module, self.policy)
        return trained(policy, self.masters) if self.shards is None else self.shards.trained()

    def frozen_copy(self) -> Policy:
        """The policy as it is now, without gradients."""
        return frozen_copy(cast(Policy, self.policy)) if self.shards is None else self.shards.frozen_copy()

    def rows_of(self, batch: Batch) -> int:
        """How many rows of the batch one pass without gradients takes."""
        longest = int(batch.host.real.sum(-1).max()) if len(batch) else 0
        most = BUNDLED if reads_many_rows(cast(nn.Module, self.policy)) else CACHE
        fit = rows_per_pass(longest, rows=self.micro_rows, tokens=self.micro_tokens, device=self.device, most=most)
        return max(1, fit // self.guard.divisor)

    def cut(self, batch: Batch, unit: int) -> Iterator[Batch]:
        """The micro-batches of an update."""
        return micro_batches(
            batch, rows=self.micro_rows, tokens=self.micro_tokens, unit=unit, divisor=self.guard.divisor
        )

    def halve_micro_batches(self, batch: Batch, unit: int) -> None:
        """Memory ran out on this batch: cut smaller micro-batches from here on, or HoneError if that is impossible."""
        before = self._largest(batch, unit)
        if before <= unit:
            tokens = int(batch.real.sum(-1).max()) if len(batch) else 0
            raise HoneError(
                f"out of memory with {before} rows at once, of up to {tokens} tokens: set train.recompute=always, "
                "train.micro_rows=1, or shorter rows (model.context, sample.max_tokens)"
            )
        while (now := self._largest(batch, unit)) == before:
            self.guard.divisor *= 2
        if self.shards is not None:  # the other ranks are in a pass that needs this one
            self.guard.save_divisor()
            raise HoneError(
                f"out of memory with {before} rows at once: resume, which goes on with at most {now} on every rank "
                "(torchrun --max-restarts=3 -m hone run RECIPE --resume does so by itself)"
            )
        self.guard.events.append(f"out of memory with {before} rows at once: at most {now} from here on")

    def _largest(self, batch: Batch, unit: int) -> int:
        return max((len(micro) for micro in self.cut(batch, unit)), default=0)

    def start_controls(self, algo: Algorithm) -> None:
        """Give each number of the algorithm its start. An adaptive one keeps the value that a checkpoint has given."""
        for c in algo.control:
            if not c.reads or c.column not in self.control:
                self.control[c.column] = c.start


# --- how a batch is cut ---


def rows_per_pass(longest: int, *, rows: int, tokens: int, device: torch.device, most: int = CACHE) -> int:
    """How many rows of this length one pass takes: `rows`, or what `tokens` hold. On a CPU at most `most` tokens."""
    fit = tokens // max(1, longest) if tokens else rows
    return max(1, min(fit, most // max(1, longest)) if device.type == "cpu" else fit)


def micro_batches(batch: Batch, *, rows: int, tokens: int = 0, unit: int = 1, divisor: int = 1) -> Iterator[Batch]:
    """Slices of about `rows` rows. The longest come first, so that padding is little and memory peaks at the start.

    With `tokens`, a slice has as many rows as that many tokens hold, padding included. Rows of a unit (a preference
    pair) stay together. Weights are columns already, so any cut gives the same gradient.
    divisor: slices are smaller by this factor.
    """
    length = batch.host.real.sum(-1).view(-1, unit).amax(-1)
    units = length.argsort(descending=True, stable=True)
    index = (units[:, None] * unit + torch.arange(unit, device=units.device)).flatten()
    start, widths = 0, length[units].tolist()
    while start < len(index):
        longest = widths[start // unit]  # the first of a slice is its longest
        fit = rows_per_pass(longest, rows=rows, tokens=tokens, device=batch.mask.device)
        size = max(1, fit // divisor // unit) * unit
        yield batch.rows(index[start : start + size])
        start += size


def split_minibatches(batch: Batch, *, count: int, unit: int, seed: int) -> Iterator[Batch]:
    """The iteration's rows, shuffled by `seed`, in `count` nearly equal parts: one optimiser step each.

    The parts are cut from the rows of all ranks, so that each step learns from the same rows whatever their number.
    """
    return iter((batch,)) if count == 1 else map(batch.rows, minibatch_rows(batch, count=count, unit=unit, seed=seed))


def minibatch_rows(batch: Batch, *, count: int, unit: int, seed: int) -> list[Tensor]:
    """The numbers of each part's rows here."""
    rows = collect.count(len(batch))
    here = torch.full((rows,), -1)  # the index on this rank of each row of all ranks; -1: on another rank
    mine = torch.arange(len(batch))
    here[mine if batch.place is ABSENT else batch.host.place.cpu()] = mine
    order = torch.randperm(rows // unit, generator=torch.Generator().manual_seed(seed))
    parts = order.tensor_split(min(count, len(order)))  # a step may keep fewer units than the settings ask parts for
    found = [here[(part[:, None] * unit + torch.arange(unit)).flatten()] for part in parts]
    return [index[index >= 0] for index in found]


# --- memory that runs out ---


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)


def release_memory() -> None:
    """Give back the memory that torch keeps for later: its blocks may be too small."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def retry_smaller(attempt: Callable[[], T], smaller: Callable[[], None]) -> T:
    """The result of the attempt. When memory runs out, call `smaller` and try again, unless `smaller` raises."""
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # after the handler: the error's traceback holds the attempt's memory
        release_memory()
        smaller()
