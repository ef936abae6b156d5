"""Credit by group, averages over rows and whitening: what is unbiased, and by how much the rest is not."""

import math
from dataclasses import replace

import pytest
import torch
from each import each
from torch import Tensor
from world import RAGGED, SQUARE, World, close, cosine, error, expected_gradient, wave

from hone.algo import (
    Algorithm,
    cispo,
    credit,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    terms,
)
from hone.algo.weight import Weigh, row_mean, row_sum, token_mean
from hone.types import ABSENT, Batch

torch.set_num_threads(1)
POLICY, SQUARE_POLICY = RAGGED.policy(1.0), SQUARE.policy(1.0)
TRUE = RAGGED.loss_gradient(POLICY)
PLAIN = (1.0, terms.policy_gradient)


# --- unbiased ---


@pytest.mark.parametrize("size", [2, 3])
def test_leaving_one_out_is_unbiased(size: int) -> None:
    close(expected_gradient(rloo(), RAGGED, POLICY, size=size), TRUE)


@pytest.mark.parametrize("size", [2, 3])
def test_dr_grpo_is_short_by_its_own_share_of_the_mean_and_by_the_length(size: int) -> None:
    # the mean holds the row itself, which loses (G - 1) / G; the sum over tokens is divided by the limit, 3
    close(expected_gradient(dr_grpo(), RAGGED, POLICY, size=size), TRUE * (size - 1) / size / 3)


# --- the z-score ---


def right_or_wrong(threshold: float) -> World:
    """The ragged world with a reward of 1 above the threshold and 0 below it, and no steps."""
    reward = (RAGGED.batch.reward > threshold).double()
    return replace(RAGGED, batch=replace(RAGGED.batch, reward=reward, step_reward=ABSENT))


def zscore_factor(p: float, size: int, eps: float = 1e-4) -> float:
    """E[var / (std + eps)] / (p (1-p)) of a group of right-or-wrong rewards."""
    total = 0.0
    for k in range(1, size):
        std = math.sqrt(k * (size - k)) / size
        total += math.comb(size, k) * p**k * (1 - p) ** (size - k) * std**2 / (std + eps)
    return total / (p * (1 - p))


@each("threshold", [-0.5, 0.4, 1.1])
@each("size", [2, 3, 4])
def test_right_or_wrong_the_zscore_rescales_the_gradient_by_the_expected_std_over_the_variance(
    size: int, threshold: float
) -> None:
    world = right_or_wrong(threshold)
    p = float((world.chance(POLICY).detach() * world.batch.reward).sum())
    assert 0.05 < p < 0.95
    algo = Algorithm(loss=(PLAIN,), credit=credit.group_zscore, weigh=row_sum)
    found = expected_gradient(algo, world, POLICY, size=size)
    close(found, zscore_factor(p, size) * world.loss_gradient(POLICY))


@pytest.mark.parametrize("size", [2, 3])
def test_grpo_averaged_by_limit_has_the_direction_of_the_policy_gradient_and_by_row_and_token_another(
    size: int,
) -> None:
    world = right_or_wrong(0.4)
    p, true = float((world.chance(POLICY).detach() * world.batch.reward).sum()), world.loss_gradient(POLICY)
    found = {
        average: expected_gradient(grpo(beta=0.0, average=average), world, POLICY, size=size)
        for average in ("limit", "row", "token")
    }
    close(found["limit"], zscore_factor(p, size) * true / 3)  # every row is divided by the limit, 3
    # a row's mean is off however many rows there are; a token mean nears the true direction
    assert cosine(found["row"], true) == pytest.approx(0.9237824115, abs=1e-9)
    assert cosine(found["token"], true) == pytest.approx({2: 0.9837648664, 3: 0.9924285247}[size], abs=1e-9)


def test_the_zscores_factor_is_the_same_for_every_prompt_in_groups_of_two_and_three_only() -> None:
    for p in (0.1, 0.5, 0.9):
        assert zscore_factor(p, 2, eps=0.0) == pytest.approx(1.0, abs=1e-12)
        assert zscore_factor(p, 3, eps=0.0) == pytest.approx(math.sqrt(2), abs=1e-12)
    # in larger ones prompts that are nearly always right or wrong weigh more, up to 1 / sqrt(p (1-p))
    assert [zscore_factor(p, 8, eps=0.0) for p in (0.5, 0.9)] == pytest.approx([1.855656, 2.327689], abs=1e-6)
    assert zscore_factor(0.9, 1000, eps=0.0) == pytest.approx(1 / 0.3, rel=2e-3)


