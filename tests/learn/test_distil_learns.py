"""A student distilled on its own samples becomes its teacher, and only the texts it writes itself are ever read."""

import itertools

import pytest
import tiny
import torch
from torch import Tensor

from hone.algo import distil
from hone.data.collate import collate
from hone.model.policy import Policy
from hone.model.teacher import TopKTeacher
from hone.train.learner import Learner

torch.set_num_threads(1)


def teacher() -> Policy:
    """Of another size than the student, and with opinions of its own."""
    base = tiny.decoder(7, width=16)
    with torch.no_grad():
        for p in base.parameters():
            if p.ndim == 2:
                p.mul_(4)
    return Policy(base).requires_grad_(False)


def gap(learner: Learner, of: Policy, *, seed: int) -> float:
    """The mean exact KL(student || teacher) on texts that the student writes and was not trained on."""
    policy = learner.policy
    assert isinstance(policy, Policy)
    batch = collate(tiny.Roller(policy.decoder, group=8, seed=seed)(tiny.TASKS))
    with torch.no_grad():
        q, r = policy.log_rows(batch)(slice(None)), of.log_rows(batch)(slice(None))
    return float((q.exp() * (q - r)).sum(-1).mean())


# unlikely tokens are lumped, so that the whole KL, which is measured here, falls less far
@pytest.mark.parametrize(("top_k", "share"), [(0, 0.15), (3, 0.3)])
def test_a_student_approaches_its_teacher(top_k: int, share: float) -> None:
    algo, model = distil(top_k=top_k), teacher()
    learner = tiny.learner_for(algo, lr=0.01)
    assert isinstance(learner.policy, Policy)
    learner.policy.reference = TopKTeacher(model, top_k) if top_k else model
    before = gap(learner, model, seed=99)
    losses = [it.metrics["loss"] for it in itertools.islice(tiny.run_online(learner, algo, group=8), 60)]
    after = gap(learner, model, seed=99)
    assert before > 0.5
    assert after < share * before, (before, after)
    assert sum(losses[-5:]) / 5 < 0.2 * losses[0], losses


def test_the_reward_has_no_part_in_it() -> None:
    def weights(reward: float) -> list[Tensor]:
        learner = tiny.learner_for(distil())
        list(itertools.islice(tiny.run_online(learner, distil(), lambda r: reward), 2))
        return tiny.parameters_of(learner)

    assert all(torch.equal(a, b) for a, b in zip(weights(0.0), weights(5.0), strict=True))


def test_the_teacher_stays() -> None:
    algo, model = distil(), teacher()
    learner = tiny.learner_for(algo)
    learner.policy.reference = model  # pyright: ignore[reportAttributeAccessIssue]
    before = [p.clone() for p in model.parameters()]
    list(itertools.islice(tiny.run_online(learner, algo), 3))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
