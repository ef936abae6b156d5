"""TRPO's update: the solver, the Fisher product, the bound, and what it leaves alone."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from each import each
from torch import Tensor

from hone.algo import Algorithm, trpo
from hone.algo.table import TrustRegion, objective
from hone.algo.weight import mismatch
from hone.data.collate import collate
from hone.errors import HoneError
from hone.model.backends.registry import second_order
from hone.model.lora import add_lora, lora_parameters
from hone.model.policy import Policy, frozen_copy
from hone.train import annotate as passes
from hone.train import trust_region
from hone.train import update as step
from hone.train.learner import Learner
from hone.types import Batch

torch.set_num_threads(1)


def test_conjugate_gradient_solves_a_positive_definite_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_region, "TOLERANCE", 1e-28)
    g = torch.Generator().manual_seed(0)
    m = torch.randn(12, 12, generator=g, dtype=torch.float64)
    F, b = m @ m.T + 0.1 * torch.eye(12, dtype=torch.float64), torch.randn(12, generator=g, dtype=torch.float64)
    x = trust_region.conjugate_gradient(lambda v: F @ v, b, steps=60)
    torch.testing.assert_close(x, torch.linalg.solve(F, b), rtol=1e-9, atol=1e-9)


def test_conjugate_gradient_needs_no_more_steps_than_distinct_eigenvalues() -> None:
    F = torch.diag(torch.tensor([1.0, 1.0, 5.0, 5.0, 5.0]).double())
    b = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).double()
    calls = list[Tensor]()

    def product(v: Tensor) -> Tensor:
        calls.append(v)
        return F @ v

    x = trust_region.conjugate_gradient(product, b, steps=50)
    assert len(calls) == 2
    torch.testing.assert_close(x, b / F.diagonal())


def test_conjugate_gradient_of_nothing_is_nothing() -> None:
    assert not trust_region.conjugate_gradient(lambda v: v, torch.zeros(3), steps=5).any()


def world(algo: Algorithm, *, width: int = 8, shared: bool = True, lora: bool = False, seed: int = 0) -> Learner:
    base = tiny.decoder(seed, width=width, dtype=torch.float64)
    if lora:
        add_lora(base, rank=2, alpha=4.0, seed=seed)
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in lora_parameters(base):
                p += 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    learner = tiny.learner_for(algo, base=base, shared=shared, lr=0.05, micro_rows=5)
    learner.start_controls(algo)
    return learner


def batch_for(algo: Algorithm, learner: Learner, *, seed: int = 0, correct: step.Correct | None = None) -> Batch:
    batch = passes.annotate(collate(tiny.groups_for(algo, seed=seed), dtype=torch.float64), algo, learner)
    return step.weigh(step.assign_credit(batch, algo), algo, correct=correct)


def explicit_fisher(learner: Learner, batch: Batch) -> Tensor:
    """Mean over trained tokens of sum_a pi(a) grad log pi(a) grad log pi(a)'."""
    policy = learner.policy
    assert isinstance(policy, Policy)
    parameters = policy.actor_parameters()
    logp = policy.log_rows(batch)(slice(None))
    size = sum(p.numel() for p in parameters)
    F = torch.zeros(size, size, dtype=torch.float64)
    for n, a in itertools.product(range(logp.shape[0]), range(logp.shape[1])):
        grads = torch.autograd.grad(logp[n, a], parameters, retain_graph=True)
        flat = torch.cat([g.flatten() for g in grads])
        F += logp[n, a].exp().detach() * torch.outer(flat, flat)
    return F / len(logp)


def test_the_fisher_product_is_the_fisher_matrix_times_the_vector() -> None:
    algo = trpo()
    learner = world(algo, width=4)
    batch = batch_for(algo, learner).rows(slice(2, 5))
    batch = step.weigh(batch, algo)
    F = explicit_fisher(learner, batch)
    parameters = learner.policy.actor_parameters()
    g = torch.Generator().manual_seed(3)
    for micro_rows, chunk, layers in ((100, None, False), (1, None, False), (100, 4, False), (2, 4096, True)):
        learner.micro_rows = micro_rows
        learner.policy.chunk, learner.policy.checkpoint_layers = chunk, layers  # pyright: ignore
        v = torch.randn(len(F), generator=g, dtype=torch.float64)
        with second_order(), trust_region._using_old_policy(learner, learner.policy):
            found = trust_region._fisher_product(learner, batch, parameters, v, 1)
        torch.testing.assert_close(found, F @ v, rtol=0, atol=1e-12)


def exact_kl(old: Policy, new: Policy, batch: Batch) -> float:
    """Mean KL(old || new) over the trained tokens, from the two distributions themselves."""
    with torch.no_grad():
        p, q = old.log_rows(batch)(slice(None)), new.log_rows(batch)(slice(None))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def surrogate(learner: Learner, batch: Batch, algo: Algorithm) -> float:
    with torch.no_grad():
        return objective(learner.policy(batch, frozenset({"logp"})), batch, algo.loss[:1]).item()


