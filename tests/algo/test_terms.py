"""Loss terms by hand: the working stands beside each number."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from algo_cases import grad, one_token, row_of
from each import each
from torch import Tensor

from hone.algo import credit, klq, terms
from hone.algo.table import assign_credit, objective
from hone.algo.weight import Totals, row_mean, row_sum, weigh
from hone.types import Batch, Forward

torch.set_num_threads(1)


def column(*xs: float) -> Tensor:
    return torch.tensor(xs, dtype=torch.float64)[:, None]


def at_ratio(rho: float, adv: float) -> tuple[Forward, Batch]:
    logp = column(math.log(rho)).requires_grad_()
    return Forward(logp=logp), one_token(old_logp=column(0.0), adv=column(adv))


CLIP_TABLE = [
    (0.5, 0.8, 0.40), (0.5, 1.0, 0.50), (0.5, 1.3, 0.60), (0.5, 1.5, 0.60),
    (-5.0, 0.5, -4.0), (-5.0, 1.0, -5.0), (-5.0, 1.5, -7.5),
    (-1.0, 0.5, -0.8), (-1.0, 1.0, -1.0), (-1.0, 1.5, -1.5),
    (1.0, 0.5, 0.5), (1.0, 1.0, 1.0), (1.0, 1.5, 1.2),
    (5.0, 0.5, 2.5), (5.0, 1.0, 5.0), (5.0, 1.5, 6.0),
    (-0.8, 0.4, -0.64),
]  # fmt: skip


@each(("adv", "rho", "surrogate"), CLIP_TABLE)
def test_the_clip_table_of_the_specification(adv: float, rho: float, surrogate: float) -> None:
    fwd, batch = at_ratio(rho, adv)
    assert terms.clipped(fwd, batch).item() == pytest.approx(-surrogate)  # the loss is minus the surrogate


@pytest.mark.parametrize(("adv", "rho"), [(-0.8, 0.4), (0.5, 1.3), (-5.0, 0.5), (5.0, 1.5)])
def test_the_clip_cuts_the_gradient_and_says_so(adv: float, rho: float) -> None:
    fwd, batch = at_ratio(rho, adv)
    terms.clipped(fwd, batch).sum().backward()
    assert grad(fwd.logp).item() == 0.0
    assert terms.is_clipped(fwd, batch).item() == 1.0


@each(("adv", "rho"), [(0.5, 0.8), (0.5, 0.1), (-1.0, 1.5), (1.0, 1.1), (-1.0, 0.9), (1.0, 1.0)])
def test_the_clip_leaves_a_gradient_that_goes_back_and_says_so(adv: float, rho: float) -> None:
    fwd, batch = at_ratio(rho, adv)
    terms.clipped(fwd, batch).sum().backward()
    assert grad(fwd.logp).item() == pytest.approx(-adv * rho)
    assert terms.is_clipped(fwd, batch).item() == 0.0


def test_clip_higher_moves_the_upper_bound_only() -> None:
    fwd, batch = at_ratio(1.25, 1.0)
    assert terms.clipped(fwd, batch, low=0.2, high=0.28).item() == pytest.approx(-1.25)
    fwd, batch = at_ratio(1.5, 1.0)
    assert terms.clipped(fwd, batch, low=0.2, high=0.28).item() == pytest.approx(-1.28)
    fwd, batch = at_ratio(0.5, -1.0)
    assert terms.clipped(fwd, batch, low=0.2, high=0.28).item() == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("adv", "rho", "loss", "slope"),
    [
        (-2.0, 5.0, 6.0, 0.0),  # unclipped 10, at most 3 * 2
        (-2.0, 2.0, 4.0, 4.0),  # below the cap: 2 * 2 and its gradient
        (-2.0, 0.5, 1.6, 0.0),  # the ordinary lower clip
        (2.0, 5.0, -2.4, 0.0),  # a positive advantage knows no dual clip
    ],
)
def test_dual_clip(adv: float, rho: float, loss: float, slope: float) -> None:
    fwd, batch = at_ratio(rho, adv)
    found = terms.clipped(fwd, batch, dual=3.0)
    assert found.item() == pytest.approx(loss)
    found.sum().backward()
    assert grad(fwd.logp).item() == pytest.approx(slope)
    assert terms.is_clipped(fwd, batch, dual=3.0).item() == float(slope == 0.0)


def test_policy_gradient_and_ratio_gradient() -> None:
    fwd, batch = at_ratio(2.0, 3.0)
    assert terms.policy_gradient(fwd, batch).item() == pytest.approx(-3 * math.log(2))
    assert terms.ratio_gradient(fwd, batch).item() == pytest.approx(-6.0)


@pytest.mark.parametrize(("rho", "weight"), [(2.0, 2.0), (9.0, 5.0), (0.1, 0.1)])
def test_truncated_caps_the_weight_and_keeps_the_gradient(rho: float, weight: float) -> None:
    # -min(rho, 5) A log pi with A = 3: value -3 w log rho, gradient -3 w
    fwd, batch = at_ratio(rho, 3.0)
    loss = terms.truncated(fwd, batch, max_ratio=5.0)
    assert loss.item() == pytest.approx(-3 * weight * math.log(rho))
    loss.sum().backward()
    assert grad(fwd.logp).item() == pytest.approx(-3 * weight)
    assert terms.is_truncated(fwd, batch, max_ratio=5.0).item() == float(rho > 5)


# --- ratios ---


def test_the_three_ratios() -> None:
    # token ratios 2 and 8 (64 is not trained): product 16, geometric mean 4
    batch = row_of([1, 1, 0], old_logp=[0.0] * 3)
    fwd = Forward(logp=torch.tensor([[2.0, 8.0, 64.0]]).double().log())
    assert terms.token_ratio(fwd, batch)[0].tolist() == pytest.approx([2.0, 8.0, 1.0])
    assert terms.row_ratio(fwd, batch)[0, :2].tolist() == pytest.approx([4.0, 4.0])
    assert terms.trajectory_ratio(fwd, batch)[0, :2].tolist() == pytest.approx([16.0, 16.0])


def test_a_rows_ratio_has_on_policy_the_gradient_of_its_mean_or_summed_log_prob() -> None:
    # one advantage a row, averaged by row: the geometric mean gives A mean(grad log pi), the product A sum(grad log pi)
    old = torch.tensor([[-0.5, -1.0, -2.0], [-0.3, -0.2, 0.0]]).double()
    base = one_token(adv=column(2.0, -3.0))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    batch = replace(
        base, inputs=mask.long(), targets=mask.long(), mask=mask, real=mask, old_logp=old,
        adv=torch.where(mask, column(2.0, -3.0), 0.0),
    )  # fmt: skip
    totals = Totals(rows=2, tokens=5)
    for name, how in (("row", row_mean), ("trajectory", row_sum)):
        fwd = Forward(logp=old.clone().requires_grad_())
        ratio = partial(terms.clipped, ratio=terms.RATIOS[name])
        (found,) = torch.autograd.grad(objective(fwd, weigh(batch, row_mean, totals), ((1.0, ratio),)), fwd.logp)
        plain = objective(fwd, weigh(batch, how, totals), ((1.0, terms.policy_gradient),))
        (expected,) = torch.autograd.grad(plain, fwd.logp)
        torch.testing.assert_close(found, expected)


# --- KL ---


def test_the_estimators_of_the_specification() -> None:
    d = torch.tensor([0.1, -0.5, 0.1, 1.2], dtype=torch.float64)
    assert terms.k1(d).sum().item() == pytest.approx(0.9)
    assert terms.k3(d).tolist() == pytest.approx([0.004837, 0.148721, 0.004837, 0.501194], abs=5e-7)
    assert terms.k3(d).sum().item() == pytest.approx(0.659590, abs=5e-7)
    # .005 + .125 + .005 + .72
    assert terms.k2(d).sum().item() == pytest.approx(0.855)


def test_k3_is_never_negative_even_for_a_tiny_difference() -> None:
    d = torch.linspace(-1e-4, 1e-4, 2001)
    assert (terms.k3(d) >= 0).all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_penalty_is_the_coefficient_times_the_estimator(estimator: str) -> None:
    batch = one_token(ref_logp=column(-1.2), kl_coef=torch.tensor([0.5]).double())
    found = terms.kl_penalty(Forward(logp=column(-1.0)), batch, estimator=estimator)
    assert found.item() == pytest.approx(0.5 * terms.ESTIMATORS[estimator](torch.tensor(0.2).double()).item())


def test_the_exact_penalty_is_the_forward_field() -> None:
    batch = one_token(kl_coef=torch.tensor([0.5]).double())
    assert terms.kl_penalty(Forward(logp=column(0.0), ref_kl=column(3.0)), batch, estimator="exact").item() == 1.5


def test_the_penalty_to_the_old_policy_is_k3_the_right_way_round() -> None:
    # log(pi/old) = .2: exp(.2) - 1 - .2 = .0214028, times 2
    batch = one_token(old_logp=column(-1.2), kl_coef=torch.tensor([2.0]).double())
    fwd = Forward(logp=column(-1.0), old_kl=column(7.0))
    assert terms.kl_to_old(fwd, batch).item() == pytest.approx(0.0214028, abs=1e-7)
    assert terms.old_penalty(fwd, batch).item() == pytest.approx(0.0428055, abs=1e-7)
    assert terms.old_penalty(fwd, batch, exact=True).item() == 14.0


# --- critics ---


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (2.0, None, 0.5, 1.0),  # (2 - 1)^2 / 2
        (2.0, 0.2, 0.5, 1.0),  # clipped twin 0.5 + 0.2: (0.7 - 1)^2 / 2 = .045 is the better one
        (0.9, 0.2, 0.045, 0.0),  # unclipped (.1)^2 / 2 = .005; the clipped twin at 0.7 is worse and has no gradient
        (0.6, 0.2, 0.08, -0.4),  # inside the clip both are the same: (-.4)^2 / 2
        (-1.0, 0.2, 2.0, -2.0),  # the wrong way: unclipped (-2)^2 / 2 = 2, twin at 0.3: .245
    ],
)
def test_value_error(value: float, clip: float | None, loss: float, slope: float) -> None:
    # old value 0.5, target 1
    v = column(value).requires_grad_()
    batch = one_token(old_value=column(0.5), returns=column(1.0))
    found = terms.value_error(Forward(value=v), batch, clip=clip)
    assert found.item() == pytest.approx(loss)
    found.sum().backward()
    assert grad(v).item() == pytest.approx(slope)


def test_entropy_is_a_bonus() -> None:
    assert terms.neg_entropy(Forward(entropy=column(0.7)), one_token(adv=column(0.0))).item() == -0.7


def test_q_learning_by_hand() -> None:
    # beta .5, gamma 1, lam 0; old d = log(old/ref) = .2, .4; V_old 1, 2; outcome 3
    # regularised rewards -.1 and 3 - .2 = 2.8; lam 0 returns: -.1 + 2 = 1.9 and 2.8
    # Q targets r + V(next), the token's own penalty given back: 1.9 + .1 = 2 and 2.8 + .2 = 3
    # Q = beta log(pi/ref) + V: log(pi/ref) = .6, 0 and V = 1.5, 2: 1.8 and 2; errors -.2, -1 -> .02, .5
    batch = row_of([1, 1], reward=3.0, old_logp=[-1.0, -1.0], ref_logp=[-1.2, -1.4], old_value=[1.0, 2.0], kl_coef=0.5)
    batch = assign_credit(batch, klq(lam=0.0))
    fwd = Forward(logp=torch.tensor([[-0.6, -1.4]]).double(), value=torch.tensor([[1.5, 2.0]]).double())
    assert terms.q_error(fwd, batch)[0].tolist() == pytest.approx([0.02, 0.5])


def test_q_learning_rests_at_the_regularised_optimum() -> None:
    # one state, three actions, rewards r: pi* = ref exp(r / beta) / Z, V* = beta log Z; every action's error is 0 there
    r, ref, beta = torch.tensor([1.0, 0.0, -0.5]).double(), torch.tensor([0.2, 0.5, 0.3]).double(), 0.4
    z = (ref * (r / beta).exp()).sum()
    pi, v = ref * (r / beta).exp() / z, beta * z.log()
    batch = one_token(
        reward=r, valid=torch.ones(3, dtype=torch.bool), old_logp=pi.log()[:, None], ref_logp=ref.log()[:, None],
        old_value=v.expand(3)[:, None], kl_coef=torch.full((3,), beta, dtype=torch.float64),
    )  # fmt: skip
    adv = credit.gae(batch, lam=0.95, kl="k1")
    batch = replace(batch, returns=adv + batch.old_value)
    fwd = Forward(logp=pi.log()[:, None], value=v.expand(3)[:, None])
    torch.testing.assert_close(terms.q_error(fwd, batch), torch.zeros(3, 1).double(), rtol=0, atol=1e-24)


# --- supervised ---


def test_nll_and_step_bce() -> None:
    assert terms.nll(Forward(logp=column(-0.7)), one_token(adv=column(0.0))).item() == 0.7
    # right: log(1 + e^-2), wrong: log(1 + e^2)
    batch = one_token(label=column(1.0, 0.0))
    found = terms.step_bce(Forward(value=column(2.0, 2.0)), batch).flatten().tolist()
    assert found == pytest.approx([math.log1p(math.exp(-2)), math.log1p(math.exp(2))])


def test_step_bce_keeps_the_precision_of_the_value() -> None:
    batch = one_token(label=torch.ones(1, 1, dtype=torch.float32))
    value = torch.full((1, 1), 0.3, dtype=torch.float64)
    found = float(terms.step_bce(Forward(value=value), batch))
    assert found == pytest.approx(math.log1p(math.exp(-0.3)), rel=1e-14)


def test_a_number_that_overflows_exp_off_the_mask_stays_off() -> None:
    batch = row_of([1, 0], old_logp=[0.0, -1e4], ref_logp=[0.0, 1e4], adv=[1.0, 0.0], kl_coef=1.0)
    logp = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    total = terms.clipped(Forward(logp=logp), batch) + terms.kl_penalty(Forward(logp=logp), batch)
    total[batch.mask].sum().backward()
    assert grad(logp).tolist() == [[-1.0, 0.0]]
