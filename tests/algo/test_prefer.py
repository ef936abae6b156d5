"""Preference losses by hand: the working stands beside each number."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from algo_cases import grad, one_token, ragged
from torch import Tensor

from hone.algo import prefer
from hone.algo.table import objective
from hone.algo.weight import Totals, token_mean, weigh
from hone.types import Batch, Forward

torch.set_num_threads(1)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def pair(chosen: list[float], rejected: list[float], ref: float = 0.0) -> tuple[Forward, Batch]:
    """Log-probs of the two rows' tokens; a shorter row is padded."""
    width = max(len(chosen), len(rejected))
    logp = torch.tensor([x + [0.0] * (width - len(x)) for x in (chosen, rejected)], dtype=torch.float64)
    mask = torch.tensor([[i < len(x) for i in range(width)] for x in (chosen, rejected)])
    batch = Batch(
        inputs=mask.long(), targets=mask.long(), mask=mask, real=mask, group=torch.zeros(2).long(),
        ref_logp=torch.full_like(logp, ref),
    )  # fmt: skip
    return Forward(logp=logp), batch


def test_a_pairs_loss_stands_on_both_rows_whose_weights_make_one_pair() -> None:
    fwd, batch = pair([-1.0], [-3.0], ref=-2.0)
    assert prefer.pair_margin(torch.tensor([3.0, 1.0, 2.0, 7.0])).tolist() == [2.0, 2.0, -5.0, -5.0]
    batch = weigh(batch, token_mean, Totals(rows=2, tokens=2))
    expected = softplus(-0.2)
    assert prefer.dpo(fwd, batch, beta=0.1).tolist() == pytest.approx([expected] * 2)
    assert objective(fwd, batch, ((1.0, prefer.dpo),)).item() == pytest.approx(expected)


def test_dpo_and_its_label_smoothing() -> None:
    # gains +1 and -1: u = 2, beta .5 -> softplus(-1) = .313262; smoothed .9 * .313262 + .1 * 1.313262 = .413262
    fwd, batch = pair([-1.0], [-3.0], ref=-2.0)
    assert prefer.dpo(fwd, batch, beta=0.5)[0].item() == pytest.approx(0.313262, abs=1e-6)
    assert prefer.dpo(fwd, batch, beta=0.5, smoothing=0.1)[0].item() == pytest.approx(0.413262, abs=1e-6)


def test_log_probs_are_summed_over_the_response() -> None:
    # chosen -1 - 2 - (-2 - 2) = 1, rejected -1 - (-2) = 1: u = 0
    fwd, batch = pair([-1.0, -2.0], [-1.0], ref=-2.0)
    assert prefer.reference_gain(fwd, batch).tolist() == [1.0, 1.0]
    assert prefer.dpo(fwd, batch)[0].item() == pytest.approx(math.log(2))


def test_ipo() -> None:
    # u = 2, beta .1: (2 - 5)^2 = 9; at u = 1 / (2 beta) it is 0
    fwd, batch = pair([-1.0], [-3.0], ref=-2.0)
    assert prefer.ipo(fwd, batch, beta=0.1)[0].item() == pytest.approx(9.0)
    assert prefer.ipo(fwd, batch, beta=0.25)[0].item() == 0.0


def test_simpo() -> None:
    # means -1.5 and -3: beta 2 -> margin 3, less gamma 1: softplus(-2)
    fwd, batch = pair([-1.0, -2.0], [-3.0])
    assert prefer.simpo(fwd, batch, beta=2.0, gamma=1.0)[0].item() == pytest.approx(softplus(-2.0))


def test_orpo() -> None:
    # mean log-probs log .5 and log .2: odds 1 and .25, log odds ratio log 4: softplus(-log 4) = log 1.25
    fwd, batch = pair([math.log(0.5)] * 2, [math.log(0.2)])
    assert prefer.odds(fwd, batch).tolist() == pytest.approx([math.log(1.25)] * 2)
    assert prefer.chosen_nll(fwd, batch).tolist() == pytest.approx([math.log(2)] * 2)


def test_orpos_odds_of_a_certain_answer_are_finite() -> None:
    logp = torch.tensor([[0.0], [-1.0]], requires_grad=True)
    _, batch = pair([0.0], [-1.0])
    loss = prefer.odds(Forward(logp=logp), batch).sum()
    loss.backward()
    assert loss.isfinite()
    assert grad(logp).isfinite().all()


def test_kto() -> None:
    # gain .7, z0 .2, beta 2: edge 1; desirable 1 - sigmoid(1) times 1.5, undesirable 1 - sigmoid(-1) times .5
    batch = one_token(
        ref_logp=torch.full((2, 1), -1.7).double(),
        label=torch.tensor([1.0, 0.0]).double(),
        kl_baseline=torch.full((2,), 0.2).double(),
    )
    found = prefer.kto(Forward(logp=torch.full((2, 1), -1.0).double()), batch, beta=2.0, good=1.5, bad=0.5)
    assert found.tolist() == pytest.approx([1.5 * (1 - sigmoid(1)), 0.5 * (1 - sigmoid(-1))])


def test_kto_pulls_the_desirable_up_and_the_undesirable_down() -> None:
    logp = torch.full((2, 1), -1.0).double().requires_grad_()
    batch = one_token(
        ref_logp=torch.full((2, 1), -1.0).double(),
        label=torch.tensor([1.0, 0.0]).double(),
        kl_baseline=torch.zeros(2).double(),
    )
    prefer.kto(Forward(logp=logp), batch).sum().backward()
    assert grad(logp)[0] < 0 < grad(logp)[1]


