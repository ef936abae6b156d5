"""Advantages by hand: the working stands beside each number."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from algo_cases import grouped, ragged, row_of
from each import each

from hone.algo import credit, grpo, ppo, reinforce_pp, reinforce_pp_baseline
from hone.algo.table import assign_credit
from hone.types import ABSENT, Batch

torch.set_num_threads(1)


def column(adv: torch.Tensor) -> list[float]:
    return adv[:, 0].tolist()


# --- one advantage a row ---


def test_zscores_of_the_specification() -> None:
    # mean .55; squared deviations sum to 0.42, / 8 = 0.0525, root .22913
    adv = credit.group_zscore(grouped([0.9, 0.8, 0.7, 0.6, 0.3, 0.2, 0.5, 0.4]), eps=0.0)
    expected = [1.5275, 1.0911, 0.6547, 0.2182, -1.0911, -1.5275, -0.2182, -0.6547]
    assert column(adv) == pytest.approx(expected, abs=5e-5)
    # mean .4; squared deviations .04 + .16 + .01 + .09 = .3, / 4 = .075, root .27386
    adv = credit.group_zscore(grouped([0.2, 0.8, 0.5, 0.1]), eps=0.0)
    assert column(adv) == pytest.approx([-0.7303, 1.4606, 0.3651, -1.0954], abs=5e-5)


def test_the_zscores_eps_is_added_to_the_std() -> None:
    # rewards 0 and 1: deviations -+ 0.5, std 0.5; 0.5 / (0.5 + 0.5) = 0.5
    assert column(credit.group_zscore(grouped([0.0, 1.0]), eps=0.5)) == [-0.5, 0.5]


def test_leave_one_out() -> None:
    # 1 - mean(0, 0, 1) = 2/3; 0 - mean(1, 0, 1) = -2/3
    assert column(credit.leave_one_out(grouped([1.0, 0.0, 0.0, 1.0]))) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    # 3 - mean(1) = 2, 1 - mean(3) = -2
    assert column(credit.leave_one_out(grouped([3.0, 1.0]))) == [2.0, -2.0]


def test_group_centred() -> None:
    # two groups interleaved: {1, 5} has mean 3, {2, 4, 9} has mean 5
    batch = grouped([1.0, 2.0, 5.0, 4.0, 9.0], group=[7, 3, 7, 3, 3])
    assert column(credit.group_centred(batch)) == [-2.0, -3.0, 2.0, -1.0, 4.0]


def test_an_invalid_reward_is_left_out_of_the_statistics() -> None:
    # the valid ones are 1, 3: mean 2, std 1, leave-one-out -+2
    batch = grouped([1.0, None, 3.0])
    assert column(credit.group_centred(batch)) == [-1.0, 0.0, 1.0]
    assert column(credit.group_zscore(batch, eps=0.0)) == [-1.0, 0.0, 1.0]
    assert column(credit.leave_one_out(batch)) == [-2.0, 0.0, 2.0]


@each("how", [credit.group_centred, credit.group_zscore, credit.leave_one_out])
@each("rewards", [[5.0], [None], [5.0, None, None], [None, None], [0.1] * 7, [-3e7] * 3])
def test_a_group_without_signal_has_advantage_zero(
    how: Callable[[Batch], torch.Tensor], rewards: list[float | None]
) -> None:
    batch = grouped(rewards)
    assert column(how(replace(batch, reward=batch.reward.float()))) == [0.0] * len(rewards)


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
def test_equal_rewards_are_no_signal_in_float32_either(value: float) -> None:
    # in float32 the mean of eleven 0.1 is not 0.1: a deviation of 1e-8, whitened, would come out near 1
    batch = grouped([value] * 11, group=[0] * 7 + [1] * 4, length=3)
    batch = replace(batch, reward=batch.reward.float())
    for algo in (grpo(), reinforce_pp_baseline(), reinforce_pp(beta=0.0)):
        lean = replace(batch, kl_coef=torch.zeros(11))
        assert not assign_credit(lean, algo).adv.any()


def test_kl_in_the_reward_comes_before_the_groups_statistics() -> None:
    # d = old - ref = .5, .5 in row 0 and 0, 1 in row 1 (third token not trained); coefficient 0.1
    # rewards 1 - 0.1 * 1 = 0.9 and 2 - 0.1 * 1 = 1.9: mean 1.4
    mask = torch.tensor([[True, True, False], [True, True, False]])
    batch = replace(
        grouped([1.0, 2.0], length=3),
        mask=mask,
        old_logp=torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]).double(),
        ref_logp=torch.tensor([[-1.5, -1.5, -9.0], [-1.0, -2.0, -9.0]]).double(),
        kl_coef=torch.tensor([0.1, 0.1]).double(),
    )
    assert credit.row_rewards(batch, kl="k1").tolist() == pytest.approx([0.9, 1.9])
    assert credit.group_centred(batch, kl="k1")[:, 1].tolist() == pytest.approx([-0.5, 0.5])
    # k2: row 0 .125 + .125 = .25, row 1 .5 -> 0.975 and 1.95, centred -+ 0.4875
    assert credit.group_centred(batch, kl="k2")[:, 0].tolist() == pytest.approx([-0.4875, 0.4875])
    # exact: the column itself, 1 + 2 and 3 + 4 -> 1 - .3 = .7 and 2 - .7 = 1.3
    exact = replace(batch, ref_kl=torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 50.0]]).double())
    assert credit.row_rewards(exact, kl="exact").tolist() == pytest.approx([0.7, 1.3])


# --- process rewards ---


def test_group_process_standardises_all_steps_of_the_group() -> None:
    # steps: row 0 has 1 (token 1) and 3 (token 3), row 1 has 2 (token 2); one more row without a step
    # mean 2, population std sqrt(2/3); z = -1.2247, 1.2247, 0
    # a token sums the steps that end at or after it: row 0: 0, 0, z3, z3; row 1: 0, 0, 0, -
    nan = torch.nan
    steps = torch.tensor([[nan, 1.0, nan, 3.0], [nan, nan, 2.0, nan], [nan, nan, nan, nan]]).double()
    mask = torch.tensor([[True] * 4, [True, True, True, False], [True] * 4])
    batch = replace(grouped([0.0, 0.0, 0.0], length=4), step_reward=steps, mask=mask)
    z = (3 / 2) ** 0.5
    adv = credit.group_process(batch, eps=0.0)
    assert adv[0].tolist() == pytest.approx([0.0, 0.0, z, z])
    assert adv[1].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0])
    assert adv[2].tolist() == [0.0] * 4


def test_group_process_sums_from_the_token_on() -> None:
    # steps 0, 0, 3 in row 0 and 1 in row 1: mean 1, variance (1 + 1 + 4 + 0) / 4 = 1.5; z = -.8165, -.8165, 1.633, 0
    steps = torch.tensor([[0.0, 0.0, 3.0], [torch.nan, torch.nan, 1.0]]).double()
    batch = replace(grouped([0.0, 0.0], length=3), step_reward=steps)
    a = 1 / 1.5**0.5
    assert credit.group_process(batch, eps=0.0)[0].tolist() == pytest.approx([0.0, a, 2 * a])
    assert credit.group_process(batch, eps=0.0)[1].tolist() == pytest.approx([0.0, 0.0, 0.0])


def test_group_process_keeps_groups_apart_and_leaves_invalid_rows_out() -> None:
    # group 0 holds steps 1 and 3 (z = -+1); group 1 holds one step only; the invalid row's step does not count
    batch = grouped([0.0, 0.0, None, 0.0], group=[0, 0, 0, 1])
    batch = replace(batch, step_reward=torch.tensor([[1.0], [3.0], [100.0], [50.0]]).double())
    assert credit.group_process(batch, eps=0.0)[:, 0].tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_group_progress_is_what_each_step_adds() -> None:
    # scores .2 (token 1), .5 (token 3), then a stop token; .6 (token 2, the one before is not trained); .1 (token 0)
    # first steps less the mean of the others': .2 - .35, .6 - .15, .1 - .4; then .5 - .2 = .3
    # lam .5: -.15 + .5 * .3 = 0 in the first step, .3 in the second and at the stop token
    nan, full = torch.nan, torch.float64
    rows = [[nan, 0.2, nan, 0.5, nan], [nan, 9.0, 0.6, nan, nan], [0.1, nan, nan, nan, nan]]
    mask = torch.tensor([[True] * 5, [True, False, True, False, False], [True] * 5])
    batch = replace(grouped([0.0, 0.0, 0.0], length=5), step_reward=torch.tensor(rows, dtype=full), mask=mask)
    adv = credit.group_progress(batch, lam=0.5)
    assert adv[0].tolist() == pytest.approx([0.0, 0.0, 0.3, 0.3, 0.3])
    assert adv[1].tolist() == pytest.approx([0.45, 0.0, 0.45, 0.0, 0.0])
    assert adv[2].tolist() == pytest.approx([-0.3] * 5)


def test_group_progress_looks_ahead_by_lam() -> None:
    # changes 1 (0 less -1), 2, 4 and in the other row -1: 1 + .5 (2 + .5 * 4) = 3, 2 + .5 * 4 = 4, 4
    steps = torch.tensor([[0.0, 2.0, 6.0], [-1.0, torch.nan, torch.nan]]).double()
    batch = replace(grouped([0.0, 0.0], length=3), step_reward=steps)
    assert credit.group_progress(batch, lam=0.5).tolist() == [[3.0, 4.0, 4.0], [-1.0] * 3]


def test_group_progress_leaves_out_rows_without_a_verdict_or_a_step_and_who_is_alone() -> None:
    # group 0: scores 1 and 3, one invalid, one without a step; group 1: one score; group 2: one and an invalid one
    batch = grouped([0.0, 0.0, None, 0.0, 0.0, 0.0, None], group=[0, 0, 0, 0, 1, 2, 2], length=2)
    steps = torch.tensor([[1.0, 2.0], [3.0, 3.0], [9.0, 8.0], [torch.nan] * 2, [5.0, 6.0], [7.0, 8.0], [4.0, 5.0]])
    batch = replace(batch, step_reward=steps.double(), mask=torch.ones(7, 2, dtype=torch.bool))
    found = credit.group_progress(batch, lam=0.0).tolist()
    assert found == [[-2.0, 1.0], [2.0, 0.0], *[[0.0, 0.0]] * 5]


@pytest.mark.parametrize("value", [0.1, 0.7])
def test_equal_scores_are_no_progress_in_float32_either(value: float) -> None:
    batch = replace(grouped([0.0] * 7, length=3), step_reward=torch.full((7, 3), value))
    assert not credit.group_progress(batch).any()


# --- returns and GAE ---


def test_reward_to_go_is_the_discounted_sum_from_t_on() -> None:
    # step rewards 1, 2 and the outcome 4 on the last token: 1 + .5*2 + .25*4 = 3, 2 + .5*4 = 4, 4
    batch = row_of([1, 1, 1], step_reward=[1.0, 2.0, torch.nan], reward=4.0)
    assert credit.reward_to_go(batch, gamma=0.5).tolist() == [[3.0, 4.0, 4.0]]


def test_gamma_counts_acted_tokens_only() -> None:
    # an observed token between the first and the second: one discount, not two
    batch = row_of([1, 0, 1, 0], reward=8.0)
    assert credit.reward_to_go(batch, gamma=0.5).tolist() == [[4.0, 0.0, 8.0, 0.0]]


def test_a_step_reward_on_an_observed_token_is_not_earned() -> None:
    batch = row_of([1, 0, 1], step_reward=[1.0, 100.0, torch.nan], reward=2.0)
    assert credit.reward_to_go(batch).tolist() == [[3.0, 0.0, 2.0]]


def test_the_running_baseline_comes_off_every_trained_token() -> None:
    batch = row_of([1, 0, 1], reward=2.0, baseline=0.5)
    assert credit.reward_to_go(batch).tolist() == [[1.5, 0.0, 1.5]]


def test_returns_do_not_depend_on_a_critic() -> None:
    batch = row_of([1, 1], reward=2.0, old_value=[5.0, 6.0], bootstrap=7.0)
    assert credit.reward_to_go(batch).tolist() == [[2.0, 2.0]]


def test_kl_in_the_reward_is_charged_where_it_occurs() -> None:
    # rewards -0.1*1, -0.1*2, 5 - 0.1*3: to go 4.4, 4.5, 4.7
    batch = row_of([1, 1, 1], reward=5.0, old_logp=[0.0] * 3, ref_logp=[-1.0, -2.0, -3.0], kl_coef=0.1)
    assert credit.reward_to_go(batch, kl="k1")[0].tolist() == pytest.approx([4.4, 4.5, 4.7])


def test_gae_by_hand_skips_the_turn_between() -> None:
    # deltas: .5 - .5 = 0, 0, then 1 - .5 = .5; lam .5: .5 * .5 * .5 = .125, .25, -, .5
    batch = row_of([1, 1, 0, 1], reward=1.0, old_value=[0.5, 0.5, 9.0, 0.5])
    assert credit.gae(batch, gamma=1.0, lam=0.5).tolist() == [[0.125, 0.25, 0.0, 0.5]]


def deltas(batch: Batch, gamma: float) -> torch.Tensor:
    """TD errors one row and one token at a time, with the next *acted* token's value."""
    out = torch.zeros_like(batch.old_value)
    for b in range(len(batch)):
        acted = batch.mask[b].nonzero().flatten().tolist()
        for i, t in enumerate(acted):
            final = i == len(acted) - 1
            after = batch.bootstrap[b] if final else batch.old_value[b, acted[i + 1]]
            reward = batch.reward[b] if final else 0.0
            out[b, t] = reward + gamma * after - batch.old_value[b, t]
    return out