def take(learner: Learner, batch: Batch, algo: Algorithm) -> tuple[dict[str, float], Policy, Policy]:
    """The step's statistics, with the policy before and after it."""
    policy = learner.policy
    assert isinstance(policy, Policy)
    before = frozen_copy(policy)
    return trust_region.step(learner, batch, algo).means(), before, policy


@each("delta", [0.3, 0.01, 1e-4])
@each(("shared", "lora"), [(True, False), (False, False), (True, True)])
def test_an_accepted_step_keeps_the_bound_and_improves_the_surrogate(delta: float, shared: bool, lora: bool) -> None:
    algo = trpo(delta=delta, cg_steps=5, damping=0.01)
    learner = world(algo, shared=shared, lora=lora)
    for seed in range(3):
        batch = batch_for(algo, learner, seed=seed)
        loss = surrogate(learner, batch, algo)
        stats, before, after = take(learner, batch, algo)
        assert stats["accepted"] == 1.0
        kl = exact_kl(before, after, batch)
        assert 0 < kl <= delta
        assert stats["trust_kl"] == pytest.approx(kl, rel=1e-9)
        assert surrogate(learner, batch, algo) < loss
        assert after.old is None


def test_the_step_goes_nearly_to_the_bound() -> None:
    # where the KL is nearly quadratic the first try has KL = delta (less what damping takes), so a step is no token one
    algo = trpo(delta=1e-4, cg_steps=20, damping=1e-3)
    learner = world(algo)
    stats, _, _ = take(learner, batch_for(algo, learner), algo)
    assert stats["step_scale"] in (1.0, 0.5)
    assert stats["trust_kl"] > 0.2e-4


def test_the_direction_is_the_natural_gradient() -> None:
    algo = trpo(delta=1e-6, cg_steps=200, damping=0.1)
    learner = world(algo, width=4)
    batch = step.weigh(batch_for(algo, learner).rows(slice(2, 6)), algo)
    parameters = learner.policy.actor_parameters()
    loss = objective(learner.policy(batch, frozenset({"logp"})), batch, algo.loss[:1])
    g = torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)])
    F = explicit_fisher(learner, batch) + 0.1 * torch.eye(len(g), dtype=torch.float64)
    expected = -torch.linalg.solve(F, g)
    start = torch.cat([p.detach().flatten().clone() for p in parameters])
    stats = trust_region.step(learner, batch, algo).means()
    moved = torch.cat([p.detach().flatten() for p in parameters]) - start
    assert torch.cosine_similarity(moved, expected, dim=0).item() > 1 - 1e-6
    # length sqrt(2 delta / s'Fs), times the line search's factor
    scale = stats["step_scale"] * (2e-6 / (expected @ F @ expected)).sqrt()
    assert moved.norm().item() == pytest.approx((scale * expected.norm()).item(), rel=1e-4)


def test_a_correction_that_masks_tokens_does_not_loosen_the_bound() -> None:
    # tokens of weight 0 are moved like the others: the KL is a mean over all of them
    algo = trpo(delta=0.01, cg_steps=5, damping=0.01)
    learner = world(algo)
    batch = batch_for(algo, learner, correct=partial(mismatch, how="mask", cap=1.5))
    assert 0 < batch.token_weight.sum() < 0.6
    stats, before, after = take(learner, batch, algo)
    assert stats["accepted"] == 1.0
    assert stats["trust_kl"] == pytest.approx(exact_kl(before, after, batch), rel=1e-9)
    assert exact_kl(before, after, batch) <= 0.01


@pytest.mark.parametrize(
    ("delta", "before"),
    [(1e-9, torch.inf), (1e9, -1e9), (1e9, torch.nan)],
    ids=["no try is short enough", "no try improves", "nothing to compare with"],
)
def test_a_rejected_step_restores_the_actor_bit_for_bit(delta: float, before: float) -> None:
    algo = trpo()
    learner = world(algo)
    batch = batch_for(algo, learner)
    parameters = learner.policy.actor_parameters()
    actor = [p.detach().clone() for p in parameters]
    full = torch.linspace(-1, 1, sum(p.numel() for p in parameters), dtype=torch.float64)
    stats = step.Stats()
    trust_region._line_search(
        learner,
        batch,
        algo.loss[:1],
        full,
        region=TrustRegion(delta=delta, backtracks=4),
        before=before,
        stats=stats,
        unit=1,
    )
    assert stats.means() == {"accepted": 0.0}
    assert all(torch.equal(a, b) for a, b in zip(actor, parameters, strict=True))


