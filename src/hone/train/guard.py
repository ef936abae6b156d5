"""Updates that go wrong: those that are not finite, and losses that spike.

A skipped update moves nothing: not the weights, the optimiser, the schedule, nor a control. The gradient's norm
shows it. It is counted, and its rows are kept for `hone replay`. `find_nonfinite` finds what is NaN or infinite, in the
order in which it is computed.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hone.algo.table import Algorithm, objective, old_logp_from_first_pass
from hone.algo.terms import token_ratio
from hone.dist import collect
from hone.errors import HoneError
from hone.storage import files, names
from hone.types import ABSENT, Batch, Forward, ForwardModel, Support

MAY_BE_NAN = frozenset({"step_reward"})  # NaN there means that no step ends at the token
WINDOW, LEAST = 50, 10  # losses that are remembered, and that are needed to judge another


# --- what is not finite ---


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteTensor:
    """A tensor that is not finite: how many of its numbers, and the first of them."""

    name: str  # "weight ...", "adv", "forward.logp", "ratio", "loss.0", "loss", "gradient of ..."
    micro: int  # the first micro-batch that has it, -1 for a weight
    number: int
    size: int
    at: list[int]  # the row first, in a column
    value: str  # "nan", "inf" or "-inf"

    def __str__(self) -> str:
        return f"{self.name} is {self.value} at {self.at}, {self.number} of {self.size} numbers are not finite"

    @property
    def met(self) -> str:
        """The stage of an update in which it appears."""
        if self.micro < 0:
            return "before the forward pass, in the weights"
        if self.name.startswith("gradient of "):
            return f"in the backward pass of micro-batch {self.micro}"
        computed = self.name in ("loss", "ratio") or self.name.startswith(("forward.", "loss."))
        return f"{'in' if computed else 'before'} the forward pass of micro-batch {self.micro}"


def find_nonfinite(
    policy: ForwardModel, cut: Iterable[Batch], algo: Algorithm, *, trained: Mapping[str, nn.Parameter]
) -> list[NonFiniteTensor]:
    """Weights, columns, forward pass, ratio, each term of the loss, the loss, gradients: each tensor once.

    trained: the tensors that hold gradients, by name. Their gradients are overwritten.
    `place` numbers the rows for `NonFiniteTensor.at`.
    """
    found, parts = dict[str, NonFiniteTensor](), list(enumerate(cut))
    for name, x in policy.named_parameters() if isinstance(policy, nn.Module) else ():
        _note(found, _look(f"weight {name}", x, micro=-1))
    for name in parts[0][1].columns() if parts else ():
        for i, micro in parts:
            _note_rows(found, i, micro, {name: micro.columns()[name]})
    for i, micro in parts:
        for p in trained.values():
            p.grad = None
        fwd = policy(micro, algo.wants)
        micro = old_logp_from_first_pass(fwd, micro, algo)
        loss = objective(fwd, micro, algo.loss)
        loss.backward()
        _note_rows(found, i, micro, _computed(fwd, micro, algo))
        _note(found, _look("loss", loss, micro=i))
        for name, p in reversed(list(trained.items())):  # in the order of the backward pass: the last layer first
            _note(found, None if p.grad is None else _look(f"gradient of {name}", p.grad, micro=i))
    return list(found.values())


def _note_rows(found: dict[str, NonFiniteTensor], i: int, micro: Batch, columns: Mapping[str, Tensor]) -> None:
    for name, x in columns.items():
        seen = _look(name, x, micro=i, within=micro.mask, nan_is_fine=name in MAY_BE_NAN)
        _note(found, seen and replace(seen, at=[int(micro.place[seen.at[0]]), *seen.at[1:]]))


def _note(found: dict[str, NonFiniteTensor], seen: NonFiniteTensor | None) -> None:
    if seen is not None:
        found.setdefault(seen.name, seen)


@torch.no_grad()
def _computed(fwd: Forward, batch: Batch, algo: Algorithm) -> dict[str, Tensor]:
    found = {f"forward.{f.name}": x for f in fields(fwd) if (x := getattr(fwd, f.name)) is not ABSENT}
    if fwd.logp is not ABSENT and batch.old_logp is not ABSENT:
        found["ratio"] = token_ratio(fwd, batch)
    return found | {f"loss.{i}": term(fwd, batch) for i, (_, term) in enumerate(algo.loss)}


@torch.no_grad()
def _look(
    name: str, x: Tensor, *, micro: int, within: Tensor | None = None, nan_is_fine: bool = False
) -> NonFiniteTensor | None:
    """What is not finite in the tensor, or None. Of a column, only rows and tokens that are trained on count."""
    x = collect.local_part(x)
    if not x.is_floating_point():
        return None
    bad = x.isinf() if nan_is_fine else ~x.isfinite()
    if within is not None:
        bad = bad & (within if bad.ndim == 2 else within.any(-1))
    where = bad.nonzero()
    if not len(where):
        return None
    at: list[int] = where[0].tolist()
    return NonFiniteTensor(
        name=name, micro=micro, number=len(where), size=x.numel(), at=at, value=str(float(x[tuple(at)]))
    )


# --- skipped updates ---


@dataclass(slots=True, kw_only=True)
class Guard:
    """Counts skipped updates and keeps their rows. stop_reason: why the run should end, "" while it may go on."""

    in_a_row: int = 10  # the run stops at so many skipped updates in a row
    in_all: int = 100  # and at so many in all
    folder: Path | None = None  # None: rows are not kept
    skipped_in_a_row: int = 0
    skipped_in_all: int = 0
    known_nonfinite: int = 0  # weights that were not finite when the run began
    divisor: int = 1  # micro-batches are smaller than the settings say by this factor: memory ran out
    stop_reason: str = ""
    events: list[str] = field(default_factory=list[str])  # one line each, which the run prints
    _last: tuple[int, int] = (0, 0)  # the latest skipped update: its step, and its number in that step

    def record_update(self) -> None:
        """An update was taken."""
        self.skipped_in_a_row = 0

    def record_skip(
        self, batch: Batch, *, step: int, about: Mapping[str, Any], found: Sequence[NonFiniteTensor]
    ) -> None:
        """An update was skipped: count it, keep its rows, and set `stop_reason` if it was one too many."""
        self.skipped_in_a_row, self.skipped_in_all = self.skipped_in_a_row + 1, self.skipped_in_all + 1
        self._last = (step, self._last[1] + 1 if self._last[0] == step else 1)
        path = self._keep(batch, {**about, "step": step, "found": [asdict(f) for f in found]})
        why = str(found[0]) if found else "the sum of the micro-batches is not finite, though each one is"
        self.events.append(f"skipped an update: {why}" + (f"; see `hone replay {path}`" if path else ""))
        for count, limit, how in (
            (self.skipped_in_a_row, self.in_a_row, "in a row were not finite (train.max_bad_updates)"),
            (self.skipped_in_all, self.in_all, "in all were not finite (train.max_bad_total)"),
        ):
            if count >= limit:
                self.stop_reason = f"{count} updates {how}"

    def check(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """HoneError if more numbers are not finite than when the run began: no run could go on from them."""
        bad = {name: count for name, x in tensors.items() if (count := count_nonfinite(x))}
        if sum(bad.values()) > self.known_nonfinite:
            raise HoneError(
                f"step {step} is not saved: {sum(bad.values())} numbers of its weights or moments are not finite, the "
                f"first in {next(iter(bad))}: resume from the checkpoint before it, with a lower optim.lr"
            )

    def drain(self) -> list[str]:
        """The events since the last call."""
        said, self.events = self.events, []
        return said

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"row": self.skipped_in_a_row, "total": self.skipped_in_all, "divisor": self.divisor}

    def load(self, state: Mapping[str, int]) -> None:
        counts = [state.get("row"), state.get("total"), state.get("divisor", 1)] if isinstance(state, Mapping) else []
        if len(counts) < 3 or not all(type(n) is int and 0 <= n < 2**63 for n in counts) or not counts[2]:
            raise HoneError("cannot resume: the count of skipped updates is damaged: resume from another checkpoint")
        self.skipped_in_a_row, self.skipped_in_all, self.divisor = cast(list[int], counts)

    def save_divisor(self) -> None:
        """Write the divisor, for the process that resumes this run."""
        if self.folder is not None:
            files.write_atomically(self.folder.parent / names.DIVISOR, str(self.divisor))

    def load_divisor(self) -> None:
        """Read the divisor that a process before has written. Every rank does."""
        path = None if self.folder is None else self.folder.parent / names.DIVISOR
        if path is not None and path.is_file() and (left := path.read_text()).isdecimal():
            self.divisor = max(self.divisor, int(left))

    def _keep(self, batch: Batch, about: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        (step, again), (rank, ranks) = self._last, collect.world()
        name = files.name_of(step) + (f"-{again}" if again > 1 else "") + (f"-rank-{rank}" if ranks > 1 else "")
        path = self.folder / f"{name}.safetensors"
        self.folder.mkdir(exist_ok=True)
        held = batch.columns() | ({} if batch.support is None else batch.support.columns())
        columns = {name: x.detach().cpu().contiguous() for name, x in held.items()}
        files.write_atomically(path, save(columns, metadata={"hone": json.dumps(about)}))
        return path


def load_rows(path: Path) -> tuple[Batch, dict[str, Any]]:
    """The batch of a skipped update, and what was noted about it."""
    try:
        if not path.is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["hone"])
            columns = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if any(type(about[name]) is not int or about[name] < 0 for name in ("step", "updates")):
            raise ValueError("it tells of no step")
        for found in about["found"]:
            str(NonFiniteTensor(**found))
        parts = {name: columns.pop(name) for name in Support.NAMES if name in columns}
        support = Support(**{name.removeprefix("support_"): x for name, x in parts.items()}) if parts else None
        return Batch(**columns, support=support), {**about, "found": list(about["found"])}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise HoneError(f"{path} is no batch that a run left: give a file of RUN_DIR/{names.BAD}") from error


@torch.no_grad()
def count_nonfinite(x: Tensor) -> int:
    """How many numbers are NaN or infinite. A finite sum shows at once that none is."""
    if not x.is_floating_point() or bool(x.sum().isfinite()):
        return 0
    return int((~x.isfinite()).sum())


def count_nonfinite_weights(weights: Iterable[Tensor]) -> int:
    """How many numbers of whole weights are not finite, the same on every rank: parts of a weight are added up."""
    found = list(weights)
    parts = sum(count_nonfinite(collect.local_part(x)) for x in found if collect.is_sharded(x))
    whole = sum(count_nonfinite(x) for x in found if not collect.is_sharded(x))
    return collect.count(parts) + collect.largest(whole)


@torch.no_grad()
def mark_nonfinite_loss(parameters: Iterable[nn.Parameter], losses: Sequence[Tensor]) -> None:
    """Make a gradient NaN if a loss is not finite, so that the gradient's norm is NaN on every rank.

    The norm is summed over ranks and read anyway. A rank's losses are known to that rank alone, and to read them would
    be to wait for the GPU.
    """
    for p in parameters if losses else ():
        grad = None if p.grad is None else collect.local_part(p.grad)
        if grad is not None and grad.numel():
            grad.view(-1)[:1].add_((0.0 * torch.stack(list(losses)).sum()).to(grad))  # 0 where all are finite
            return


# --- losses that spike ---


class SpikeDetector:
    """Remembers usual losses, and the checkpoints that the run went back to.

    factor: a loss is a spike if it lies this many usual deviations above the median.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._usual_losses: list[float] = []
        self.tried: list[str] = []  # checkpoints that the run went back to: one may already have the fault in it

    def is_spike(self, loss: float) -> bool:
        """Whether the loss is a spike. A spike is not remembered.

        >>> spikes, usual = SpikeDetector(8.0), (2.0, 2.1, 1.9, 2.0, 2.2, 1.8, 2.1, 1.9, 2.0, 2.1)
        >>> [spikes.is_spike(x) for x in (*usual, 2.4, 9.0, 2.0, math.nan)][len(usual) :]
        [False, True, False, True]
        """
        if len(self._usual_losses) >= LEAST:
            middle = median(self._usual_losses)
            # 1.4826 makes the median deviation of a normal distribution its standard deviation
            deviation = max(1.4826 * median(abs(x - middle) for x in self._usual_losses), 0.01 * abs(middle), 1e-8)
            if not loss - middle <= self.factor * deviation:
                return True
        if math.isfinite(loss):
            self._usual_losses = [*self._usual_losses, loss][-WINDOW:]
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"usual": self._usual_losses, "tried": self.tried}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        usual, tried = (state.get(name) if isinstance(state, Mapping) else None for name in ("usual", "tried"))
        numbers = isinstance(usual, list) and all(
            type(x) in (int, float) and abs(x) <= sys.float_info.max for x in usual
        )
        if not numbers or not isinstance(tried, list) or not all(isinstance(name, str) for name in tried):
            raise HoneError("cannot resume: the losses so far are damaged: resume from another checkpoint")
        self._usual_losses, self.tried = list(cast(list[float], usual)), list(tried)