def test_gae_with_lam_zero_is_the_td_error() -> None:
    batch = replace(ragged(), step_reward=ABSENT)
    torch.testing.assert_close(credit.gae(batch, gamma=0.9, lam=0.0), deltas(batch, 0.9))


@pytest.mark.parametrize("bootstrapped", [True, False])
def test_gae_with_lam_one_is_the_return_less_the_value(bootstrapped: bool) -> None:
    gamma = 0.9
    batch = ragged()
    batch = batch if bootstrapped else replace(batch, bootstrap=ABSENT)
    expected = torch.where(batch.mask, credit.reward_to_go(replace(batch, baseline=ABSENT), gamma=gamma), 0.0)
    expected = expected - torch.where(batch.mask, batch.old_value, 0.0)
    if bootstrapped:
        # gamma^(T - t + 1) V(s_{T+1}), T - t + 1 = acted tokens from t on
        left = batch.mask.flip(-1).cumsum(-1).flip(-1)
        expected += torch.where(batch.mask, gamma**left * batch.bootstrap[:, None], 0.0)
    torch.testing.assert_close(credit.gae(batch, gamma=gamma, lam=1.0), expected)


def test_gae_is_the_discounted_sum_of_td_errors() -> None:
    batch = replace(ragged(), step_reward=ABSENT)
    gamma, lam = 0.95, 0.7
    delta = deltas(batch, gamma)
    expected = torch.zeros_like(delta)
    for b in range(len(batch)):
        acted = batch.mask[b].nonzero().flatten().tolist()
        for i, t in enumerate(acted):
            expected[b, t] = sum((gamma * lam) ** k * delta[b, s] for k, s in enumerate(acted[i:]))
    torch.testing.assert_close(credit.gae(batch, gamma=gamma, lam=lam), expected)


