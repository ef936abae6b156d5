"""The optimiser's groups, its schedule and its clipping, by hand."""

import pytest
import torch
from torch import nn

from hone.train import optim

torch.set_num_threads(1)


def test_warm_up_is_a_line_that_reaches_one() -> None:
    rate = optim.learning_rate_factor("constant", warmup=4, steps=100)
    assert [rate(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert optim.learning_rate_factor("constant", warmup=0, steps=10)(0) == 1.0


def test_the_line_goes_down_to_the_floor_and_stays() -> None:
    # warm-up 2, then from 1 to .1 over 10 steps: halfway .55
    rate = optim.learning_rate_factor("linear", warmup=2, steps=12)
    assert [rate(i) for i in (2, 7, 12, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_the_cosine_goes_down_to_the_floor_and_stays() -> None:
    # .1 + .9 (1 + cos(pi x)) / 2: at a quarter .1 + .9 * .853553
    rate = optim.learning_rate_factor("cosine", warmup=0, steps=8)
    assert [rate(i) for i in (0, 2, 4, 8, 99)] == pytest.approx([1.0, 0.868198, 0.55, 0.1, 0.1], abs=1e-6)


def test_constant_is_one() -> None:
    assert optim.constant(0) == optim.constant(10**9) == 1.0


def test_only_matrices_decay_and_the_critic_has_its_own_rate() -> None:
    actor, critic = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = optim.adamw(
        list(actor.parameters()), list(critic.parameters()), lr=0.1, critic_lr=0.3, weight_decay=0.01
    )
    found = [(g["lr"], g["base_lr"], g["weight_decay"], [p.ndim for p in g["params"]]) for g in optimizer.param_groups]
    assert found == [(0.1, 0.1, 0.01, [2]), (0.1, 0.1, 0.0, [1]), (0.3, 0.3, 0.01, [2]), (0.3, 0.3, 0.0, [1])]
    assert {id(p) for p in optim.parameters_of(optimizer)} == {id(p) for m in (actor, critic) for p in m.parameters()}


def test_a_critic_without_a_rate_has_the_actors() -> None:
    optimizer = optim.adamw([nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(1))], lr=0.2)
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.2]
    assert (
        optim.adamw([nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(1))], lr=0.2, critic_lr=0.0).param_groups[
            1
        ]["lr"]
        == 0.0
    )


def test_set_rate_scales_from_the_base_and_not_from_the_last() -> None:
    optimizer = optim.adamw([nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(1))], lr=0.2, critic_lr=0.4)
    optim.set_rate(optimizer, 0.5)
    assert optim.set_rate(optimizer, 0.5) == 0.1
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]


def test_adamw_takes_the_first_step_of_adam_with_decay_apart() -> None:
    # the first step is lr * sign(g); decay takes off lr * wd * w: 2 - .1 - .1 * .5 * 2 = 1.8
    p = nn.Parameter(torch.full((1, 1), 2.0, dtype=torch.float64))
    optimizer = optim.adamw([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.full((1, 1), 7.0, dtype=torch.float64)
    optimizer.step()
    assert p.item() == pytest.approx(1.8, abs=1e-6)


@pytest.mark.parametrize(("limit", "scale"), [(1.0, 0.2), (5.0, 1.0), (50.0, 1.0), (0.0, 1.0)])
def test_clipping_is_by_the_joint_norm_and_zero_means_never(limit: float, scale: float) -> None:
    # gradients 3 and 4: norm 5
    a, b, unused = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert optim.clip_gradients([a, b, unused], limit).item() == 5.0
    assert [a.grad.item(), b.grad.item()] == pytest.approx([3 * scale, 4 * scale], rel=1e-5)
    assert unused.grad is None


def test_clipping_tells_of_a_gradient_that_is_not_finite() -> None:
    a = nn.Parameter(torch.zeros(1))
    a.grad = torch.tensor([torch.nan])
    assert not optim.clip_gradients([a], 1.0).isfinite()
