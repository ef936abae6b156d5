"""Expectations by enumeration: a policy small enough to sum over everything it can say."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from algo_cases import one_token
from torch import Tensor

from hone.algo import Algorithm, a2c, assign_credit, dr_grpo, objective, reinforce, reinforce_baseline, rloo, terms
from hone.algo.weight import Totals, row_sum, weigh
from hone.types import Batch, Forward

torch.set_num_threads(1)
V, T = 3, 2
SEQUENCES = list(itertools.product(range(V), repeat=T))
REWARD = dict(zip(SEQUENCES, (0.3, -1.0, 2.0, 0.0, 0.7, -0.4, 1.5, 0.2, -2.0), strict=True))


def policy() -> tuple[Tensor, Tensor]:
    """Logits of the first token, [V], and of the second after each first, [V, V]."""
    g = torch.Generator().manual_seed(0)
    first, second = torch.randn(V, generator=g).double(), torch.randn(V, V, generator=g).double()
    return first.requires_grad_(), second.requires_grad_()


def log_probs(parameters: tuple[Tensor, Tensor], rows: list[tuple[int, ...]]) -> Tensor:
    """log pi of each token, [B, 2]"""
    first, second = parameters[0].log_softmax(-1), parameters[1].log_softmax(-1)
    index = torch.tensor(rows)
    return torch.stack([first[index[:, 0]], second[index[:, 0], index[:, 1]]], dim=-1)


def flat_grad(loss: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def batch_of(rows: list[tuple[int, ...]], logp: Tensor) -> Batch:
    ones = torch.ones(len(rows), T, dtype=torch.bool)
    return Batch(
        inputs=ones.long(), targets=ones.long(), mask=ones, real=ones, group=torch.zeros(len(rows)).long(),
        reward=torch.tensor([REWARD[r] for r in rows]).double(), valid=ones[:, 0], old_logp=logp.detach(),
        limit=torch.full((len(rows),), T),
    )  # fmt: skip


def true_gradient(parameters: tuple[Tensor, Tensor], extra: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """-grad E[R (+ extra)]: the gradient of the loss."""
    logp = log_probs(parameters, SEQUENCES)
    reward = torch.tensor(list(REWARD.values())).double()
    reward = reward if extra is None else reward + extra(logp)
    return flat_grad(-(logp.sum(-1).exp() * reward).sum(), parameters)


def expected_gradient(algo: Algorithm, parameters: tuple[Tensor, Tensor], *, group: int, **columns: Tensor) -> Tensor:
    """The algorithm's gradient, averaged over every group it could sample with the probability of sampling it."""
    total = torch.zeros(V + V * V, dtype=torch.float64)
    for rows in itertools.product(SEQUENCES, repeat=group):
        logp = log_probs(parameters, list(rows))
        batch = replace(batch_of(list(rows), logp), **{n: x.expand(group, *x.shape[1:]) for n, x in columns.items()})
        batch = replace(batch, **assign_credit(batch, algo))
        batch = weigh(batch, algo.weigh, Totals(rows=group, tokens=group * T))
        chance = logp.detach().sum().exp()
        total += chance * flat_grad(objective(Forward(logp=logp), batch, algo.loss[:1]), parameters)
    return total


def test_reinforce_is_unbiased() -> None:
    parameters = policy()
    found = expected_gradient(reinforce(), parameters, group=1)
    torch.testing.assert_close(found, true_gradient(parameters), rtol=0, atol=1e-12)


def test_a_baseline_changes_the_variance_and_not_the_mean() -> None:
    parameters = policy()
    found = expected_gradient(reinforce_baseline(), parameters, group=1, baseline=torch.tensor([5.0]).double())
    torch.testing.assert_close(found, true_gradient(parameters), rtol=0, atol=1e-12)


def test_rloo_is_unbiased_and_dr_grpo_is_short_by_its_factor() -> None:
    parameters = policy()
    expected = true_gradient(parameters)
    torch.testing.assert_close(expected_gradient(rloo(), parameters, group=2), expected, rtol=0, atol=1e-12)
    # centring on the whole group's mean loses (G - 1) / G; the fixed length divides by 2 tokens
    found = expected_gradient(dr_grpo(), parameters, group=2)
    torch.testing.assert_close(found, expected / 2 / T, rtol=0, atol=1e-12)


def test_an_actor_critic_is_unbiased_whatever_the_critic_says() -> None:
    # lam 1; token mean over one row of two tokens is half of the row's sum. V depends on the state, not on the action:
    # the first position's is one number; the second's may differ by the first token, here it is constant too.
    parameters = policy()
    found = expected_gradient(a2c(lam=1.0), parameters, group=1, old_value=torch.tensor([[0.7, -1.3]]).double())
    torch.testing.assert_close(found, true_gradient(parameters) / T, rtol=0, atol=1e-12)