def test_bootstrap_replaces_the_zero_after_the_last_token() -> None:
    # 1 + 0.5 * 4 - 2 = 1 on the last token; before it 0 + 0.5 * 2 - 3 = -2, and 0.5 * 1 of the next: -1.5
    batch = row_of([1, 1, 0], reward=1.0, old_value=[3.0, 2.0, 8.0], bootstrap=4.0)
    assert credit.gae(batch, gamma=0.5, lam=1.0).tolist() == [[-1.5, 1.0, 0.0]]


def test_the_critics_target_is_the_advantage_before_whitening_plus_the_old_value() -> None:
    batch = replace(ragged(), step_reward=ABSENT, baseline=ABSENT)
    found = assign_credit(batch, ppo(lam=0.5))
    raw = credit.gae(batch, gamma=1.0, lam=0.5)
    torch.testing.assert_close(found.returns[batch.mask], (raw + batch.old_value)[batch.mask])
    torch.testing.assert_close(found.adv, credit.whiten(raw, batch.mask))


# --- whitening ---


def test_whitening_uses_the_population_std_of_trained_tokens() -> None:
    # 1, 3 and 5 are trained: mean 3, std sqrt(8/3)
    adv, mask = torch.tensor([[1.0, 3.0, 99.0, 5.0]]).double(), torch.tensor([[True, True, False, True]])
    s = (8 / 3) ** 0.5
    assert credit.whiten(adv, mask)[0].tolist() == pytest.approx([-2 / s, 0.0, 0.0, 2 / s])


