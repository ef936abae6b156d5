"""The model size and tokens for a budget, by a law L(N, D) = E + A / N^alpha + B / D^beta and C = 6 N D.

N counts parameters, D tokens, C floating-point operations of training, L nats a token. `fit` fits the law to runs as
Hoffmann et al. 2022 (appendix D.3) do: Huber loss on log L, LBFGS, many starts.
"""

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

FORWARD_BACKWARD = 6  # operations a parameter and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """The loss of a model of N parameters trained on D tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str = ""

    def __post_init__(self) -> None:
        if min(self.A, self.B, self.alpha, self.beta) <= 0 or self.E < 0:
            raise HoneError("a scaling law needs A, B, alpha, beta above 0 and E of at least 0: check the fit")

    def loss(self, params: float, tokens: float) -> float:
        """E + A / N^alpha + B / D^beta."""
        return self.E + self.A / params**self.alpha + self.B / tokens**self.beta

    @property
    def growth(self) -> tuple[float, float]:
        """(a, b): N ~ C^a and D ~ C^b, a = beta / (alpha + beta), b = alpha / (alpha + beta)."""
        total = self.alpha + self.beta
        return self.beta / total, self.alpha / total


LAWS = {
    "besiroglu": ScalingLaw(
        E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658,
        source="Besiroglu et al. 2024 (arXiv 2404.10102), the fit of Hoffmann's third approach done again",
    ),
    "hoffmann": ScalingLaw(
        E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28,
        source="Hoffmann et al. 2022 (arXiv 2203.15556), third approach, as published",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a decoder, to count the operations of attention, which C = 6 N D leaves out."""

    layers: int
    width: int  # heads x head size
    context: int

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.context) < 1:
            raise HoneError("layers, width and context must be at least 1: give the shape of the model")

    @property
    def attention(self) -> float:
        """Operations a token: 6 layers context width, half of 12 for a causal mask (scores and values, 3 passes)."""
        return 6.0 * self.layers * self.context * self.width


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    params: float
    tokens: float
    flops: float
    loss: float


def optimum(law: ScalingLaw, flops: float) -> TrainingPlan:
    """min L subject to 6 N D = C: N = G (C/6)^a, D = (C/6)^b / G, G = (alpha A / (beta B))^(1 / (alpha + beta))."""
    _positive("flops", flops)
    a, b = law.growth
    ratio = (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta))
    params = ratio * (flops / FORWARD_BACKWARD) ** a
    tokens = (flops / FORWARD_BACKWARD) ** b / ratio
    return TrainingPlan(params=params, tokens=tokens, flops=flops, loss=law.loss(params, tokens))


def for_params(law: ScalingLaw, params: float) -> TrainingPlan:
    """The budget whose optimum has N parameters: C = 6 (N / G)^(1/a)."""
    _positive("params", params)
    a, _ = law.growth
    ratio = optimum(law, FORWARD_BACKWARD).params
    return optimum(law, FORWARD_BACKWARD * (params / ratio) ** (1 / a))


def for_tokens(law: ScalingLaw, tokens: float) -> TrainingPlan:
    """The budget whose optimum has D tokens: C = 6 (D G)^(1/b)."""
    _positive("tokens", tokens)
    _, b = law.growth
    ratio = optimum(law, FORWARD_BACKWARD).tokens
    return optimum(law, FORWARD_BACKWARD * (tokens / ratio) ** (1 / b))


def fixed_plan(law: ScalingLaw, params: float, tokens: float) -> TrainingPlan:
    """The plan for a given model size and number of tokens."""
    _positive("params", params)
    _positive("tokens", tokens)
    flops = FORWARD_BACKWARD * params * tokens
    return TrainingPlan(params=params, tokens=tokens, flops=flops, loss=law.loss(params, tokens))


def training_flops(params: float, tokens: float, shape: ModelShape | None = None) -> float:
    """6 N D, plus the operations of attention if the shape is known."""
    return (FORWARD_BACKWARD * params + (shape.attention if shape else 0.0)) * tokens


def budget(gpu_hours: float, *, peak_flops: float, mfu: float) -> float:
    """hours x 3600 x peak x MFU."""
    _positive("gpu-hours", gpu_hours)
    _positive("peak", peak_flops)
    if not 0 < mfu <= 1:
        raise HoneError(f"mfu is {mfu}: give the share of the peak that training reaches, above 0 and up to 1")
    return gpu_hours * 3600 * peak_flops * mfu


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise HoneError(f"{name} is {value}: give a number above 0")


DELTA = 1e-3  # of the Huber loss
LEAST = 6  # runs: the law has five unknowns
SHARES = ((0.1, 0.1), (0.1, 0.4), (0.4, 0.1), (0.3, 0.3))  # of the loss at the mean run: from N, from D
EXPONENTS = (0.2, 0.5)
NAMES = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class Fit:
    """The law, the 95 % bootstrap interval of each constant, and how far the runs lie from it."""

    law: ScalingLaw
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


def fit(runs: Sequence[tuple[float, float, float]], *, bootstrap: int = 100) -> Fit:
    """min over (alpha, beta, log A, log B, log E) of sum Huber(log L - log L_hat); runs drawn again for intervals."""
    table = torch.tensor(runs, dtype=torch.float64).reshape(-1, 3).log()
    for column, what in ((0, "model sizes"), (1, "token counts")):
        if len(table) < LEAST or len(table[:, column].unique()) < 3:
            raise HoneError(f"{len(table)} runs: give at least {LEAST}, with three different {what} or more")
    centre = table[:, :2].mean(0)
    table[:, :2] -= centre  # uncentred, log A and alpha depend on each other, and the search converges slowly
    even = torch.ones(len(table), dtype=torch.float64)
    ends = [_minimise(table, even, start) for start in _starts(table[:, 2].mean().item())]
    best = min(ends, key=lambda theta: _huber(theta, table, even).nan_to_num(nan=math.inf).item())
    intervals: dict[str, tuple[float, float]] = {}
    if bootstrap:
        resampled = np.random.default_rng(0).multinomial(len(table), np.full(len(table), 1 / len(table)), bootstrap)
        again = [_constants(_minimise(table, weight, best), centre) for weight in torch.from_numpy(resampled).double()]
        low, high = (torch.stack(again).quantile(q, dim=0).tolist() for q in (0.025, 0.975))
        intervals = {n: (a, b) for n, a, b in zip(NAMES, low, high, strict=True)}
    error = (_predicted(best, table) - table[:, 2]).square().mean().sqrt().item()
    constants = dict(zip(NAMES, _constants(best, centre).tolist(), strict=True))
    return Fit(ScalingLaw(**constants, source=f"fit over {len(table)} runs"), intervals, error, len(table))


def _starts(log_loss: float) -> list[Tensor]:
    """(alpha, beta, log of the term in N, of the term in D, of E) at the centre of the runs."""
    grid = itertools.product(EXPONENTS, EXPONENTS, SHARES)
    logs = [(alpha, beta, *(log_loss + math.log(s) for s in (n, d, 1 - n - d))) for alpha, beta, (n, d) in grid]
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