@pytest.mark.parametrize(("size", "angle", "length"), [(2, 0.976091369, 0.341076799), (3, 0.981846708, 0.450183346)])
def test_with_many_reward_values_the_zscore_turns_the_gradient_too(size: int, angle: float, length: float) -> None:
    algo = Algorithm(loss=(PLAIN,), credit=credit.group_zscore, weigh=row_sum)
    found = expected_gradient(algo, RAGGED, POLICY, size=size)
    assert cosine(found, TRUE) == pytest.approx(angle, abs=1e-9)
    assert float(found.norm() / TRUE.norm()) == pytest.approx(length, abs=1e-9)


@each(("algo", "weigh"), [(grpo(beta=0.0), row_mean), (gspo(), row_mean), (dapo(), token_mean), (cispo(), token_mean)])
@each("size", [2, 3])
def test_at_ratio_one_each_of_grpos_kin_has_the_gradient_of_its_credit_and_average(
    algo: Algorithm, weigh: Weigh, size: int
) -> None:
    plain = Algorithm(loss=(PLAIN,), credit=credit.group_zscore, weigh=weigh)
    expected = expected_gradient(plain, RAGGED, POLICY, size=size)
    close(expected_gradient(algo, RAGGED, POLICY, size=size), expected)


# --- process rewards ---


def test_standardised_steps_pay_nothing_for_taking_more_of_them() -> None:
    # each step earns 1, so longer is better; but no step differs from the mean of the steps
    ones = torch.where(RAGGED.batch.mask, 1.0, torch.nan).double()
    world = replace(RAGGED, batch=replace(RAGGED.batch, step_reward=ones, reward=torch.zeros(15).double()))
    assert world.loss_gradient(POLICY).norm() > 0.1
    algo = replace(grpo(beta=0.0, process=True), weigh=row_sum)
    assert not expected_gradient(algo, world, POLICY, size=2).any()


@pytest.fixture(params=["every token", "some tokens"])
def judged(request: pytest.FixtureRequest) -> World:
    """The ragged world with outcomes alone; steps end at every token, or at some and the last."""
    world = replace(RAGGED, batch=replace(RAGGED.batch, step_reward=ABSENT))
    last = world.batch.mask & (world.age() == world.age().amax(-1, keepdim=True))
    some = last | (world.batch.mask & ((world.state % 2 == 0) | (request.param == "every token")))
    return replace(world, batch=replace(world.batch, real=some))  # nothing else here reads real


def scores(world: World, per_state: Tensor) -> Tensor:
    """At each step's end the value of the state it leads to, at the last one the outcome."""
    out = torch.full_like(world.rewards(), torch.nan)
    for n, row in enumerate(world.batch.mask.tolist()):
        acted = [t for t, on in enumerate(row) if on]
        for t, then in zip(acted, [*acted[1:], None], strict=True):
            if world.batch.real[n, t]:
                out[n, t] = world.batch.reward[n] if then is None else per_state[world.state[n, then]]
    return out


@pytest.mark.parametrize("size", [2, 3])
def test_progress_is_unbiased_with_true_values_or_with_lam_one(judged: World, size: int) -> None:
    true = judged.loss_gradient(POLICY)
    for lam, per_state in ((1.0, wave(RAGGED.states, shift=5.0)), (0.0, judged.value(POLICY))):
        algo = replace(grpo(beta=0.0, lam=lam), weigh=row_sum)
        found = expected_gradient(algo, judged, POLICY, size=size, step_reward=scores(judged, per_state))
        close(found, true)


def test_progress_by_wrong_values_is_biased_below_lam_one(judged: World) -> None:
    algo = replace(grpo(beta=0.0, lam=0.5), weigh=row_sum)
    wrong = scores(judged, wave(RAGGED.states, shift=5.0))
    assert error(expected_gradient(algo, judged, POLICY, size=2, step_reward=wrong), judged.loss_gradient(POLICY)) > 0.1


# --- averages ---


