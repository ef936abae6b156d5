"""Estimators of KL(pi || other) from samples of pi, with d = log pi - log other on the sampled token.

Their values and their gradients differ, and mixing the two up is an error many trainers shipped:

| name | value | expected gradient as a loss, on samples of pi |
|---|---|---|
| k1 = d | unbiased | zero: refused as a loss |
| k2 = d^2 / 2 | biased | that of KL(pi || other) |
| k3 = exp(-d) - 1 + d | unbiased, never negative | that of KL(other || pi) |
| exact | sum over the vocabulary | that of KL(pi || other) |

All are per state, with the distribution of states held fixed: what a token does to later states' KL is left out. On
samples of another policy none but the exact one has the gradient named, unless weighed by the ratio (terms.kl_penalty).
"""

from collections.abc import Callable

from torch import Tensor


def k1(d: Tensor) -> Tensor:
    """d"""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2"""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d"""
    return (-d).expm1() + d


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
