"""Updates that are not finite: told by the gradient's norm, counted, and their rows kept for replay.

A skipped update moves nothing: not the weights, the optimiser, the schedule, nor (step.steer) an adaptive number.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hone.checkpoint import files, names
from hone.dist import collect
from hone.errors import HoneError
from hone.train.examine import Found
from hone.types import Batch


@dataclass(slots=True, kw_only=True)
class Guard:
    """Counts skipped updates and keeps their rows; `spent` says why the run should end, "" while it may go on."""

    in_a_row: int = 10  # the most skipped updates without one taken between them
    in_all: int = 100  # and of the whole run
    folder: Path | None = None  # None: rows are not kept
    row: int = 0
    total: int = 0
    known: int = 0  # weights that were not finite when the run began
    divisor: int = 1  # by how much micro-batches are smaller than asked for, since memory ran out
    spent: str = ""
    events: list[str] = field(default_factory=list[str])  # one line each, for whoever prints them
    _last: tuple[int, int] = (0, 0)  # the step of the latest one, and which of that step it was

    def taken(self) -> None:
        """An update was finite."""
        self.row = 0

    def caught(self, batch: Batch, *, step: int, about: Mapping[str, Any], found: Sequence[Found]) -> None:
        """An update was skipped: count it, keep its rows, and see whether it was one too many."""
        self.row, self.total = self.row + 1, self.total + 1
        self._last = (step, self._last[1] + 1 if self._last[0] == step else 1)
        path = self._keep(batch, {**about, "step": step, "found": [asdict(f) for f in found]})
        why = str(found[0]) if found else "the sum of the micro-batches is not finite, though each one is"
        self.events.append(f"skipped an update: {why}" + (f"; see `hone replay {path}`" if path else ""))
        for count, limit, how in (
            (self.row, self.in_a_row, "in a row were not finite (train.max_bad_updates)"),
            (self.total, self.in_all, "in all were not finite (train.max_bad_total)"),
        ):
            if count >= limit:
                self.spent = f"{count} updates {how}"

    def check(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """HoneError where more numbers are not finite than when the run began: nobody could go on from them."""
        bad = {name: count for name, x in tensors.items() if (count := not_finite(x))}
        if sum(bad.values()) > self.known:
            raise HoneError(
                f"step {step} is not saved: {sum(bad.values())} numbers of its weights or moments are not finite, the "
                f"first in {next(iter(bad))}: resume from the checkpoint before it, with a lower optim.lr"
            )

    def drain(self) -> list[str]:
        """What happened since it was last asked."""
        said, self.events = self.events, []
        return said

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"row": self.row, "total": self.total, "divisor": self.divisor}

    def load(self, state: Mapping[str, int]) -> None:
        counts = [state.get("row"), state.get("total"), state.get("divisor", 1)] if isinstance(state, Mapping) else []
        if len(counts) < 3 or not all(type(n) is int and 0 <= n < 2**63 for n in counts) or not counts[2]:
            raise HoneError("cannot resume: the count of skipped updates is damaged: resume from another checkpoint")
        self.row, self.total, self.divisor = cast(list[int], counts)

    def leave(self) -> None:
        """For the run that is started in this one's place: into how much smaller micro-batches memory forces it."""
        if self.folder is not None:
            files.write_atomically(self.folder.parent / names.DIVISOR, str(self.divisor))

    def find(self) -> None:
        """What was left, on every rank."""
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
        columns = {name: x.detach().cpu().contiguous() for name, x in batch.columns().items()}
        files.write_atomically(path, save(columns, metadata={"hone": json.dumps(about)}))
        return path


def load_rows(path: Path) -> tuple[Batch, dict[str, Any]]:
    """The batch of a skipped update, and what was known of it."""
    try:
        if not path.is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["hone"])
            columns = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if any(type(about[name]) is not int or about[name] < 0 for name in ("step", "updates")):
            raise ValueError("it tells of no step")
        for found in about["found"]:
            str(Found(**found))
        return Batch(**columns), {**about, "found": list(about["found"])}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise HoneError(f"{path} is no batch that a run left: give a file of RUN_DIR/{names.BAD}") from error


@torch.no_grad()
def not_finite(x: Tensor) -> int:
    """How many numbers are NaN or infinite; most often one sum tells that none is."""
    if not x.is_floating_point() or bool(x.sum().isfinite()):
        return 0
    return int((~x.isfinite()).sum())


@torch.no_grad()
def mark(parameters: Iterable[nn.Parameter], losses: Sequence[Tensor]) -> None:
    """Make a gradient NaN where a loss is not finite: the norm, which is reduced and read anyway, then tells.

    Nothing is waited for. A rank's losses are its own, the sum of gradients over ranks is everyone's.
    """
    for p in parameters if losses else ():
        grad = None if p.grad is None else collect.local_part(p.grad)
        if grad is not None and grad.numel():
            grad.view(-1)[:1].add_((0.0 * torch.stack(list(losses)).sum()).to(grad))  # 0 where all are finite
            return
