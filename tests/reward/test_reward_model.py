"""A reward model scores the sampled tokens at their last real position, whatever the batch."""

import math

import pytest
import torch

from hone.errors import HoneError
from hone.reward.learned.reward_model import RewardModel
from hone.reward.score import Reward, combine
from hone.types import Batch, Forward, Outcome, Rollout

torch.set_num_threads(1)


def running_sum(batch: Batch, want: frozenset[str]) -> Forward:
    """A head whose value is the sum of the tokens so far; padding would show as a large number."""
    assert want == {"value"}
    assert not torch.is_grad_enabled()
    return Forward(value=batch.inputs.cumsum(-1).float())


def rollout(*tokens: int, **extra) -> Rollout:
    return Rollout(tokens=tokens, mask=[False] * (len(tokens) - 1) + [True], text="x", **extra)


ROWS = [rollout(1, 2, 3), rollout(4), rollout(5, 6), rollout(1, 1, 1, 1, 1)]
SUMS = [6.0, 4.0, 11.0, 5.0]


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
def test_the_score_is_the_value_after_the_last_real_token_in_the_given_order(rows, monkeypatch):
    monkeypatch.setattr("hone.reward.learned.reward_model.ROWS", rows)
    assert RewardModel(score=running_sum, pad_id=1000)(ROWS) == SUMS
    assert RewardModel(score=running_sum, pad_id=1000)([]) == []


def test_calibration_is_by_the_mean_and_the_standard_deviation_of_the_population():
    found = RewardModel(score=running_sum, pad_id=0).mean_and_std(ROWS)
    assert found == (6.5, pytest.approx(math.sqrt((0.25 + 6.25 + 20.25 + 2.25) / 4)))


def test_calibration_needs_scores_that_differ():
    model = RewardModel(score=running_sum, pad_id=0)
    for rows in ([], ROWS[:1], [ROWS[0]] * 5):
        with pytest.raises(HoneError, match="cannot calibrate"):
            model.mean_and_std(rows)
    broken = RewardModel(score=lambda batch, want: Forward(value=batch.inputs * math.nan), pad_id=0)
    with pytest.raises(HoneError, match="cannot calibrate"):
        broken.mean_and_std(ROWS)


def test_it_is_a_reward_like_any_other():
    model = RewardModel(score=running_sum, pad_id=0)
    assert Reward(model)(ROWS) == [Outcome(value=s) for s in SUMS]
    both = combine({"rm": (model, 0.5), "one": (lambda completion: 1, 1.0)})
    assert [o.value for o in both(ROWS)] == [4.0, 3.0, 6.5, 3.5]


def test_a_nan_score_is_invalid_not_zero():
    def broken(batch: Batch, want: frozenset[str]) -> Forward:
        return Forward(value=torch.where(batch.inputs == 3, math.nan, 1.0))

    outcomes = Reward(RewardModel(score=broken, pad_id=0))(ROWS)
    assert [o.value for o in outcomes] == [None, 1.0, 1.0, 1.0]


def test_rows_already_scored_or_half_scored_are_scored_again():
    rows = [rollout(1, 2, outcome=Outcome(value=9.0)), rollout(3)]
    assert RewardModel(score=running_sum, pad_id=0)(rows) == [3.0, 3.0]