def test_kl_in_the_reward_gives_the_gradient_of_the_sequence_kl() -> None:
    parameters = policy()
    ref = log_probs((torch.tensor([0.1, 0.5, -0.3]).double(), torch.eye(V).double()), SEQUENCES)
    beta = 0.3

    def penalised(logp: Tensor) -> Tensor:
        return -beta * (logp - ref).sum(-1)

    for algo in (reinforce(beta=beta), rloo(beta=beta)):
        total = torch.zeros(V + V * V, dtype=torch.float64)
        group = algo.group
        for at in itertools.product(range(len(SEQUENCES)), repeat=group):
            rows = [SEQUENCES[i] for i in at]
            logp = log_probs(parameters, rows)
            batch = replace(
                batch_of(rows, logp), ref_logp=ref[list(at)], kl_coef=torch.full((group,), beta, dtype=torch.float64)
            )
            batch = replace(batch, **assign_credit(batch, algo))
            batch = weigh(batch, row_sum, Totals(rows=group, tokens=group * T))
            grad = flat_grad(objective(Forward(logp=logp), batch, algo.loss), parameters)
            total += logp.detach().sum().exp() * grad
        torch.testing.assert_close(total, true_gradient(parameters, penalised), rtol=0, atol=1e-12)


# --- KL estimators, one state ---

LOGITS = torch.tensor([0.4, -0.2, 0.1, -1.0], dtype=torch.float64)
REF = torch.tensor([-0.3, 0.6, 0.0, 0.2], dtype=torch.float64).log_softmax(-1)
OLD = torch.tensor([0.0, 0.3, -0.5, 0.2], dtype=torch.float64).log_softmax(-1)


def expected_penalty_gradient(estimator: str, *, sampler: Tensor | None, through_ratio: bool) -> Tensor:
    """E over the sampler's tokens of the penalty's gradient on the logits; sampler None: the policy itself."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    old = logp.detach() if sampler is None else sampler
    ones = torch.ones(len(logits), dtype=torch.float64)
    batch = one_token(ref_logp=REF[:, None], old_logp=old[:, None], kl_coef=ones)
    penalty = partial(terms.kl_penalty, estimator=estimator, through_ratio=through_ratio)
    loss = (old.exp() * penalty(Forward(logp=logp[:, None]), batch).squeeze(-1)).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return grad


def gradient_of(kl: Callable[[Tensor], Tensor]) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kl(logits.log_softmax(-1)), logits)
    return grad


def forward_kl() -> Tensor:
    return gradient_of(lambda logp: (logp.exp() * (logp - REF)).sum())


def reverse_kl() -> Tensor:
    return gradient_of(lambda logp: (REF.exp() * (REF - logp)).sum())


def test_k1_as_a_loss_has_no_expected_gradient() -> None:
    found = expected_penalty_gradient("k1", sampler=None, through_ratio=False)
    torch.testing.assert_close(found, torch.zeros(4).double(), rtol=0, atol=1e-15)


def test_k2s_gradient_is_that_of_kl_policy_to_reference() -> None:
    found = expected_penalty_gradient("k2", sampler=None, through_ratio=False)
    torch.testing.assert_close(found, forward_kl(), rtol=0, atol=1e-15)


def test_k3s_gradient_is_that_of_kl_reference_to_policy() -> None:
    found = expected_penalty_gradient("k3", sampler=None, through_ratio=False)
    torch.testing.assert_close(found, reverse_kl(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("sampler", [None, OLD])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_weighed_by_the_ratio_each_has_the_gradient_of_kl_policy_to_reference(
    estimator: str, sampler: Tensor | None
) -> None:
    found = expected_penalty_gradient(estimator, sampler=sampler, through_ratio=True)
    torch.testing.assert_close(found, forward_kl(), rtol=0, atol=1e-14)


def reward_gradient(cost: Tensor) -> Tensor:
    """The policy gradient of minus the cost as a reward: E[cost grad log pi]."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    (grad,) = torch.autograd.grad((logp.detach().exp() * cost * logp).sum(), logits)
    return grad


def test_in_the_reward_only_k1_has_the_gradient_of_the_kl() -> None:
    logp = LOGITS.log_softmax(-1)
    d, true = logp - REF, forward_kl()
    torch.testing.assert_close(reward_gradient(d), true, rtol=0, atol=1e-15)
    assert not reward_gradient((logp.exp() * d).sum().expand(4)).abs().max() > 1e-15, "the exact KL sees no action"
    rare = int(d.argmin())  # rarer than in the reference: descent must raise it
    assert true[rare] < 0
    for name in ("k2", "k3"):
        assert reward_gradient(terms.ESTIMATORS[name](d))[rare] > 0, f"{name} makes it rarer still"


def test_k1_and_k3_are_unbiased_values_and_k2_is_not() -> None:
    logp = LOGITS.log_softmax(-1)
    d, p = logp - REF, logp.exp()
    exact = (p * d).sum().item()
    assert (p * terms.ESTIMATORS["k1"](d)).sum().item() == pytest.approx(exact)
    assert (p * terms.ESTIMATORS["k3"](d)).sum().item() == pytest.approx(exact)
    assert (p * terms.ESTIMATORS["k2"](d)).sum().item() != pytest.approx(exact, rel=1e-3)


def test_the_penalty_to_the_old_policy_is_unbiased_in_value_and_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    batch = one_token(old_logp=OLD[:, None], kl_coef=torch.ones(4).double())
    sampled = (OLD.exp() * terms.old_penalty(Forward(logp=logp[:, None]), batch).squeeze(-1)).sum()
    exact = (OLD.exp() * (OLD - logp)).sum()
    assert sampled.item() == pytest.approx(exact.item())
    for found, expected in zip(
        torch.autograd.grad(sampled, logits, retain_graph=True), torch.autograd.grad(exact, logits), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
