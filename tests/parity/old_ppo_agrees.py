"""Hone's PPO against the trainer that TRL had up to 1.12.0, through one real update of it.

test_old_ppo.py runs it beside that version, which `make old-trl` puts into a folder of its own.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from hone.algo import Algorithm, credit, ppo, terms
from hone.model.policy import OwnCritic, Policy
from hone.types import Batch
from tests.parity import house, llama, old_ppo, rows
from tests.parity.house import Result

CLOSE = {"rtol": 0.0, "atol": 3e-6}  # norms and rewards are float32 in there


def slots(mask: Tensor) -> Tensor:
    """Where TRL's columns hold the mask's tokens, [8, LIMIT]."""
    return torch.arange(rows.LIMIT) < mask.sum(-1, keepdim=True)


def with_the_state_after_the_stop(batch: Batch) -> Tensor:
    """TRL's mask for values: one more position in rows that ended, where it puts the reward."""
    last = batch.real & (batch.real.flip(-1).cumsum(-1).flip(-1) == 1)
    return batch.mask | (last & ~batch.truncated[:, None])


def actor_critic() -> Policy:
    weights = llama.reward_model(old_ppo.CRITIC)
    scorer = house.scorer(weights.state_dict(), weights.config.to_dict())
    critic = OwnCritic(scorer.decoder)
    critic.head = scorer.head
    return Policy(house.policy().decoder, critic=critic)


@cache
def given() -> Batch:
    """The trainer's batch as Hone sees it: old log-probs and values from Hone's own models and the same noise."""
    batch, policy = rows.grouped(), actor_critic()
    with torch.no_grad():
        old = (policy.log_rows(batch)(slice(None)) + old_ppo.logit_noise()[slots(batch.mask)]).log_softmax(-1)
        value = policy(batch, frozenset({"value"})).value
    wide = with_the_state_after_the_stop(batch)
    chosen = old.gather(1, batch.targets[batch.mask][:, None]).squeeze(1)
    return replace(
        batch,
        old_logp=torch.zeros_like(value).masked_scatter(batch.mask, chosen),
        ref_logp=house.logp(batch, seed=1),
        kl_coef=torch.full((8,), old_ppo.KL_COEF, dtype=rows.FULL),
        old_value=value + torch.zeros_like(value).masked_scatter(wide, old_ppo.value_noise()[slots(wide)]),
    )


def theirs(x: Tensor, mask: Tensor) -> Tensor:
    """TRL's columns in Hone's places."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x[slots(mask)])


def gae(batch: Batch, *, gamma: float, lam: float) -> Tensor:
    return credit.gae(batch, gamma=gamma, lam=lam, kl="k1").where(rows.grouped().mask, 0.0)


def test_with_gamma_and_lam_one_the_advantages_are_equal():
    batch = given()
    found = theirs(old_ppo.run(1.0, 1.0).raw, batch.mask)
    torch.testing.assert_close(found, gae(batch, gamma=1.0, lam=1.0), **CLOSE)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_else_trl_s_episode_has_one_more_state_after_the_stop_token(gamma, lam):
    batch = given()
    found = theirs(old_ppo.run(gamma, lam).raw, batch.mask)
    longer = replace(batch, mask=with_the_state_after_the_stop(batch))
    torch.testing.assert_close(found, gae(longer, gamma=gamma, lam=lam), **CLOSE)
    ended = ~batch.truncated
    torch.testing.assert_close(found[~ended], gae(batch, gamma=gamma, lam=lam)[~ended], **CLOSE)
    assert (found - gae(batch, gamma=gamma, lam=lam))[ended].abs().max() > 0.01


def test_trl_whitens_with_the_sample_variance():
    seen = old_ppo.run(1.0, 0.95)
    n = int(seen.mask.sum())
    ours = credit.whiten(seen.raw, seen.mask)
    torch.testing.assert_close(seen.white.where(seen.mask, 0.0), ours * ((n - 1) / n) ** 0.5, rtol=0, atol=1e-7)
    assert n == 29


def test_loss_and_gradient_of_actor_and_critic():
    seen, batch = old_ppo.run(1.0, 0.95), given()
    wide = with_the_state_after_the_stop(batch)
    policy_term, value_term = ppo(clip=old_ppo.CLIP, value_clip=old_ppo.CLIP).loss[:2]
    actor = Algorithm(loss=(policy_term,), wants=frozenset({"logp"}))
    critic = Algorithm(loss=((old_ppo.VF_COEF, value_term[1]),), wants=frozenset({"value"}))
    returns = theirs(seen.raw, wide) + batch.old_value
    credited = replace(batch, adv=theirs(seen.white, batch.mask), returns=returns)
    model = actor_critic()
    ours = house.step(model, credited, actor, prefix="").plus(
        house.step(model, replace(credited, mask=wide), critic, prefix="")
    )
    names = {"critic.decoder.": "value_model.", "critic.head.": "value_model.score.", "decoder.": "policy."}
    grads = {}
    for name, g in ours.grads.items():
        old, new = next((o, n) for o, n in names.items() if name.startswith(o))
        grads[new + name.removeprefix(old)] = g
    grads.pop("value_model.score.bias", None)
    assert max(house.distance(Result(loss=ours.loss, grads=grads), Result(loss=seen.loss, grads=seen.grads))) <= 2e-5
    assert terms.value_error in (value_term[1], getattr(value_term[1], "func", None))
