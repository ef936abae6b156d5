"""The records that travel from prompt to weight update, and the checks on their shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import compress
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor

ABSENT = cast(Tensor, None)  # a column no stage has filled yet

Message = Mapping[str, Any]  # {"role": ..., "content": ...}; also tool_calls and reasoning_content


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A problem: what the model reads, and what a verifier needs to judge the answer."""

    prompt: str | Sequence[Message]  # text, or the messages of a chat
    answer: str | None = None  # the right one
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # other columns of the dataset row
    id: str = ""  # the row's own, where it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A reward, or the reason why there is none: a crashed verifier is not a wrong answer."""

    value: float | None  # None: invalid
    parts: Mapping[str, float] = field(default_factory=dict[str, float])  # of a sum: the value of each part
    added: Mapping[str, float] = field(default_factory=dict[str, float])  # what each part added to the value
    reason: str = ""  # why it is invalid; of a program that failed its tests, what it said: shown, never believed

    @property
    def valid(self) -> bool:
        """Whether there is a reward."""
        return self.value is not None


class Stop(StrEnum):
    """Why a rollout ended."""

    TOKEN = "token"  # the policy wrote a stop token
    STRING = "string"  # it wrote a stop string
    LENGTH = "length"  # the limit cut it off: the episode is truncated, not finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sequence, sampled or read from a dataset. Lists have one entry per token."""

    tokens: Sequence[int]  # the prompt, then every turn
    mask: Sequence[bool]  # True where the token is trained on: the policy wrote it
    gen_logp: Sequence[float] = ()  # the sampler's log-prob, 0.0 where mask is False; () for dataset rows
    raw_logp: Sequence[float] = ()  # the same under softmax(logits): no temperature, truncation or penalty
    support_size: Sequence[int] = ()  # how many tokens top-k, top-p and min-p left to draw from; () if not recorded
    support: Sequence[int] = ()  # their ids, of all tokens end to end
    stop: Stop = Stop.TOKEN
    limit: int = 0  # the most tokens the policy was allowed to write; 0 for dataset rows
    outcome: Outcome | None = None  # None: not scored
    step_reward: Sequence[float] = ()  # process rewards at step ends, NaN elsewhere; () for none
    label: float | None = None  # desirable 1 or undesirable 0 (KTO)
    step_label: Sequence[float] = ()  # right 1 or wrong 0 at each step end, NaN elsewhere (PRM)
    margin: float = 0.0  # by how much the chosen one is better (reward model)
    version: int = 0  # the weights that wrote it
    task: Task | None = None
    text: str = ""  # the completion, decoded

    def __post_init__(self) -> None:
        for name in ("mask", "gen_logp", "raw_logp", "support_size", "step_reward", "step_label"):
            n = len(getattr(self, name))
            if n != len(self.tokens) and (n or name == "mask"):
                raise ValueError(f"rollout has {len(self.tokens)} tokens but {n} entries in {name}")
        if self.support_size and sum(self.support_size) != len(self.support):
            raise ValueError(f"rollout has {len(self.support)} ids in support, support_size asks for others")

    def written(self) -> list[int]:
        """The tokens the policy wrote."""
        return list(self.completion())

    def completion(self) -> Sequence[int]:
        """The same as they are held: from an array, without a Python object for each."""
        mask, tokens = self.mask, self.tokens
        start = mask.index(True) if any(mask) else len(mask)
        if all(mask[start:]):  # one turn, as most have
            return tokens[start:]
        return list(compress(tokens, mask))

    def copy_with(self, **changes: Any) -> "Rollout":
        """`replace` in a third of the time, of fields that are no lists: those were checked when it was made."""
        if not changes.keys() <= _PLAIN:
            raise TypeError(f"a rollout is copied with another {', '.join(changes.keys() - _PLAIN)} by replace")
        other = object.__new__(Rollout)
        for name in _NAMES:
            object.__setattr__(other, name, changes[name] if name in changes else getattr(self, name))
        return other


