"""How large an update is and how many directions it has: from singular values, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

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


def spread(sigma: Tensor) -> float:
    """(sum sigma)^2 / sum sigma^2: k for k equal ones, 0 for none"""
    squares = float(sigma.square().sum())
    return float(sigma.sum()) ** 2 / squares if squares else 0.0


def energy_rank(sigma: Tensor, share: float = ENERGY) -> int:
    """The fewest largest values whose squares sum to the share of all, sum_{i<=k} sigma_i^2 >= share sum sigma^2"""
    squares = sigma.square().sort(descending=True).values.cumsum(0)
    if not len(squares) or not float(squares[-1]):
        return 0
    return int((squares < share * squares[-1]).sum()) + 1


def low_rank_values(a: Tensor, b: Tensor) -> Tensor:
    """The singular values of B A that need not be 0, from r x r matrices: B A = Q_B (R_B R_A') Q_A'."""
    r_b = torch.linalg.qr(b.detach().double()).R
    r_a = torch.linalg.qr(a.detach().double().T).R
    return torch.linalg.svdvals(r_b @ r_a.T)


def update_of(sigma: Tensor, *, base: float | None) -> Update:
    """What the singular values of a matrix say; base: the norm of W0."""
    norm = float(sigma.square().sum().sqrt())
    return Update(
        norm=norm, relative=norm / base if base else None, effective_rank=spread(sigma), energy_rank=energy_rank(sigma)
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
