"""Under top-k the policy is the one renormalised on the tokens that were kept: its gradient is exact."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from world import RAGGED, TOKENS, World, close, error, expected_gradient

from hone.algo import Algorithm, reinforce, rloo
from hone.model.vocab.token_stats import token_stats
from hone.types import Forward, Support

torch.set_num_threads(1)
POLICY = RAGGED.policy(1.0)
KEPT = torch.zeros(RAGGED.states, TOKENS, dtype=torch.bool).scatter(-1, POLICY.topk(2).indices, True)


@dataclass(frozen=True)
class Truncated(World):
    """The trajectories that top-k can sample, and log-probs as the learner computes them."""

    def logp(self, logits: Tensor) -> Tensor:
        state, targets = self.state[self.batch.mask], self.batch.targets[self.batch.mask]
        kept = KEPT[state]
        size = kept.sum(-1)
        support = Support(first=size.cumsum(0) - size, size=size, ids=kept.nonzero()[:, 1])
        head = torch.eye(TOKENS, dtype=torch.float64)
        found = token_stats(logits[state], head, targets, want=frozenset({"logp"}), support=support)["logp"]
        return torch.zeros(self.batch.targets.shape, dtype=torch.float64).masked_scatter(self.batch.mask, found)


@dataclass(frozen=True)
class Masked(World):
    """The same trajectories under log softmax of the kept logits, written out."""

    def logp(self, logits: Tensor) -> Tensor:
        log = logits.masked_fill(~KEPT, -torch.inf).log_softmax(-1)
        return torch.where(self.batch.mask, log[self.state, self.batch.targets], 0.0)


def possible(kind: type[World]) -> World:
    """Without the trajectories that hold a token which was cut."""
    inside = (KEPT[RAGGED.state, RAGGED.batch.targets] | ~RAGGED.batch.mask).all(-1).nonzero().squeeze(1)
    return kind(batch=RAGGED.batch.rows(inside), state=RAGGED.state[inside], states=RAGGED.states)


@pytest.mark.parametrize(("algo", "size"), [(reinforce(), 1), (rloo(), 2)])
def test_the_gradient_under_top_k_is_that_of_the_renormalised_policy(algo: Algorithm, size: int) -> None:
    world = possible(Truncated)
    assert len(world.batch) < len(RAGGED.batch)
    assert world.chance(POLICY).sum().item() == pytest.approx(1.0, abs=1e-12)
    found = expected_gradient(algo, world, POLICY, size=size)
    close(found, possible(Masked).loss_gradient(POLICY))


@dataclass(frozen=True)
class Unaware(Masked):
    """Sampled by top-k, and learned from as if every token could have been drawn."""

    def forward(self, logits: Tensor, **more: Tensor | None) -> Forward:
        return replace(super().forward(logits, **more), logp=World.logp(self, logits))


def test_without_the_support_the_gradient_is_another() -> None:
    biased = expected_gradient(reinforce(), possible(Unaware), POLICY)
    assert error(biased, possible(Masked).loss_gradient(POLICY)) > 0.1
