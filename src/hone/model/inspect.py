"""What `hone inspect` shows of a model or adapter: its parameters by kind, and how it differs from its base.

Norms and ranks of a difference come from its singular values, in float64.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hone.errors import HoneError
from hone.model.formats import peft
from hone.model.formats.cache import folder_of, resolve
from hone.model.formats.weight_files import TensorOnDisk, in_order, kind_of, tensor_index

ENERGY = 0.9  # the share of sum sigma^2 that `energy_rank` holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """W - W0 of one weight; ranks are None for a vector."""

    norm: float  # Frobenius
    relative: float | None  # to the norm of W0; None where that is 0 or not known
    effective_rank: float | None
    energy_rank: int | None


def singular_values(matrix: Tensor) -> Tensor:
    """In float64, the largest first."""
    return torch.linalg.svdvals(matrix.detach().double())


def effective_rank_of(sigma: Tensor) -> float:
    """(sum sigma)^2 / sum sigma^2: k for k equal ones, 0 for none"""
    squares = float(sigma.square().sum())
    return float(sigma.sum()) ** 2 / squares if squares else 0.0


def energy_rank(sigma: Tensor) -> int:
    """The fewest largest values whose squares sum to 0.9 of all, sum_{i<=k} sigma_i^2 >= 0.9 sum sigma^2"""
    squares = sigma.square().sort(descending=True).values.cumsum(0)
    if not len(squares) or not float(squares[-1]):
        return 0
    return int((squares < ENERGY * squares[-1]).sum()) + 1


def low_rank_values(a: Tensor, b: Tensor) -> Tensor:
    """The r singular values of B A that can differ from 0, by r x r matrices: B A = Q_B (R_B R_A') Q_A'."""
    r_b = torch.linalg.qr(b.detach().double()).R
    r_a = torch.linalg.qr(a.detach().double().T).R
    return torch.linalg.svdvals(r_b @ r_a.T)


def update_of(sigma: Tensor, *, base: float | None) -> Update:
    """The update whose singular values are `sigma`; base: the norm of W0."""
    norm = float(sigma.square().sum().sqrt())
    return Update(
        norm=norm,
        relative=norm / base if base else None,
        effective_rank=effective_rank_of(sigma),
        energy_rank=energy_rank(sigma),
    )


def difference(weight: Tensor, base: Tensor) -> Update:
    """W - W0 of two weights of one shape."""
    change, size = weight.double() - base.double(), float(base.double().norm())
    if change.ndim == 2 and change.any():
        return update_of(singular_values(change), base=size)
    matrix = change.ndim == 2
    norm = float(change.norm())
    relative = norm / size if size else None
    return Update(
        norm=norm, relative=relative, effective_rank=0.0 if matrix else None, energy_rank=0 if matrix else None
    )


BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The tensors of one kind."""

    kind: str
    tensors: int
    numbers: int
    bytes: int | None  # None where a dtype's size is not known
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The update of one weight."""

    name: str
    shape: tuple[int, ...]
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """All that `hone inspect` shows. `changes` is empty if there is nothing to compare with."""

    model: str
    base: str  # "" if none
    kinds: tuple[Kind, ...]
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def norm(self) -> float:
        """The Frobenius norm of the whole update."""
        return math.sqrt(sum(c.update.norm**2 for c in self.changes))


def inspect(model: str, base: str = "") -> Inspection:
    """Read the model's files, and the base's where one is given or an adapter names a folder that is there."""
    folder = folder_of(model)
    if peft.is_adapter(folder):
        return _adapter(folder, base)
    here = tensor_index(folder)
    if not base:
        return Inspection(model=str(folder), base="", kinds=_kinds(here))
    other = tensor_index(_folder(base))
    both = [name for name in here if name in other]
    if not both:
        raise HoneError(f"{folder} and {base} have no weight of one name: give the model it was trained from as --base")
    return Inspection(
        model=str(folder),
        base=base,
        kinds=_kinds(here),
        changes=tuple(_change(name, here[name], other[name], base) for name in both),
        notes=tuple(_one_sided(here, other, base)),
    )


def _folder(base: str) -> Path:
    found = folder_of(base)
    if peft.is_adapter(found):
        raise HoneError(f"{base} is an adapter: give the model it belongs to as --base")
    return found


def _kinds(tensors: Mapping[str, TensorOnDisk]) -> tuple[Kind, ...]:
    by_kind = dict[str, list[TensorOnDisk]]()
    for name, x in tensors.items():
        by_kind.setdefault(kind_of(name), []).append(x)
    return tuple(_kind(kind, found) for kind, found in by_kind.items())


def _kind(kind: str, found: list[TensorOnDisk]) -> Kind:
    dtypes = tuple(dict.fromkeys(x.dtype for x in found))
    known = all(dtype in BYTES for dtype in dtypes)
    return Kind(
        kind=kind,
        tensors=len(found),
        numbers=sum(math.prod(x.shape) for x in found),
        bytes=sum(math.prod(x.shape) * BYTES[x.dtype] for x in found) if known else None,
        dtypes=dtypes,
    )


def _change(name: str, here: TensorOnDisk, other: TensorOnDisk, base: str) -> Change:
    if here.shape != other.shape:
        raise HoneError(
            f"{name} is {here.shape}, in {base} {other.shape}: give the model it was trained from as --base"
        )
    for x in (here, other):
        if x.dtype not in BYTES:
            raise HoneError(
                f"{name} is {x.dtype} in {x.path}: only plain floating-point weights can be compared, "
                "give the model before it was quantised"
            )
    return Change(name=name, shape=here.shape, update=difference(here.read(), other.read()))


def _one_sided(here: Mapping[str, TensorOnDisk], other: Mapping[str, TensorOnDisk], base: str) -> Iterator[str]:
    for what, names in (("the model", here.keys() - other.keys()), (base, other.keys() - here.keys())):
        if names:
            yield f"only in {what}: {', '.join(sorted(names))}"


def _adapter(folder: Path, base: str) -> Inspection:
    found = peft.read_peft(folder)
    named = base or found.base
    # the base that an adapter names may be on another machine; the one that the user names must be here
    other = tensor_index(_folder(named)) if base or (named and resolve(named).is_dir()) else {}
    changes = list[Change]()
    for layer in sorted(found.tensors, key=in_order):
        a, b = found.tensors[layer]
        name, shape = f"{layer}.weight", (len(b), a.shape[1])
        if other and (name not in other or other[name].shape != shape):
            raise HoneError(
                f"{folder} adapts {name} of {shape}, which {named} does not have: "
                "give the model it was trained on as --base"
            )
        size = float(other[name].read().double().norm()) if other else None
        changes.append(
            Change(name=name, shape=shape, update=update_of(abs(found.scale(layer)) * low_rank_values(a, b), base=size))
        )
    notes = found.notes if other else (*found.notes, "no base model at hand: give --base for relative norms")
    kinds = _kinds(tensor_index(folder, [peft.WEIGHTS]))
    return Inspection(model=str(folder), base=named if other else "", kinds=kinds, changes=tuple(changes), notes=notes)