def test_whitening_over_ranks_is_whitening_of_the_whole() -> None:
    batch = ragged()
    adv, mask = torch.where(batch.mask, batch.old_value, 0.0), batch.mask
    whole = credit.whiten(adv, mask)
    halves = [slice(0, 3), slice(3, 8)]
    # what the other rank would add at each of the two reductions
    mean = adv[mask].mean()
    parts = []
    for mine, other in (halves, halves[::-1]):
        o, m = adv[other], mask[other]
        sums = iter([torch.stack([o[m].sum(), m.sum().double()]), (o[m] - mean).square().sum()[None]])
        parts.append(credit.whiten(adv[mine], mask[mine], reduce=lambda x, sums=sums: x + next(sums)))
    torch.testing.assert_close(torch.cat(parts), whole)


def test_whitening_keeps_its_digits_beside_a_large_mean() -> None:
    adv = torch.tensor([[1e6, 1e6 + 1, 1e6 + 2]])
    out = credit.whiten(adv, torch.ones(1, 3, dtype=torch.bool))
    assert out[0].tolist() == pytest.approx([-1.2247449, 0.0, 1.2247449])


@pytest.mark.parametrize("mask", [[[False, False]], [[True, False]]])
def test_whitening_nothing_or_one_token_gives_zero(mask: list[list[bool]]) -> None:
    assert not credit.whiten(torch.tensor([[5.0, 5.0]]), torch.tensor(mask)).any()


def test_a_credit_reads_old_log_probs_for_a_kl_in_the_reward_or_where_nobody_knows_it() -> None:
    assert not credit.reads_log_probs(None)
    assert not credit.reads_log_probs(credit.group_zscore)
    assert not credit.reads_log_probs(partial(credit.group_zscore, kl=""))
    assert credit.reads_log_probs(partial(credit.group_zscore, kl="k1"))
    assert credit.reads_log_probs(lambda batch: batch.reward)
    assert credit.reads_log_probs(partial(lambda batch, scale: scale * batch.reward, scale=2.0))


def test_which_credits_give_each_token_a_return_of_its_own() -> None:
    assert credit.may_be_per_token(credit.gae)
    assert credit.may_be_per_token(partial(credit.reward_to_go, gamma=0.9))
    assert not credit.may_be_per_token(credit.group_zscore)
    assert not credit.may_be_per_token(partial(credit.leave_one_out, kl="k1"))
    assert not credit.may_be_per_token(None)
    assert credit.may_be_per_token(lambda batch: batch.reward)
    assert credit.may_be_per_token(partial(lambda batch, scale: scale * batch.reward, scale=2.0))