def test_a_rows_mean_is_the_sum_over_the_length_and_turns_the_gradient() -> None:
    lengths = RAGGED.batch.mask.sum(-1, keepdim=True)
    algo = replace(reinforce(), weigh=row_mean)
    found = expected_gradient(algo, RAGGED, POLICY)
    scaled = expected_gradient(reinforce(), RAGGED, POLICY, correct=lambda b: 1 / lengths.double())
    close(found, scaled)
    assert cosine(found, TRUE) == pytest.approx(0.9730933503, abs=1e-9)


def test_a_token_mean_divides_by_a_sum_of_the_sampled_lengths_whose_bias_falls_with_the_rows() -> None:
    # the limit is the true gradient over the mean length
    length = float((RAGGED.chance(POLICY).detach() * RAGGED.batch.mask.sum(-1)).sum())
    algo = replace(reinforce(), weigh=token_mean)
    errors = [error(expected_gradient(algo, RAGGED, POLICY, size=n), TRUE / length) for n in (1, 2, 3, 4)]
    assert errors == pytest.approx([0.7434746066, 0.2844846488, 0.1683965959, 0.1189369676], abs=1e-9)


@pytest.mark.parametrize("weigh", [row_mean, token_mean])
def test_where_all_rows_are_of_one_length_every_average_is_unbiased(weigh: Weigh) -> None:
    found = expected_gradient(replace(rloo(), weigh=weigh), SQUARE, SQUARE_POLICY, size=2)
    close(found, SQUARE.loss_gradient(SQUARE_POLICY) / 2)


# --- whitening ---


@pytest.mark.parametrize(("size", "angle"), [(1, 0.970246), (2, 0.992413), (3, 0.996584)])
def test_whitening_turns_ppos_gradient_the_less_the_more_rows_it_sees(size: int, angle: float) -> None:
    # two tokens a row: with one row their whitened advantages are +1 and -1, however far apart
    values = SQUARE.at(SQUARE.value(SQUARE_POLICY))
    found = expected_gradient(ppo(), SQUARE, SQUARE_POLICY, size=size, old_value=values)
    assert cosine(found, SQUARE.loss_gradient(SQUARE_POLICY)) == pytest.approx(angle, abs=1e-6)


@pytest.mark.parametrize(
    ("algo", "angle"), [(reinforce_pp(beta=0.0), 0.995346), (reinforce_pp_baseline(beta=0.0), 0.879341)]
)  # fmt: skip
def test_whitening_turns_the_gradient_of_reinforce_pp(algo: Algorithm, angle: float) -> None:
    found = expected_gradient(algo, SQUARE, SQUARE_POLICY, size=3)
    assert cosine(found, SQUARE.loss_gradient(SQUARE_POLICY)) == pytest.approx(angle, abs=1e-6)


def whitened_factor(p: float, rows: int) -> float:
    """E[whitened advantage of a row that is right] / (1-p): what whitening multiplies the gradient of p by."""
    total = 0.0
    for k in range(1, rows + 1):
        adv = torch.tensor([1.0] * k + [0.0] * (rows - k), dtype=torch.float64)[:, None]
        chance = math.comb(rows, k) * p**k * (1 - p) ** (rows - k)
        total += chance * k / rows * float(credit.whiten(adv, torch.ones_like(adv).bool())[0])
    return total / (p * (1 - p))


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_whitening_is_short_of_dividing_by_the_true_std_by_one_over_eight_p_q_n(p: float) -> None:
    q = 1 - p
    for rows in (2, 3, 8):
        assert whitened_factor(p, rows) == pytest.approx(zscore_factor(p, rows, eps=1e-8), abs=1e-9)
    short = [rows * (whitened_factor(p, rows) * math.sqrt(p * q) - 1) for rows in (100, 800)]
    assert short == pytest.approx([-1 / (8 * p * q)] * 2, rel=0.05)
    assert abs(short[1] + 1 / (8 * p * q)) < abs(short[0] + 1 / (8 * p * q))


def test_a_whole_batch_of_equal_rows_has_no_gradient_whitened_or_not() -> None:
    def nothing(batch: Batch) -> torch.Tensor:
        return torch.where(batch.mask, 3.0, 0.0).double()

    algo = replace(ppo(), credit=nothing, needs=frozenset())
    found = expected_gradient(algo, SQUARE, SQUARE_POLICY, size=2, old_value=torch.zeros(9, 5).double())
    assert not found.any()
    unwhitened = expected_gradient(replace(algo, whiten=False), SQUARE, SQUARE_POLICY, old_value=torch.zeros(9, 5))
    close(unwhitened, torch.zeros_like(unwhitened))
