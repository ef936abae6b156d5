"""Every online algorithm learns, through loop.online, with the real decoder, policy and sampler.

The reward is the share of 3s among the five tokens that may be written: about 0.1 by chance, 1 at best.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from each import each

from hone.algo import ALGORITHMS
from hone.data.collate import collate
from hone.model.policy import Policy, frozen_copy

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """What the tiny world needs of an algorithm's settings, and what it must reach."""

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: int = 20
    epochs: int = 1
    reach: float = 0.7


CASES = {
    "reinforce": Case(),
    "reinforce_baseline": Case(),
    "rloo": Case(),
    "reinforce_pp": Case(epochs=2),
    "reinforce_pp_baseline": Case(epochs=2),
    "a2c": Case(),
    "trpo": Case({"delta": 0.05, "cg_steps": 4, "damping": 0.01}, steps=12, reach=0.5),
    "ppo": Case(epochs=2),
    "ppo_penalty": Case(epochs=2),
    "klq": Case(steps=30),
    "grpo": Case(epochs=2),
    "dr_grpo": Case(epochs=2),
    "dapo": Case({"limit": 6, "margin": 1}, epochs=2),
    "gspo": Case({"low": 0.2, "high": 0.2}, epochs=2),
    "cispo": Case(epochs=2),
    "online_dpo": Case(),
    "expert_iteration": Case({"threshold": 0.35}, steps=30, reach=0.35),  # it imitates, it does not maximise
}
MADE = {name: make() for name, make in sorted(ALGORITHMS.items())}
ONLINE = [name for name, algo in MADE.items() if algo.online and not algo.teacher]  # test_distil_learns.py has those


@each("name", ONLINE)
def test_it_learns_to_say_three(name: str) -> None:
    case = CASES[name]
    algo = ALGORITHMS[name](**case.settings)
    learner = tiny.learner_for(algo, lr=0.01)
    run = tiny.run_online(learner, algo, prompts=8, group=8, epochs=case.epochs)
    rewards = [it.metrics["reward"] for it in itertools.islice(run, case.steps)]
    assert rewards[0] < 0.2, rewards
    assert sum(rewards[-3:]) / 3 > case.reach, rewards


@pytest.mark.parametrize("name", ["ppo", "a2c", "klq"])
def test_it_learns_with_a_critic_of_its_own(name: str) -> None:
    algo = ALGORITHMS[name]()
    learner = tiny.learner_for(algo, lr=0.01, shared=False)
    run = tiny.run_online(learner, algo, prompts=8, group=8)
    rewards = [it.metrics["reward"] for it in itertools.islice(run, 30)]
    assert sum(rewards[-3:]) / 3 > 0.7, rewards


def test_trpo_keeps_its_bound_at_every_step_of_a_run() -> None:
    delta = 0.03
    algo = ALGORITHMS["trpo"](delta=delta, cg_steps=4, damping=0.01)
    learner = tiny.learner_for(algo, lr=0.01)
    policy = learner.policy
    assert isinstance(policy, Policy)
    run = tiny.run_online(learner, algo, prompts=6, group=4)
    accepted = 0
    for _ in range(8):
        before = frozen_copy(policy)
        metrics, groups = (it := next(run)).metrics, it.groups
        with torch.no_grad():
            batch = collate(groups)
            p, q = before.log_rows(batch)(slice(None)), policy.log_rows(batch)(slice(None))
        kl = (p.exp() * (p - q)).sum(-1).mean().item()
        if metrics["accepted"] == 1.0:
            accepted += 1
            assert 0 < kl <= delta * (1 + 1e-4)  # measured twice in float32
            assert metrics["trust_kl"] == pytest.approx(kl, rel=1e-2)
        else:
            assert torch.equal(p, q)
    assert accepted >= 6


def test_a_kl_penalty_holds_the_policy_back() -> None:
    def drift(beta: float, kl: str) -> float:
        algo = ALGORITHMS["ppo"](beta=beta, kl=kl)
        learner = tiny.learner_for(algo, lr=0.01)
        learner.reference = learner.reference or frozen_copy(learner.policy)  # pyright: ignore[reportArgumentType]
        reference = learner.reference
        its = list(itertools.islice(tiny.run_online(learner, algo, prompts=8, group=8), 15))
        batch = collate(its[-1].groups)
        with torch.no_grad():
            now = learner.policy(batch, frozenset({"logp"})).logp
            then = reference(batch, frozenset({"logp"})).logp
        return (now - then)[batch.mask].mean().item()

    free = drift(0.0, "loss:k3")
    for kl in ("reward:k1", "loss:k2", "loss:k3", "loss:exact", "loss:k1*ratio"):
        assert drift(1.0, kl) < free / 2, kl
