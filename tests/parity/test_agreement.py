"""Hone's losses and gradients are TRL's, to rounding, for every case of cases.py."""

import pytest
from each import each

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e .[dev]")

from tests.parity.cases import CASES, LEVELS, agreement
from tests.parity.house import distance

METHODS = ("dpo", "kto", "orpo", "simpo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", "reward model")


@each("level", LEVELS)
@each("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, level):
    case = CASES[name]
    loss, gradient = agreement(case, level)
    assert loss <= case.tolerance[level]
    assert gradient <= case.tolerance[level]


@each("name", CASES)
def test_the_case_says_something(name):
    ours = CASES[name].sides[0](CASES[name], "logp")
    assert max(float(g.abs().max()) for g in ours.grads.values()) > 1e-3


@pytest.mark.parametrize("name", ["grpo, k3", "dpo", "kto", "reward model, margin"])
def test_a_thousandth_of_a_difference_is_seen(name):
    result = CASES[name].sides[1](CASES[name], "model")
    loss, gradient = distance(result.scaled(1.001), result)
    assert min(loss, gradient) > 10 * CASES[name].tolerance["model"]


def test_every_method_has_a_case():
    assert not [m for m in METHODS if not any(name.split(",")[0] == m for name in CASES)]