def test_without_an_advantage_there_is_no_step() -> None:
    algo = trpo()
    learner = world(algo)
    batch = batch_for(algo, learner)
    actor = [p.detach().clone() for p in learner.policy.actor_parameters()]
    stats = trust_region.step(learner, replace(batch, adv=torch.zeros_like(batch.adv)), algo).means()
    assert stats["accepted"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(actor, learner.policy.actor_parameters(), strict=True))


def test_the_line_search_takes_the_longest_try_that_fits() -> None:
    algo = trpo()
    learner = world(algo)
    batch = batch_for(algo, learner)
    parameters = learner.policy.actor_parameters()
    full = torch.linspace(-1, 1, sum(p.numel() for p in parameters), dtype=torch.float64)
    start = torch.cat([p.detach().flatten().clone() for p in parameters])
    old = frozen_copy(learner.policy)  # pyright: ignore[reportArgumentType]
    stats = step.Stats()
    region = TrustRegion(delta=0.02, backtracks=20)
    trust_region._line_search(learner, batch, algo.loss[:1], full, region=region, before=torch.inf, stats=stats, unit=1)
    scale = stats.means()["step_scale"]
    now = torch.cat([p.detach().flatten() for p in parameters])
    torch.testing.assert_close(now, start + scale * full, rtol=0, atol=1e-15)
    assert exact_kl(old, learner.policy, batch) <= 0.02  # pyright: ignore[reportArgumentType]
    trust_region._assign(parameters, start + 2 * scale * full)
    assert exact_kl(old, learner.policy, batch) > 0.02  # pyright: ignore[reportArgumentType]


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    algo = trpo()
    learner = world(algo)
    batch = batch_for(algo, learner)
    adv = batch.adv.clone()
    adv[batch.mask.nonzero()[0].unbind()] = torch.nan
    before = tiny.parameters_of(learner)
    assert trust_region.step(learner, replace(batch, adv=adv), algo).means() == {"skipped": 1.0}
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))
    assert (learner.updates, learner.guard.skipped_in_all) == (0, 1)


def test_a_critics_gradient_that_is_not_finite_takes_the_actors_step_back() -> None:
    algo = trpo()
    learner = world(algo)
    batch = batch_for(algo, learner)
    returns = batch.returns.clone()
    returns[batch.mask.nonzero()[0].unbind()] = torch.inf
    before = tiny.parameters_of(learner)
    assert trust_region.step(learner, replace(batch, returns=returns), algo).means() == {"skipped": 1.0}
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))
    assert trust_region.step(learner, batch, algo).means()["accepted"] == 1.0


@pytest.mark.parametrize("shared", [True, False])
def test_the_critics_step_never_reaches_the_actor_and_lowers_its_error(shared: bool) -> None:
    algo = trpo()
    learner = world(algo, shared=shared)
    batch = batch_for(algo, learner)
    actor = [p.detach().clone() for p in learner.policy.actor_parameters()]
    critic = [p.detach().clone() for p in learner.policy.critic_parameters()]

    def error() -> float:
        with torch.no_grad():
            return objective(learner.policy(batch, frozenset({"value"})), batch, algo.loss[1:]).item()

    before = error()
    stats = step.Stats()
    for _ in range(5):
        trust_region._critic_gradient(learner, batch, algo)
        step.apply_gradients(learner, stats, learner.policy.critic_parameters())
    assert all(torch.equal(a, b) for a, b in zip(actor, learner.policy.actor_parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(critic, learner.policy.critic_parameters(), strict=True))
    assert error() < before
    assert learner.updates == 5


def test_with_adapters_only_the_adapters_move() -> None:
    algo = trpo(delta=0.05)
    learner = world(algo, lora=True)
    base = learner.policy.decoder  # pyright: ignore[reportAttributeAccessIssue]
    frozen = {n: p.detach().clone() for n, p in base.named_parameters() if not p.requires_grad}
    stats = trust_region.step(learner, batch_for(algo, learner), algo).means()
    assert stats["accepted"] == 1.0
    assert frozen
    assert all(torch.equal(x, dict(base.named_parameters())[n]) for n, x in frozen.items())


def test_the_step_does_not_depend_on_the_micro_batches() -> None:
    algo = trpo(delta=0.02, cg_steps=4)
    results = list[list[Tensor]]()
    for micro_rows in (1, 3, 100):
        learner = world(algo)
        learner.micro_rows = micro_rows
        trust_region.step(learner, batch_for(algo, learner), algo)
        results.append([p.detach().clone() for p in learner.policy.actor_parameters()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_an_algorithm_without_a_region_is_a_programming_error() -> None:
    algo = trpo()
    learner = world(algo)
    with pytest.raises(ValueError, match="no trust region"):
        trust_region.step(learner, batch_for(algo, learner), replace(algo, trust_region=None))


def test_more_than_one_step_an_iteration_is_refused() -> None:
    algo = trpo()
    with pytest.raises(HoneError, match="bounds one step an iteration"):
        next(tiny.run_online(world(algo), algo, epochs=2))