_NAMES = tuple(f.name for f in fields(Rollout))
_PLAIN = frozenset({"stop", "limit", "outcome", "label", "margin", "version", "task", "text"})
Group = list[Rollout]  # rollouts of one prompt; for preference data [chosen, rejected]


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The tokens that the sampler could have drawn at each place. The policy is renormalised on them in training."""

    first: Tensor  # int64 [B, T]  where the ids of a place begin; of places in a row also [N]
    size: Tensor  # int64 [B, T]  how many there are, 0 where the mask is False
    ids: Tensor  # int64 [M]  of all places; rows that are picked out share them

    NAMES: ClassVar[tuple[str, ...]] = ("support_first", "support_size", "support_ids")

    def columns(self) -> dict[str, Tensor]:
        """What a file holds of it, by NAMES."""
        return dict(zip(self.NAMES, (self.first, self.size, self.ids), strict=True))

    def rows(self, index: int | slice | Tensor) -> "Support":
        """Some of the rows, or the places of one."""
        return replace(self, first=self.first[index], size=self.size[index])

    def at(self, cells: Tensor) -> "Support":
        """The values at these cells of the table, [N]. Cells are counted row by row."""
        return replace(self, first=self.first.flatten()[cells], size=self.size.flatten()[cells])

    def to(self, device: torch.device) -> "Support":
        """The same on another device."""
        return Support(
            first=to_device(self.first, device), size=to_device(self.size, device), ids=to_device(self.ids, device)
        )

    def outside(self, places: slice, vocab: int) -> Tensor:
        """bool [n, vocab]: True where a token could not have been drawn."""
        first, size = self.first[places], self.size[places]
        row = torch.arange(len(size), device=size.device).repeat_interleave(size)
        before = (size.cumsum(0) - size)[row]  # ids of the places before
        ids = self.ids[first[row] + torch.arange(len(row), device=size.device) - before]
        out = torch.ones(len(size), vocab, dtype=torch.bool, device=size.device)
        out[row, ids] = False
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A table of B sequences. Each stage of the pipeline adds columns and rewrites none.

    Every [B, T] column is aligned to `targets`: the shift happens once, in collate. The last real
    position of a row has no target (mask False); a value there is read after the last token, which
    is where rewards are scored and truncated episodes bootstrapped.
    Preference batches hold row 2p = chosen, row 2p+1 = rejected. A column that no stage has filled is None.
    """

    inputs: Tensor  # int64 [B, T]  what the model reads
    targets: Tensor  # int64 [B, T]  targets[b, t] is the token after inputs[b, t]
    mask: Tensor  # bool  [B, T]  True where the target is trained on
    real: Tensor  # bool  [B, T]  True where inputs is not padding; only model/layout reads it
    group: Tensor  # int64 [B]     rows sampled from one prompt share an id
    place: Tensor = ABSENT  # int64 [B]     the row's number among those of every rank
    reward: Tensor = ABSENT  # float [B]     0.0 where invalid
    valid: Tensor = ABSENT  # bool  [B]     the reward is a number (by default all are); else the row's mask is False
    truncated: Tensor = ABSENT  # bool  [B]     cut off by the length limit
    limit: Tensor = ABSENT  # int64 [B]     the most tokens the policy was allowed to write
    step_reward: Tensor = ABSENT  # float [B, T]  NaN where no step ends
    label: Tensor = ABSENT  # float [B] or [B, T]  KTO desirability, PRM step labels
    margin: Tensor = ABSENT  # float [B]     by how much the chosen one is better (reward model)
    gen_logp: Tensor = ABSENT  # float [B, T]  under the sampler that wrote the tokens
    old_logp: Tensor = ABSENT  # float [B, T]  under the policy when the batch was annotated
    ref_logp: Tensor = ABSENT  # float [B, T]  under the frozen reference
    ref_kl: Tensor = ABSENT  # float [B, T]  exact KL(old || ref) of the next-token distribution
    old_value: Tensor = ABSENT  # float [B, T]  of the critic when the batch was annotated
    bootstrap: Tensor = ABSENT  # float [B]     value after the last token, 0 where the episode finished
    baseline: Tensor = ABSENT  # float [B]     running mean of earlier rewards
    kl_coef: Tensor = ABSENT  # float [B]     coefficient of the KL penalty, fixed or adaptive
    kl_baseline: Tensor = ABSENT  # float [B]     KTO's z0, the same number on every row
    adv: Tensor = ABSENT  # float [B, T]  the advantage of each token
    returns: Tensor = ABSENT  # float [B, T]  the critic's target
    token_weight: Tensor = ABSENT  # float [B, T]  loss weight, fixed before micro-batching
    row_weight: Tensor = ABSENT  # float [B]     the same for losses of whole rows
    support: Support | None = None  # under top-k, top-p or min-p: what the sampler could have drawn
    host_copy: "Batch | None" = None  # the first six of a batch on a GPU, on the host: to plan passes without waiting

    def __post_init__(self) -> None:
        _check_columns(self.columns(), self.targets)
        if self.reward is not ABSENT and self.valid is ABSENT:
            if not bool(self.reward.isfinite().all()):
                raise ValueError("a reward is not finite: write 0.0 there, and False in the column valid")
            object.__setattr__(self, "valid", torch.ones_like(self.reward, dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.targets)

    def columns(self) -> dict[str, Tensor]:
        """The columns that are filled."""
        filled = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("host_copy", "support")}
        return {name: x for name, x in filled.items() if x is not ABSENT}

    @property
    def host(self) -> "Batch":
        """Where a number can be read without waiting for a GPU: inputs, targets, mask, real, group and place."""
        return self if self.host_copy is None else self.host_copy

    def rows(self, index: slice | Tensor) -> Self:
        """The same columns, fewer rows; an index may be on the host."""
        host_copy = (
            None if self.host_copy is None else self.host_copy.rows(index.cpu() if isinstance(index, Tensor) else index)
        )
        at = to_device(index, self.targets.device) if isinstance(index, Tensor) else index
        support = None if self.support is None else self.support.rows(at)
        return replace(
            self, host_copy=host_copy, support=support, **{name: x[at] for name, x in self.columns().items()}
        )

    def constant(self, value: float) -> Tensor:
        """A [B] column of one number, as precise as the columns there are."""
        dtype = next((x.dtype for x in self.columns().values() if x.is_floating_point()), None)
        return torch.full((len(self),), value, dtype=dtype, device=self.targets.device)

    def to(self, device: torch.device | str) -> Self:
        """The same columns on another device."""
        device = torch.device(device)
        moved = {name: to_device(x, device) for name, x in self.columns().items()}
        host_copy = self.host_copy if device.type != "cpu" else None
        if self.targets.is_cpu and device.type != "cpu":
            names = ("inputs", "targets", "mask", "real", "group", "place")
            host_copy = Batch(**{name: getattr(self, name) for name in names})
        support = None if self.support is None else self.support.to(device)
        return replace(self, host_copy=host_copy, support=support, **moved)


