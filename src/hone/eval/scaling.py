"""How large a model and how many tokens for a budget, by a law L(N, D) = E + A / N^alpha + B / D^beta and C = 6 N D.

N counts parameters, D tokens, C floating-point operations of training, L nats a token.
"""

import math
from dataclasses import dataclass

from hone.errors import HoneError

FORWARD_BACKWARD = 6  # operations a parameter and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)


@dataclass(frozen=True, kw_only=True)
class Law:
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
    "besiroglu": Law(
        E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658,
        source="Besiroglu et al. 2024 (arXiv 2404.10102), the fit of Hoffmann's third approach done again",
    ),
    "hoffmann": Law(
        E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28,
        source="Hoffmann et al. 2022 (arXiv 2203.15556), third approach, as published",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a decoder, for the operations of attention, which C = 6 N D leaves out."""

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
class Plan:
    params: float
    tokens: float
    flops: float
    loss: float


def optimum(law: Law, flops: float) -> Plan:
    """min L subject to 6 N D = C: N = G (C/6)^a, D = (C/6)^b / G, G = (alpha A / (beta B))^(1 / (alpha + beta))."""
    _positive("flops", flops)
    a, b = law.growth
    ratio = (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta))
    params = ratio * (flops / FORWARD_BACKWARD) ** a
    tokens = (flops / FORWARD_BACKWARD) ** b / ratio
    return Plan(params=params, tokens=tokens, flops=flops, loss=law.loss(params, tokens))


def for_params(law: Law, params: float) -> Plan:
    """The budget whose optimum has N parameters: C = 6 (N / G)^(1/a)."""
    _positive("params", params)
    a, _ = law.growth
    ratio = optimum(law, FORWARD_BACKWARD).params
    return optimum(law, FORWARD_BACKWARD * (params / ratio) ** (1 / a))


def for_tokens(law: Law, tokens: float) -> Plan:
    """The budget whose optimum has D tokens: C = 6 (D G)^(1/b)."""
    _positive("tokens", tokens)
    _, b = law.growth
    ratio = optimum(law, FORWARD_BACKWARD).tokens
    return optimum(law, FORWARD_BACKWARD * (tokens / ratio) ** (1 / b))


def given(law: Law, params: float, tokens: float) -> Plan:
    """A model and a number of tokens that are both fixed: nothing is optimised."""
    _positive("params", params)
    _positive("tokens", tokens)
    flops = FORWARD_BACKWARD * params * tokens
    return Plan(params=params, tokens=tokens, flops=flops, loss=law.loss(params, tokens))


def training_flops(params: float, tokens: float, shape: Shape | None = None) -> float:
    """6 N D, and the attention of a shape."""
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
