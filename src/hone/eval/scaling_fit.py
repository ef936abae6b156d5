"""Fitting a scaling law to runs as Hoffmann et al. 2022 (appendix D.3): Huber loss on log L, LBFGS, many starts."""

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.errors import HoneError
from hone.eval.scaling import Law

DELTA = 1e-3  # of the Huber loss
LEAST = 6  # runs: the law has five unknowns
SHARES = ((0.1, 0.1), (0.1, 0.4), (0.4, 0.1), (0.3, 0.3))  # of the loss at the mean run: from N, from D
EXPONENTS = (0.2, 0.5)
NAMES = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class Fit:
    """The law, the 95 % bootstrap interval of each constant, and how far the runs lie from it."""

    law: Law
    intervals: Mapping[str, tuple[float, float]]
    error: float  # root mean square of log L - log L_hat
    runs: int


def read_runs(rows: Iterable[Mapping[str, Any]], *, name: str = "runs") -> list[tuple[float, float, float]]:
    """(params, tokens, loss) of every row."""
    runs: list[tuple[float, float, float]] = []
    for number, row in enumerate(rows, start=1):
        values: list[float] = []
        for key in ("params", "tokens", "loss"):
            value: Any = row.get(key)
            number_given = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number_given and 0 < value <= sys.float_info.max):
                raise HoneError(f'{name} row {number}: "{key}" is {value!r}, expected a number above 0: correct it')
            values.append(float(value))
        runs.append((values[0], values[1], values[2]))
    return runs


def fit(runs: Sequence[tuple[float, float, float]], *, bootstrap: int = 100, seed: int = 0) -> Fit:
    """min over (alpha, beta, log A, log B, log E) of sum Huber(log L - log L_hat); runs drawn again for intervals."""
    table = torch.tensor(runs, dtype=torch.float64).reshape(-1, 3).log()
    for column, what in ((0, "model sizes"), (1, "token counts")):
        if len(table) < LEAST or len(table[:, column].unique()) < 3:
            raise HoneError(f"{len(table)} runs: give at least {LEAST}, with three different {what} or more")
    centre = table[:, :2].mean(0)
    table[:, :2] -= centre  # else log A and alpha move together, and the search creeps along a valley
    even = torch.ones(len(table), dtype=torch.float64)
    ends = [_minimise(table, even, start) for start in _starts(table[:, 2].mean().item())]
    best = min(ends, key=lambda theta: _huber(theta, table, even).nan_to_num(nan=math.inf).item())
    intervals: dict[str, tuple[float, float]] = {}
    if bootstrap:
        drawn = np.random.default_rng(seed).multinomial(len(table), np.full(len(table), 1 / len(table)), bootstrap)
        again = [_constants(_minimise(table, weight, best), centre) for weight in torch.from_numpy(drawn).double()]
        low, high = (torch.stack(again).quantile(q, dim=0).tolist() for q in (0.025, 0.975))
        intervals = {n: (a, b) for n, a, b in zip(NAMES, low, high, strict=True)}
    error = (_predicted(best, table) - table[:, 2]).square().mean().sqrt().item()
    constants = dict(zip(NAMES, _constants(best, centre).tolist(), strict=True))
    return Fit(Law(**constants, source=f"fit over {len(table)} runs"), intervals, error, len(table))


def _starts(log_loss: float) -> list[Tensor]:
    """(alpha, beta, log of the term in N, of the term in D, of E) at the centre of the runs."""
    found = itertools.product(EXPONENTS, EXPONENTS, SHARES)
    logs = [(alpha, beta, *(log_loss + math.log(s) for s in (n, d, 1 - n - d))) for alpha, beta, (n, d) in found]
    return list(torch.tensor(logs, dtype=torch.float64))


def _constants(theta: Tensor, centre: Tensor) -> Tensor:
    """(E, A, B, alpha, beta): log A = log(A / N0^alpha) + alpha log N0."""
    alpha, beta, a, b, e = theta
    return torch.stack((e.exp(), (a + alpha * centre[0]).exp(), (b + beta * centre[1]).exp(), alpha, beta))


def _predicted(theta: Tensor, table: Tensor) -> Tensor:
    """log(E + A / N^alpha + B / D^beta) of every run"""
    alpha, beta, a, b, e = theta
    terms = (a - alpha * table[:, 0], b - beta * table[:, 1], e.expand(len(table)))
    return torch.stack(terms).logsumexp(0)


def _minimise(table: Tensor, weight: Tensor, start: Tensor) -> Tensor:
    theta = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([theta], max_iter=200, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = _huber(theta, table, weight)
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]
    return theta.detach()


def _huber(theta: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    residual = _predicted(theta, table) - table[:, 2]
    each = torch.nn.functional.huber_loss(residual, torch.zeros_like(residual), reduction="none", delta=DELTA)
    return (weight * each).sum() / DELTA**2  # scaled: the tolerances are absolute