PER_ROW = frozenset(
    {"group", "place", "reward", "valid", "truncated", "limit", "margin", "bootstrap", "baseline", "kl_coef"}
    | {"kl_baseline", "row_weight"}
)
FLAGS = frozenset({"mask", "real", "valid", "truncated"})
WHOLE = frozenset({"inputs", "targets", "group", "place", "limit"})


def _check_columns(columns: Mapping[str, Tensor], targets: Tensor) -> None:
    """Refuse what broadcasting and rounding would turn into other numbers without a word."""
    if targets.ndim != 2:
        raise ValueError(f"targets has shape {tuple(targets.shape)}, expected [B, T]: a row for each sequence")
    table, rows = targets.shape, targets.shape[:1]
    for name, x in columns.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name} is a {type(x).__name__}: give a tensor")
        if x.shape != (rows if name in PER_ROW else table) and not (name == "label" and x.shape == rows):
            expected = (
                f"{tuple(table)} or {tuple(rows)}" if name == "label" else tuple(rows if name in PER_ROW else table)
            )
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {expected}")
        if name in FLAGS:
            if x.dtype is not torch.bool:
                raise ValueError(f"{name} is {x.dtype}, expected bool: write {name}.bool()")
        elif name not in WHOLE and not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}, expected floating point: write {name}.float()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one forward pass gives the loss; a field nobody asked for is ABSENT."""

    logp: Tensor = ABSENT  # float [B, T]  log-prob of `targets`, 0 off the mask
    entropy: Tensor = ABSENT  # float [B, T]  of the whole next-token distribution, 0 off the mask
    value: Tensor = ABSENT  # float [B, T]  value, reward or step head, 0 on padding
    ref_kl: Tensor = ABSENT  # float [B, T]  exact KL(policy || reference), 0 off the mask
    old_kl: Tensor = ABSENT  # float [B, T]  exact KL(old || policy), 0 off the mask


class ForwardModel(Protocol):
    """Anything that maps a batch to the asked-for fields of a Forward."""

    def __call__(self, batch: Batch, want: frozenset[str]) -> Forward: ...


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """On its way to the device, which nobody waits for."""
    return x.pin_memory().to(device, non_blocking=True) if x.is_cpu and device.type == "cuda" else x.to(device)


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B]"""
    return torch.where(mask, x, 0.0).sum(-1)


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B]; rows with no trained token give 0."""
    return sequence_sum(x, mask) / mask.sum(-1).clamp(min=1)
