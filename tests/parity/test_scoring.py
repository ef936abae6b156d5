"""TRL's own path from tokens and rewards to old log-probs and advantages, against Hone's credit."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e .[dev]")

from hone.algo import credit
from tests.parity import house, peer, rows, scoring

FLOAT32 = {"rtol": 2e-6, "atol": 2e-6}  # TRL's rewards are float32


def per_row(adv, mask):
    return (adv * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def test_masks_and_log_probs_of_the_same_tokens_are_equal():
    batch = rows.grouped()
    table = scoring.score(peer.grpo(), rows.REWARDS, beta=0.1, num_iterations=2)
    mask = table["completion_mask"]
    assert mask.sum(-1).tolist() == batch.mask.sum(-1).tolist() == list(rows.LENGTHS)
    for name, seed in (("old_per_token_logps", 0), ("ref_per_token_logps", 1)):
        expected = peer.aligned(house.logp(batch, seed=seed), batch, mask)
        torch.testing.assert_close((table[name] * mask).double(), expected, **FLOAT32)


def test_the_tables_handed_to_the_losses_are_the_ones_trl_makes():
    made = peer.completions(rows.draw(share=rows.GROUP), rows.grouped())
    theirs = scoring.score(peer.grpo(), rows.REWARDS)
    for name, x in made.items():
        assert torch.equal(theirs[name], x), name


def test_dr_grpo_centres_as_scale_rewards_none_does():
    batch = rows.grouped()
    theirs = scoring.score(peer.grpo(), rows.REWARDS, scale_rewards="none")["advantages"]
    torch.testing.assert_close(theirs.double(), per_row(credit.group_centred(batch), batch.mask), **FLOAT32)


def test_rloo_leaves_one_out():
    batch = rows.grouped()
    theirs = scoring.score(peer.rloo(), rows.REWARDS)["advantages"]
    torch.testing.assert_close(theirs.double(), per_row(credit.leave_one_out(batch), batch.mask), **FLOAT32)


def test_rloo_takes_the_summed_k1_off_the_reward():
    batch = rows.grouped()
    beta = torch.full((8,), 0.05, dtype=rows.FULL)
    batch = replace(batch, old_logp=house.logp(batch), ref_logp=house.logp(batch, seed=1), kl_coef=beta)
    theirs = scoring.score(peer.rloo(), rows.REWARDS, beta=0.05)["advantages"]
    expected = per_row(credit.leave_one_out(batch, kl="k1"), batch.mask)
    torch.testing.assert_close(theirs.double(), expected, **FLOAT32)
    assert (expected - per_row(credit.leave_one_out(batch), batch.mask)).abs().max() > 0.1


@pytest.mark.parametrize("make", [peer.grpo, peer.rloo])
def test_groups_with_equal_rewards_have_no_advantage(make):
    rewards = (0.7,) * 4 + (0.0,) * 4
    batch = rows.grouped(rewards)
    assert scoring.score(make(), rewards)["advantages"].tolist() == [0.0] * 8
    assert not credit.group_zscore(batch).any()
    assert not credit.leave_one_out(batch).any()


def test_invalid_rewards_leave_the_group_s_statistics():
    rewards = (None, 0.2, 0.5, 0.1, None, None, None, 1.0)  # the second group has one valid reward: no signal
    batch = rows.grouped(rewards)
    theirs = scoring.score(peer.grpo(), rewards, scale_rewards="none")["advantages"]
    torch.testing.assert_close(theirs.double(), per_row(credit.group_centred(batch), batch.mask), **FLOAT32)
    theirs = scoring.score(peer.rloo(), rewards)["advantages"]
    torch.testing.assert_close(theirs.double(), per_row(credit.leave_one_out(batch), batch.mask), **FLOAT32)


def test_masked_truncated_completions_are_the_rows_that_hone_calls_truncated():
    theirs = scoring.score(peer.grpo(), rows.REWARDS, mask_truncated_completions=True)
    assert (theirs["completion_mask"].sum(-1) == 0).tolist() == rows.grouped().truncated.tolist()
