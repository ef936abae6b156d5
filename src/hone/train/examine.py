"""Where an update stops being finite: what is NaN or infinite, in the order in which it is computed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from hone.algo.table import Algorithm, begun, objective
from hone.algo.terms import token_ratio
from hone.dist.collect import local_part
from hone.types import ABSENT, Batch, Forward, Model

MAY_BE_NAN = frozenset({"step_reward"})  # NaN there means that no step ends at the token


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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
        """Where an update comes upon it."""
        if self.micro < 0:
            return "before the forward pass, in the weights"
        if self.name.startswith("gradient of "):
            return f"in the backward pass of micro-batch {self.micro}"
        computed = self.name in ("loss", "ratio") or self.name.startswith(("forward.", "loss."))
        return f"{'in' if computed else 'before'} the forward pass of micro-batch {self.micro}"


def examine(
    policy: Model, cut: Iterable[Batch], algo: Algorithm, *, trained: Mapping[str, nn.Parameter]
) -> list[Found]:
    """Weights, columns, forward pass, ratio, each term of the loss, the loss, gradients: each tensor once.

    trained: what gradients end up in, by name: those are overwritten. `place` numbers the rows for `Found.at`.
    """
    found, parts = dict[str, Found](), list(enumerate(cut))
    for name, x in policy.named_parameters() if isinstance(policy, nn.Module) else ():
        _note(found, _look(f"weight {name}", x, micro=-1))
    for name in parts[0][1].columns() if parts else ():
        for i, micro in parts:
            _note_rows(found, i, micro, {name: micro.columns()[name]})
    for i, micro in parts:
        for p in trained.values():
            p.grad = None
        fwd = policy(micro, algo.wants)
        micro = begun(fwd, micro, algo)
        loss = objective(fwd, micro, algo.loss)
        loss.backward()
        _note_rows(found, i, micro, _computed(fwd, micro, algo))
        _note(found, _look("loss", loss, micro=i))
        for name, p in reversed(list(trained.items())):  # as the backward pass comes upon them: the last layer first
            _note(found, None if p.grad is None else _look(f"gradient of {name}", p.grad, micro=i))
    return list(found.values())


def _note_rows(found: dict[str, Found], i: int, micro: Batch, columns: Mapping[str, Tensor]) -> None:
    for name, x in columns.items():
        seen = _look(name, x, micro=i, within=micro.mask, nan_is_fine=name in MAY_BE_NAN)
        _note(found, seen and replace(seen, at=[int(micro.place[seen.at[0]]), *seen.at[1:]]))


def _note(found: dict[str, Found], seen: Found | None) -> None:
    if seen is not None:
        found.setdefault(seen.name, seen)


@torch.no_grad()
def _computed(fwd: Forward, batch: Batch, algo: Algorithm) -> dict[str, Tensor]:
    found = {f"forward.{f.name}": x for f in fields(fwd) if (x := getattr(fwd, f.name)) is not ABSENT}
    if fwd.logp is not ABSENT and batch.old_logp is not ABSENT:
        found["ratio"] = token_ratio(fwd, batch)
    return found | {f"loss.{i}": term(fwd, batch) for i, (_, term) in enumerate(algo.loss)}


@torch.no_grad()
def _look(name: str, x: Tensor, *, micro: int, within: Tensor | None = None, nan_is_fine: bool = False) -> Found | None:
    """What is not finite in it, if anything; of a column only the rows and tokens that are trained on count."""
    x = local_part(x)
    if not x.is_floating_point():
        return None
    bad = x.isinf() if nan_is_fine else ~x.isfinite()
    if within is not None:
        bad = bad & (within if bad.ndim == 2 else within.any(-1))
    where = bad.nonzero()
    if not len(where):
        return None
    at: list[int] = where[0].tolist()
    return Found(name=name, micro=micro, number=len(where), size=x.numel(), at=at, value=str(float(x[tuple(at)])))
