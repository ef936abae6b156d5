"""Edges that other tests pass by: exact bounds, what stands off the mask, types, defaults of the parts, refusals."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from algo_cases import grouped, one_token, ragged, rollout, row_of
from each import each
from torch import Tensor

from hone import algo
from hone.algo import assign_credit, control, credit, prefer, select, table, terms, weight
from hone.algo.settings import NOT_NEGATIVE, POSITIVE, RANGES, SHARE, Range
from hone.errors import HoneError
from hone.types import Batch, Forward, Outcome

torch.set_num_threads(1)


def pairs(*logp: float) -> tuple[Forward, Batch]:
    """One token a row, ref_logp 0."""
    x = torch.tensor(logp, dtype=torch.float64)[:, None]
    return Forward(logp=x, value=x), one_token(ref_logp=torch.zeros_like(x), margin=torch.zeros(len(x)))


# --- two pairs: each has its own loss, on both of its rows ---


def test_a_pairs_number_stands_on_its_own_rows() -> None:
    fwd, batch = pairs(-1.0, -2.0, -3.0, -5.0)
    assert prefer.pair_margin(fwd.logp[:, 0]).tolist() == [1.0, 1.0, 2.0, 2.0]
    assert prefer.chosen_nll(fwd, batch).tolist() == [1.0, 1.0, 3.0, 3.0]
    assert prefer.gain_margin(fwd, batch).tolist() == [1.0, 1.0, 2.0, 2.0]
    # centre 0.5: 0.5 (R_w + R_l)^2 = 0.5 * 9 and 0.5 * 64
    pull = prefer.bradley_terry(fwd, batch, centre=0.5) - prefer.bradley_terry(fwd, batch)
    assert pull.tolist() == pytest.approx([4.5, 4.5, 32.0, 32.0])


def test_who_is_ahead_is_asked_of_each_pair_and_a_tie_is_not_ahead() -> None:
    fwd, batch = pairs(-1.0, -2.0, -5.0, -3.0)
    for watch in (prefer.gain_accuracy, prefer.likelihood_accuracy, prefer.score_accuracy):
        assert watch(fwd, batch).tolist() == [1.0, 1.0, 0.0, 0.0]
    for sure in (0.0, -2.0):
        assert prefer.gain_accuracy(*pairs(sure, sure)).tolist() == [0.5, 0.5]
    assert prefer.gain_accuracy(*pairs(-1.0, -1.0 - 1e-8)).tolist() == [0.5, 0.5]
    assert prefer.gain_accuracy(*pairs(-1.0, -1.0 - 1e-5)).tolist() == [1.0, 1.0]
    fwd, batch = pairs(-2.0, -2.0)
    assert prefer.likelihood_accuracy(fwd, batch).tolist() == [0.0, 0.0]
    assert prefer.score_accuracy(fwd, batch).tolist() == [0.0, 0.0]


def test_who_is_likelier_is_asked_of_the_mean_over_trained_tokens() -> None:
    # chosen: one token of -2; rejected: -1.5 twice, the better mean and the worse sum, and rubbish that is not trained
    mask = torch.tensor([[True, False, False], [True, True, False]])
    logp = torch.tensor([[-2.0, 0.0, 50.0], [-1.5, -1.5, -50.0]]).double()
    batch = replace(grouped([0.0, 0.0], length=3), mask=mask)
    found = prefer.likelihood_accuracy(Forward(logp=logp), batch)
    assert found.tolist() == [0.0, 0.0]
    assert found.dtype == torch.float32


def test_a_tie_is_relative_to_the_pairs_own_log_probs() -> None:
    def accuracy(*logp: float) -> list[float]:
        fwd, batch = pairs(*logp)
        return prefer.gain_accuracy(fwd, batch).tolist()

    # 1e-4 is rounding beside 1,000 and a lead beside 1; each pair is judged by its own size
    assert accuracy(-1000.0, -1000.0001, -1.0, -1.0001) == [0.5, 0.5, 1.0, 1.0]
    assert accuracy(-1.0, -1.000003) == [1.0, 1.0], "3e-6 is more than 1e-6 of 2"
    # all tokens of a row count: 2,000 times 1e-6 is more than 0.0015
    logp = torch.tensor([[-500.0, -500.0], [-500.0, -500.0015]]).double()
    batch = replace(grouped([0.0, 0.0], length=2), ref_logp=torch.zeros(2, 2).double())
    assert prefer.gain_accuracy(Forward(logp=logp), batch).tolist() == [0.5, 0.5]
    # what is not trained on has no part in the size
    mask = torch.tensor([[True, False]] * 2)
    logp = torch.tensor([[-1.0, -1e6], [-1.0001, -1e6]]).double()
    batch = replace(grouped([0.0, 0.0], length=2), mask=mask, ref_logp=torch.zeros(2, 2).double())
    assert prefer.gain_accuracy(Forward(logp=logp), batch).tolist() == [1.0, 1.0]


def test_the_score_is_read_at_the_last_real_token_whatever_stands_on_padding() -> None:
    real = torch.tensor([[False, True, False], [True, True, False]])
    batch = replace(grouped([0.0, 0.0], length=3), real=real)
    fwd = Forward(value=torch.tensor([[5.0, 3.0, 7.0], [5.0, 4.0, 7.0]]).double())
    assert prefer.last_value(fwd, batch).tolist() == [3.0, 4.0]


def test_odds_of_a_certain_answer_are_those_of_the_nearest_one_that_is_not() -> None:
    # p = exp(-1e-7) and exp(-1)
    sure, half = -1e-7, -1.0
    gap = (sure - math.log(-math.expm1(sure))) - (half - math.log(-math.expm1(half)))
    assert prefer.odds(*pairs(-1e-9, half))[0].item() == pytest.approx(math.log1p(math.exp(-gap)), rel=1e-9)


# --- at the bound itself the gradient still flows ---


def at(ratio: float, adv: float) -> tuple[Forward, Batch]:
    x = torch.tensor([[math.log(ratio)]], dtype=torch.float64).requires_grad_()
    zero = torch.zeros(1, 1, dtype=torch.float64)
    return Forward(logp=x), one_token(old_logp=zero, adv=torch.full_like(zero, adv))


@each(
    ("ratio", "adv", "dual", "cut"),
    [
        (0.5, -1.0, None, 0.0),
        (2.0, 1.0, None, 0.0),
        (0.5, -1.0, 4.0, 0.0),
        (4.0, -1.0, 4.0, 0.0),
        (0.25, -1.0, None, 1.0),
        (4.0, 1.0, None, 1.0),
        (0.25, -1.0, 4.0, 1.0),
        (8.0, -1.0, 4.0, 1.0),
        (4.0, 1.0, 4.0, 1.0),
        (8.0, -1.0, None, 0.0),
        (0.25, 1.0, None, 0.0),
    ],
)
def test_the_bound_itself_is_not_clipped(ratio: float, adv: float, dual: float | None, cut: float) -> None:
    fwd, batch = at(ratio, adv)
    assert ratio == 8.0 or fwd.logp.exp().item() == ratio, "exactly at the bound"
    assert terms.is_clipped(fwd, batch, low=0.5, high=1.0, dual=dual).item() == cut


def test_without_an_advantage_nothing_is_clipped() -> None:
    for ratio in (0.25, 4.0):
        fwd, batch = at(ratio, 0.0)
        assert terms.is_clipped(fwd, batch, low=0.5, high=1.0, dual=3.0).item() == 0.0
        assert terms.clipped(fwd, batch, low=0.5, high=1.0, dual=3.0).item() == 0.0


def test_the_dual_clip_is_of_negative_advantages_alone() -> None:
    # A = 0.5 and r = 0.25: -min(0.125, 0.25) = -0.125, and not -dual A = -1.5
    assert terms.clipped(*at(0.25, 0.5), low=0.5, high=1.0, dual=3.0).item() == -0.125


@pytest.mark.parametrize(("estimator", "gradient"), [("k1", 2 * 1.5 + 2), ("k2", 2 * 1.5), ("k3", None)])
def test_the_estimators_weighed_by_the_ratio_by_hand(estimator: str, gradient: float | None) -> None:
    # r = 2, d = log pi - log ref = 1.5: k1 has d(r d) = r d + r, k2 held fixed has r d, k3 d(r k3) = r (k3 + 1 - e^-d)
    logp = torch.tensor([[-1.0]], dtype=torch.float64).requires_grad_()
    batch = row_of([1], old_logp=[-1.0 - math.log(2)], ref_logp=[-2.5], kl_coef=1.0)
    loss = terms.kl_penalty(Forward(logp=logp), batch, estimator=estimator, through_ratio=True)
    values = {"k1": 1.5, "k2": 1.125, "k3": math.exp(-1.5) - 1 + 1.5}
    assert loss.item() == pytest.approx(2 * values[estimator])
    loss.sum().backward()
    expected = 2 * (values["k3"] + 1 - math.exp(-1.5)) if gradient is None else gradient
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "target", "worse"), [(3.0, 9.0, 1.5), (-3.0, -9.0, 0.5), (1.2, -9.0, 1.2), (0.8, 9.0, 0.8)]
)
def test_a_clipped_value_stays_near_the_old_one_on_both_sides(value: float, target: float, worse: float) -> None:
    # old value 1, clip 0.5
    batch = row_of([1], old_value=[1.0], returns=[target])
    fwd = Forward(value=torch.tensor([[value]], dtype=torch.float64))
    assert terms.value_error(fwd, batch, clip=0.5).item() == pytest.approx((worse - target) ** 2 / 2)


def test_the_watched_shares_are_numbers() -> None:
    fwd, batch = at(4.0, 1.0)
    assert terms.is_clipped(fwd, batch).dtype == torch.float32
    assert terms.is_truncated(fwd, batch).dtype == torch.float32
    assert prefer.score_accuracy(*pairs(-1.0, -2.0)).dtype == torch.float32


def test_the_cap_itself_is_not_truncated() -> None:
    assert terms.is_truncated(*at(2.0, 1.0), max_ratio=2.0).item() == 0.0
    assert terms.is_truncated(*at(4.0, 1.0), max_ratio=2.0).item() == 1.0


def test_every_token_has_its_own_capped_weight() -> None:
    # ratios 2 and 1/2, whose geometric mean is 1; -min(r, max) A log pi
    batch = row_of([1, 1], old_logp=[-2 * math.log(2), 0.0], adv=[1.0, 3.0])
    fwd = Forward(logp=torch.tensor([[-math.log(2), -math.log(2)]], dtype=torch.float64))
    weights = terms.truncated(fwd, batch, max_ratio=1.5)[0] / math.log(2)
    assert weights.tolist() == pytest.approx([1.5, 0.5 * 3])
    assert terms.is_truncated(fwd, batch, max_ratio=1.5)[0].tolist() == [1.0, 0.0]


def test_the_bounds_of_the_mismatch_mask_are_inside() -> None:
    batch = row_of([1, 1, 1, 1], old_logp=[math.log(x) for x in (2.0, 0.5, 4.0, 0.25)], gen_logp=[0.0] * 4)
    found = weight.mismatch(batch, how="mask", cap=2.0)
    assert found[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found.dtype == torch.float64


# --- off the mask ---


def test_nothing_is_earned_or_charged_off_the_mask() -> None:
    steps = [1.0, 100.0, math.nan, 100.0]
    batch = row_of([1, 0, 1, 0], reward=2.0, step_reward=steps, old_logp=[-1.0] * 4, ref_logp=[-3.0] * 4, kl_coef=0.5)
    assert credit.kl_cost(batch, kl="k1").tolist() == [[1.0, 0.0, 1.0, 0.0]]
    assert credit.token_rewards(batch, kl="k1").tolist() == [[0.0, 0.0, 1.0, 0.0]]
    assert credit.kl_cost(batch).tolist() == [[0.0] * 4]


STEPWISE = [credit.group_process, credit.group_progress]
ROWWISE = [credit.group_centred, credit.group_zscore, credit.leave_one_out, *STEPWISE, credit.gae]


@each("how", [*ROWWISE, credit.reward_to_go])
def test_advantages_are_zero_off_the_mask(how: Callable[[Batch], Tensor]) -> None:
    batch = ragged()
    adv = how(batch)
    assert not adv[~batch.mask].any()
    assert adv[batch.mask].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_off_the_mask_the_reference_is_no_distance_away(estimator: str) -> None:
    batch = row_of([0], ref_logp=[-1.0], kl_coef=1.0)
    fwd = Forward(logp=torch.full((1, 1), -3.0).double())
    assert terms.kl_penalty(fwd, batch, estimator=estimator).item() == 0.0


def test_off_the_mask_the_old_policy_is_no_distance_away() -> None:
    batch = row_of([1, 0], old_logp=[-1.0, 5.0])
    assert terms.kl_to_old(Forward(logp=torch.tensor([[-1.0, -7.0]]).double()), batch).tolist() == [[0.0, 0.0]]


def test_the_mismatch_is_of_the_old_policy_and_the_sampler() -> None:
    batch = row_of([1], old_logp=[-1.0], gen_logp=[-1.0 - math.log(1.5)])
    assert weight.mismatch(batch, how="truncate", cap=2.0).item() == pytest.approx(1.5)


def test_off_the_mask_q_learning_has_the_values_error_alone() -> None:
    # (V - R)^2 / 2 = 2, whatever the log-probs there
    batch = row_of([0], old_logp=[5.0], ref_logp=[7.0], returns=[1.0], kl_coef=0.5)
    fwd = Forward(logp=torch.full((1, 1), 11.0).double(), value=torch.full((1, 1), 3.0).double())
    assert terms.q_error(fwd, batch).item() == 2.0


@pytest.mark.parametrize("how", [credit.group_centred, credit.group_zscore, credit.leave_one_out])
def test_an_invalid_row_has_no_advantage_whatever_its_mask(how: Callable[[Batch], Tensor]) -> None:
    batch = grouped([1.0, None, 3.0, 9.0, None, None], group=[0, 0, 0, 1, 1, 2])
    left = torch.where(batch.valid, batch.reward, 100.0)  # what stands where there is no reward is not read
    adv = how(replace(batch, mask=torch.ones_like(batch.mask), reward=left))[:, 0]
    assert adv[[1, 3, 4, 5]].tolist() == [0.0] * 4
    assert adv[0].item() == -adv[2].item() < 0


def test_steps_are_counted_exactly() -> None:
    # seven steps in thirteen rows, 0 three times and 7 four times: mean 4, variance (3 * 16 + 4 * 9) / 7 = 12
    # in float32 7/13 * 13 is not 7
    steps = torch.tensor([[0.0]] * 3 + [[7.0]] * 4 + [[math.nan]] * 6).double()
    batch = replace(grouped([0.0] * 13), step_reward=steps)
    z = [-4 / 12**0.5] * 3 + [3 / 12**0.5] * 4 + [0.0] * 6
    assert credit.group_process(batch, eps=0.0)[:, 0].tolist() == pytest.approx(z, rel=1e-14)


def test_steps_are_divided_by_their_spread_and_eps() -> None:
    batch = replace(grouped([0.0] * 2), step_reward=torch.tensor([[1.0], [3.0]]).double())
    assert credit.group_process(batch, eps=1.0)[:, 0].tolist() == [-0.5, 0.5]


def test_one_rows_steps_are_compared_with_each_other() -> None:
    alone = replace(grouped([0.0], length=2), step_reward=torch.tensor([[1.0, 3.0]]).double())
    assert credit.group_process(alone, eps=0.0).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("value", [0.1, 0.7])
def test_equal_steps_are_no_signal_in_float32_either(value: float) -> None:
    equal = replace(grouped([0.0] * 7, length=3), step_reward=torch.full((7, 3), value))
    assert not credit.group_process(equal).any()


def test_every_group_has_its_own_spread() -> None:
    # stds 1 and 10: each group's z-scores are -1 and 1
    batch = grouped([0.0, 2.0, 0.0, 20.0], group=[0, 0, 1, 1])
    assert credit.group_zscore(batch, eps=0.0)[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]


@each("how", ROWWISE)
def test_float32_in_is_float32_out(how: Callable[[Batch], Tensor]) -> None:
    full = ragged()
    half = replace(full, **{n: x.float() for n, x in full.columns().items() if x.dtype == torch.float64})
    assert how(half).dtype == torch.float32
    assert credit.whiten(half.old_value, half.mask).dtype == torch.float32
    assert credit._group_mean(half.reward, half, half.valid)[1].dtype == torch.float32


# --- defaults of the parts, where no algorithm names them ---


@each(
    ("part", "defaults"),
    [
        (credit.kl_cost, {"kl": ""}),
        (credit.token_rewards, {"kl": ""}),
        (credit.row_rewards, {"kl": ""}),
        (credit.group_centred, {"kl": ""}),
        (credit.group_zscore, {"kl": "", "eps": 1e-4}),
        (credit.leave_one_out, {"kl": ""}),
        (credit.group_process, {"eps": 1e-4}),
        (credit.group_progress, {"lam": 0.7}),
        (credit.gae, {"gamma": 1.0, "lam": 0.95, "kl": ""}),
        (credit.reward_to_go, {"gamma": 1.0, "kl": ""}),
        (credit.whiten, {"reduce": credit.one_rank, "eps": 1e-8}),
        (control.proportional, {"gain": 0.1}),
        (prefer.dpo, {"beta": 0.1, "smoothing": 0.0}),
        (prefer.ipo, {"beta": 0.1}),
        (prefer.simpo, {"beta": 2.0, "gamma": 1.0}),
        (prefer.kto, {"beta": 0.1, "good": 1.0, "bad": 1.0}),
        (prefer.bradley_terry, {"centre": 0.0}),
        (select.shape_overlong, {"limit": 0, "margin": 0}),
        (select.verified, {"threshold": 1.0, "keep": 0}),
        (terms.ratio_gradient, {"ratio": terms.token_ratio}),
        (terms.clipped, {"low": 0.2, "high": 0.2, "dual": None, "ratio": terms.token_ratio}),
        (terms.is_clipped, {"low": 0.2, "high": 0.2, "dual": None, "ratio": terms.token_ratio}),
        (terms.truncated, {"max_ratio": 5.0}),
        (terms.is_truncated, {"max_ratio": 5.0}),
        (terms.kl_penalty, {"estimator": "k3", "through_ratio": False}),
        (terms.old_penalty, {"exact": False}),
        (terms.value_error, {"clip": None}),
        (weight.fixed_length, {"max_tokens": 0}),
    ],
)
def test_the_defaults_of_a_part(part: Callable[..., Any], defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(part).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == defaults


def test_the_defaults_of_the_records() -> None:
    assert table.TrustRegion() == table.TrustRegion(delta=0.01, damping=0.1, cg_steps=10, backtracks=10, shrink=0.5)
    plain = table.Algorithm(loss=())
    assert (plain.name, plain.whiten, plain.online, plain.on_policy, plain.refill) == ("", False, False, False, False)
    assert (plain.group, plain.unit, plain.credit, plain.trust_region) == (1, 1, None, None)
    assert (plain.needs, plain.wants, plain.control, plain.watch) == (set(), {"logp"}, (), ())
    assert (plain.select, plain.weigh) == (select.everything, weight.token_mean)
    assert control.Control(column="x", start=1.0) == control.constant("x", 1.0)


@pytest.mark.parametrize(
    "how", [weight.token_mean, weight.row_mean, weight.row_sum, partial(weight.fixed_length, max_tokens=1)]
)
def test_one_row_of_one_token_weighs_one_in_float64(how: weight.Weigh) -> None:
    batch = weight.weigh(row_of([1]), how, weight.Totals(rows=1, tokens=1))
    assert (batch.token_weight.item(), batch.row_weight.item()) == (1.0, 1.0)
    assert (batch.token_weight.dtype, batch.row_weight.dtype) == (torch.float64, torch.float64)


def test_the_averages_by_name() -> None:
    assert {"token": weight.token_mean, "row": weight.row_mean, "limit": weight.fixed_length} == weight.AVERAGES


def test_shaping_adds_a_part_and_keeps_the_others_and_the_shortest_margin_is_one_token() -> None:
    # a limit of 4: the margin is max(1, 4 // 5) = 1, so three tokens are free and four cost 1
    free, full = rollout([1] * 3, 1.0, limit=4), rollout([1] * 4, 1.0, limit=4)
    full = replace(full, outcome=Outcome(value=1.0, parts={"math": 1.0}))
    ((a, b),) = select.shape_overlong([[free, full]])
    unscored = rollout([1] * 4, scored=False)
    assert select.shape_overlong([[unscored]]) == [[unscored]]
    assert a.outcome == Outcome(value=1.0, parts={"overlong": 0.0}, added={"overlong": 0.0})
    assert b.outcome == Outcome(value=0.0, parts={"math": 1.0, "overlong": -1.0}, added={"overlong": -1.0})


@pytest.mark.parametrize(("kl", "beta"), [(0.75, 1.0), (0.76, 2.0), (0.25, 0.5)])
def test_beta_stays_at_the_edge_of_its_band(kl: float, beta: float) -> None:
    # target 0.5: 1.5 * 0.5 = 0.75 exactly
    assert control.double_or_halve(1.0, kl, target=0.5) == beta
    assert control.double_or_halve(1.0, 0.5, target=0.75) == 1.0  # 0.75 / 1.5 = 0.5 exactly


def test_the_steered_columns() -> None:
    adaptive, penalty = control.adaptive_kl(0.2, target=0.1, reads="ref_kl"), control.penalty_kl(0.2, target=0.1)
    assert (adaptive.column, adaptive.start, adaptive.reads) == ("kl_coef", 0.2, "ref_kl")
    assert (penalty.column, penalty.start, penalty.reads) == ("kl_coef", 0.2, "update_kl")
    assert adaptive.update(2.0, 9.0) == pytest.approx(2.04)
    assert penalty.update(3.0, 9.0) == 6.0
    assert penalty.update(3.0, 0.0) == 1.5


# --- settings ---


@each(
    ("allowed", "words"),
    [
        (POSITIVE, "above 0"),
        (NOT_NEGATIVE, "at least 0"),
        (SHARE, "at least 0 and at most 1"),
        (Range(0, 1, below=True), "at least 0 and below 1"),
        (Range(high=3), "at most 3"),
        (Range(), "a finite number"),
    ],
)
def test_a_range_in_words(allowed: Range, words: str) -> None:
    assert str(allowed) == words


def test_a_range_holds_its_ends_unless_they_are_left_out() -> None:
    assert 0 in SHARE
    assert 1 in SHARE
    assert -0.1 not in SHARE
    assert 1.1 not in SHARE
    assert 0 not in POSITIVE
    assert 1e-9 in POSITIVE
    assert 1e9 in POSITIVE
    assert 1 not in Range(0, 1, below=True)
    assert 0.9 in Range(0, 1, below=True)
    assert 2 not in Range(0, 1, below=True)
    assert -5 in Range()


def test_the_ranges_by_name() -> None:
    above = {"clip", "low", "high", "value_clip", "max_ratio", "delta", "kl_target"}
    not_below = {
        "damping",
        "beta",
        "value",
        "entropy",
        "max_tokens",
        "limit",
        "margin",
        "keep",
        "centre",
        "good",
        "bad",
    }
    expected = dict.fromkeys(above, POSITIVE) | dict.fromkeys({*not_below, "odds", "top_k"}, NOT_NEGATIVE)
    expected |= {"gamma": SHARE, "lam": SHARE, "decay": Range(0, 1, below=True)}
    expected |= {"smoothing": Range(0, 0.5, below=True)}
    expected |= {"dual": Range(1, above=True), "cg_steps": Range(1), "backtracks": Range(1), "threshold": Range()}
    assert expected == RANGES


@each(
    ("make", "message"),
    [
        (lambda: algo.trpo(cg_steps=0), "trpo: cg_steps is 0: it must be a whole number, at least 1"),
        (lambda: algo.trpo(cg_steps=2.5), "trpo: cg_steps is 2.5: it must be a whole number, at least 1"),
        (lambda: algo.ppo(clip=0.0), "ppo: clip is 0.0: it must be above 0"),
        (lambda: algo.simpo(gamma=-1.0), "simpo: gamma is -1.0: it must be at least 0"),
        (lambda: algo.ppo(value_clip=-1.0), "ppo: value_clip is -1.0: it must be above 0"),
        *((m, f"{m.__name__}: beta is 0.0: it must be above 0") for m in (algo.dpo, algo.ipo, algo.kto, algo.simpo)),
        *((m, f"{m.__name__}: beta is 0.0: it must be above 0") for m in (algo.online_dpo, algo.ppo_penalty, algo.klq)),
        (
            lambda: algo.ppo(kl="side:k1"),
            "kl='side:k1' is not a KL setting: write reward: or loss:, then k1, k2, k3 or exact",
        ),
        (lambda: algo.ppo(clip=None), "ppo: clip is None: it must be above 0"),
        (
            lambda: algo.dapo(limit=1, margin=2),
            "margin=2 is more than limit=1: it is the last part of the limit, lower it",
        ),
    ],
)
def test_a_refusal_in_full(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(HoneError) as raised:
        make(**({"beta": 0.0} if "beta is" in message else {}))
    assert str(raised.value) == message


def test_a_setting_may_be_at_its_bound() -> None:
    assert algo.trpo(cg_steps=1, backtracks=1).trust_region == table.TrustRegion(cg_steps=1, backtracks=1)
    assert algo.ppo(value_clip=None, dual=None).online
    assert algo.simpo(gamma=1.5).unit == 2  # its gamma is a margin, and no discount
    assert algo.ppo(gamma=0, lam=1).online  # whole numbers are numbers
    assert algo.expert_iteration(threshold=-2.0).online
    assert algo.dapo(limit=2, margin=2).refill
    assert algo.dapo(limit=0, margin=2).refill  # the rollout's own limit


# --- the sum ---


def test_the_objective_reads_rows_and_tokens_by_their_own_weights() -> None:
    token, by_row = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).double(), torch.tensor([16.0, 32.0]).double()
    batch = replace(
        grouped([0.0, 0.0], length=2),
        token_weight=torch.tensor([[1.0, 0.5], [0.25, 0.0]]).double(),
        row_weight=torch.tensor([0.5, 0.0]).double(),
    )
    fwd = Forward(logp=token)
    # 2 * (1 + 1 + 1) + 3 * 8; the row that weighs nothing may hold anything
    bad = torch.tensor([16.0, math.nan]).double()
    loss = ((2.0, lambda f, b: token), (3.0, lambda f, b: bad))
    assert table.objective(fwd, batch, loss).item() == 30.0
    assert table.objective(fwd, batch, ((1.0, lambda f, b: by_row),)).item() == 8.0
    assert table.objective(Forward(value=token), batch, ()).item() == 0.0


def test_the_objective_has_the_precision_of_the_forward_pass() -> None:
    batch = weight.weigh(row_of([1]), weight.token_mean, weight.Totals(rows=1, tokens=1))
    assert table.objective(Forward(logp=torch.zeros(1, 1)), batch, ((1.0, terms.nll),)).dtype == torch.float32


def test_an_empty_micro_batch_adds_a_zero_that_takes_a_gradient() -> None:
    none = ragged().rows(slice(0, 0))
    logp = torch.zeros(none.mask.shape, dtype=torch.float64).requires_grad_()
    none = replace(none, adv=none.old_logp, token_weight=none.old_logp, row_weight=none.reward)
    loss = table.objective(Forward(logp=logp), replace(none), ((1.0, lambda f, b: f.logp[:, :1].expand_as(b.adv)),))
    assert loss.item() == 0.0
    loss.backward()


def test_credit_without_a_critic_has_no_returns_and_whitens_only_where_told() -> None:
    batch = grouped([0.0, 3.0])
    plain = table.Algorithm(loss=(), credit=credit.group_centred)
    found = assign_credit(batch, plain)
    assert (found.adv[:, 0].tolist(), found.returns) == ([-1.5, 1.5], None)
    other = torch.tensor([1.5, 2.0]).double()  # another rank's sum and count, then its sum of squares
    ranks = iter([other, torch.tensor([4.5]).double()])
    white = assign_credit(batch, replace(plain, whiten=True), reduce=lambda x: x + next(ranks))
    # -1.5 and 1.5 here and 1.5 there: mean (0 + 1.5) / 4 = 0.375; variance (1.875^2 + 1.125^2 + 4.5) / 4
    std = ((1.875**2 + 1.125**2 + 4.5) / 4) ** 0.5
    assert white.adv[:, 0].tolist() == pytest.approx([-1.875 / std, 1.125 / std])
    assert assign_credit(batch, replace(plain, credit=None)) is batch
