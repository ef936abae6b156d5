"""The closed form is the minimum, the published numbers come out, and a fit finds what was planted."""

import json
import math

import numpy as np
import pytest
from each import each

from hone.cli import main
from hone.errors import HoneError
from hone.eval.scaling import (
    LAWS,
    ModelShape,
    ScalingLaw,
    budget,
    fit,
    fixed_plan,
    for_params,
    for_tokens,
    optimum,
    read_runs,
    training_flops,
)

PLANTED = ScalingLaw(E=1.8, A=400, B=1500, alpha=0.34, beta=0.36)


def runs(noise: float, seed: int = 0) -> list[tuple[float, float, float]]:
    draw = np.random.default_rng(seed)
    shapes = [(n, n * ratio) for n in np.logspace(7, 10, 7) for ratio in (5, 10, 20, 40, 100)]
    return [(n, d, PLANTED.loss(n, d) * math.exp(draw.normal(0, noise))) for n, d in shapes]


@each("law", LAWS.values())
@each("flops", [1e15, 1e19, 5.88e23, 1e27])
def test_the_closed_form_is_the_minimum_along_the_budget(law, flops):
    plan = optimum(law, flops)
    assert 6 * plan.params * plan.tokens == pytest.approx(flops)
    low, high = math.log(plan.params) - 5, math.log(plan.params) + 5
    for _ in range(200):  # golden section: the loss along the budget is convex in log N
        a, b = low + 0.382 * (high - low), high - 0.382 * (high - low)
        at = [law.loss(math.exp(x), flops / 6 / math.exp(x)) for x in (a, b)]
        low, high = (low, b) if at[0] < at[1] else (a, high)
    assert math.log(plan.params) == pytest.approx(low, abs=1e-5)
    assert plan.loss == pytest.approx(law.loss(math.exp(low), flops / 6 / math.exp(low)), abs=1e-12)


def test_published_numbers():
    # Chinchilla's budget: the corrected law asks for about 20 tokens a parameter, as Chinchilla had (70e9, 1.4e12)
    plan = optimum(LAWS["besiroglu"], 5.88e23)
    assert plan.params == pytest.approx(73.0e9, rel=0.01)
    assert plan.tokens == pytest.approx(1.342e12, rel=0.01)
    a, b = LAWS["hoffmann"].growth
    assert (round(a, 2), round(b, 2)) == (
        0.45,
        0.55,
    )  # Hoffmann et al., table 2: 0.46 and 0.54 from unrounded constants
    assert sum(LAWS["besiroglu"].growth) == pytest.approx(1)
    # by hand: 1.69 + 406.4 / (70e9)^0.34 + 410.7 / (1.4e12)^0.28
    assert LAWS["hoffmann"].loss(70e9, 1.4e12) == pytest.approx(1.69 + 0.0832 + 0.1633, abs=2e-3)


def test_budgets_from_params_tokens_and_hours_agree():
    law = LAWS["besiroglu"]
    plan = optimum(law, 3e20)
    for other in (
        for_params(law, plan.params),
        for_tokens(law, plan.tokens),
        fixed_plan(law, plan.params, plan.tokens),
    ):
        assert (other.flops, other.loss) == (pytest.approx(3e20), pytest.approx(plan.loss))
    assert budget(2, peak_flops=1e15, mfu=0.5) == 3.6e18


def test_attention_is_counted_when_the_shape_is_given():
    # 6 N a token, and 6 x 2 layers x 100 tokens x 8 wide
    assert training_flops(1000, 10) == 60_000
    assert training_flops(1000, 10, ModelShape(layers=2, width=8, context=100)) == 60_000 + 6 * 2 * 100 * 8 * 10


def test_a_fit_without_noise_is_exact():
    law = fit(runs(0.0), bootstrap=0).law
    for name, rel in (("E", 1e-3), ("alpha", 5e-3), ("beta", 5e-3), ("A", 0.05), ("B", 0.05)):
        assert getattr(law, name) == pytest.approx(getattr(PLANTED, name), rel=rel)


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_finds_planted_exponents_through_noise(seed):
    found = fit(runs(0.002, seed), bootstrap=30)
    assert found.law.alpha == pytest.approx(0.34, abs=0.03)
    assert found.law.beta == pytest.approx(0.36, abs=0.03)
    assert pytest.approx(1.8, abs=0.03) == found.law.E
    assert 0.001 < found.error < 0.003
    for name in ("alpha", "beta"):
        low, high = found.intervals[name]
        assert low < getattr(found.law, name) < high
        assert high - low < 0.06


def test_one_spoilt_run_hardly_moves_the_fit():
    spoilt = runs(0.001)
    spoilt[17] = (*spoilt[17][:2], spoilt[17][2] * 1.5)
    found = fit(spoilt, bootstrap=0).law
    assert found.alpha == pytest.approx(0.34, abs=0.02)
    assert found.beta == pytest.approx(0.36, abs=0.02)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(HoneError, match="at least 6"):
        fit(runs(0)[:5])
    with pytest.raises(HoneError, match="three different model sizes"):
        fit([(1e7, d, 3.0) for d in range(1, 20)])
    for bad in (
        {"params": 1, "tokens": 1},
        {"params": 0, "tokens": 1, "loss": 1},
        {"params": 1, "tokens": 1, "loss": "x"},
    ):
        with pytest.raises(HoneError, match="row 1"):
            read_runs([bad])
    law = LAWS["besiroglu"]
    for call in (lambda: optimum(law, 0), lambda: for_params(law, math.nan), lambda: for_tokens(law, -1)):
        with pytest.raises(HoneError, match="above 0"):
            call()
    with pytest.raises(HoneError, match="mfu"):
        budget(1, peak_flops=1, mfu=1.5)


def planned(capsys, *words: str) -> dict:
    assert main(["plan", "scaling", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_plans_and_fits(capsys, tmp_path):
    (row,) = planned(capsys, "--flops", "5.88e23", "--law", "besiroglu")["plans"]
    assert row["params"] == pytest.approx(73.0e9, rel=0.01)
    (hours,) = planned(capsys, "--gpu-hours", "2", "--peak", "1e15", "--mfu", "0.5", "--law", "hoffmann")["plans"]
    assert hours["flops"] == pytest.approx(3.6e18)
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps({"params": n, "tokens": d, "loss": v}) + "\n" for n, d, v in runs(0.001)))
    found = planned(capsys, "--fit", str(path), "--bootstrap", "5", "--params", "1e9")
    assert found["fit"]["alpha"]["value"] == pytest.approx(0.34, abs=0.02)
    assert found["plans"][0]["params"] == pytest.approx(1e9)
    assert main(["plan", "scaling", "--tokens", "1e9", "--layers", "2", "--width", "8", "--context", "64"]) == 0
    shown = capsys.readouterr().out
    assert "with attention" in shown
    assert "2404.10102" in shown


@pytest.mark.parametrize(
    "words",
    [[], ["--flops", "1e20", "--params", "1e9"], ["--gpu-hours", "3"], ["--flops", "1e20", "--law", "kaplan"]],
)
def test_a_question_that_cannot_be_answered_names_the_remedy(capsys, words):
    assert main(["plan", "scaling", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