def scored(chosen: float, rejected: float, margin: float = 0.0) -> tuple[Forward, Batch]:
    """The score stands after the last real token, of three and of two."""
    value = torch.tensor([[50.0, 60.0, chosen], [70.0, rejected, 99.0]]).double().requires_grad_()
    real = torch.tensor([[True, True, True], [True, True, False]])
    batch = Batch(
        inputs=real.long(), targets=real.long(), mask=real & False, real=real, group=torch.zeros(2).long(),
        margin=torch.full((2,), margin).double(),
    )  # fmt: skip
    return Forward(value=value), batch


def test_bradley_terry() -> None:
    fwd, batch = scored(2.0, 2.0)
    assert prefer.last_value(fwd, batch).tolist() == [2.0, 2.0]
    assert prefer.bradley_terry(fwd, batch).tolist() == pytest.approx([0.693147] * 2, abs=5e-7)
    fwd, batch = scored(2.0, 0.5, margin=1.0)
    assert prefer.bradley_terry(fwd, batch)[0].item() == pytest.approx(softplus(-0.5))
    # centre .1: + .1 (2 + .5)^2 = .625
    assert prefer.bradley_terry(fwd, batch, centre=0.1)[0].item() == pytest.approx(softplus(-0.5) + 0.625)


def test_bradley_terry_reads_the_last_real_token_alone() -> None:
    fwd, batch = scored(2.0, 0.5)
    (slopes,) = torch.autograd.grad(prefer.bradley_terry(fwd, batch).sum(), fwd.value)
    assert (slopes != 0).tolist() == [[False, False, True], [False, True, False]]


def test_a_huge_margin_neither_overflows_nor_loses_its_gradient() -> None:
    for chosen, rejected, slope in ((1e4, -1e4, 0.0), (-1e4, 1e4, -1.0)):
        fwd, batch = scored(chosen, rejected)
        loss = prefer.bradley_terry(fwd, batch)[0]
        (slopes,) = torch.autograd.grad(loss, fwd.value)
        assert loss.isfinite()
        assert slopes[0, 2].item() == slope


def test_pointwise_losses_by_hand() -> None:
    fwd, batch = scored(2.0, -0.5)
    batch = replace(batch, label=torch.tensor([1.0, 0.25]).double())
    # (2 - 1)^2 / 2 and (-.5 - .25)^2 / 2;  softplus(2) - 2 and softplus(-.5) + .25 x .5
    assert prefer.score_error(fwd, batch).tolist() == pytest.approx([0.5, 0.28125])
    assert prefer.score_bce(fwd, batch).tolist() == pytest.approx([softplus(2.0) - 2.0, softplus(-0.5) + 0.125])


@pytest.mark.parametrize(("term", "slopes"), [(prefer.score_error, [1.0, -0.75]), (prefer.score_bce, None)])
def test_pointwise_gradients_are_those_of_the_closed_form(term: Callable[..., Tensor], slopes: list[float]) -> None:
    fwd, batch = scored(2.0, -0.5)
    batch = replace(batch, label=torch.tensor([1.0, 0.25]).double())
    assert torch.autograd.gradcheck(lambda value: term(Forward(value=value), batch), (fwd.value,))
    (found,) = torch.autograd.grad(term(fwd, batch).sum(), fwd.value)
    expected = slopes or [1 / (1 + math.exp(-2.0)) - 1.0, 1 / (1 + math.exp(0.5)) - 0.25]  # R - label, sigmoid - label
    assert [found[0, 2].item(), found[1, 1].item()] == pytest.approx(expected)
    assert int((found != 0).sum()) == 2, "the last real token alone"


@pytest.mark.parametrize("term", [prefer.score_error, prefer.score_bce])
def test_pointwise_losses_keep_the_precision_of_the_value(term: Callable[..., Tensor]) -> None:
    fwd, batch = scored(0.1, 0.2)
    assert term(fwd, replace(batch, label=torch.tensor([1.0, 0.0]).float())).dtype == torch.float64


PAIRED = {"dpo": prefer.dpo, "ipo": prefer.ipo, "simpo": prefer.simpo, "odds": prefer.odds}


@pytest.mark.parametrize("name", sorted(PAIRED))
def test_every_paired_loss_falls_as_the_chosen_rises_and_the_rejected_falls(name: str) -> None:
    batch = ragged()
    logp = torch.where(batch.mask, batch.old_logp, 0.0).requires_grad_()
    batch = replace(batch, ref_logp=batch.old_logp)  # where the policy starts
    (slopes,) = torch.autograd.grad(PAIRED[name](Forward(logp=logp), batch).sum(), logp)
    sign: Tensor = torch.tensor([-1.0, 1.0] * 4).double()[:, None]
    assert (slopes * sign)[batch.mask].gt(0).all()


def test_accuracy_counts_a_tie_as_a_half_and_rounding_as_a_tie() -> None:
    for chosen, rejected, expected in (([-1.0], [-3.0], 1.0), ([-3.0], [-1.0], 0.0), ([-2.0], [-2.0], 0.5)):
        fwd, batch = pair(chosen, rejected, ref=-2.0)
        assert prefer.gain_accuracy(fwd, batch).tolist() == [expected] * 2
    fwd, batch = pair([-2.0 + 1e-9, -2.0], [-2.0, -2.0], ref=-2.0)
    assert prefer.gain_accuracy(fwd, batch).tolist() == [0.5, 0.5]
    fwd, batch = pair([-2.0 + 1e-4, -2.0], [-2.0, -2.0], ref=-2.0)
    assert prefer.gain_accuracy(fwd, batch).tolist() == [1.0, 1.0]
