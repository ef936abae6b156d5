"""Half-precision weights with float32 copies, and moments of one byte: what they keep and what they cost."""

import torch
from torch import nn

from hone.train import optim
from hone.train.optim import Masters

torch.set_num_threads(1)


def test_a_step_too_small_for_bfloat16_is_not_lost() -> None:
    """0.001 beside 1 is below half a unit of bfloat16: ten thousand of them would be nothing, here they are 10."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    masters = Masters([p])
    optimizer = torch.optim.SGD(masters.of([p]), lr=0.001)
    optimizer.register_step_post_hook(masters.publish)
    for _ in range(100):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert p.grad is None
    torch.testing.assert_close(masters.of([p])[0].detach(), torch.full((4,), 0.9))
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.9, dtype=torch.bfloat16))


def test_gradients_of_many_micro_batches_add_up_in_float32() -> None:
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = Masters([p])
    for _ in range(1000):  # in bfloat16 the sum would stop growing at 256
        p.sum().backward()
    grad = masters.of([p])[0].grad
    assert grad is not None
    assert grad.item() == 1000.0


def test_a_code_is_within_its_rounding_and_zero_stays_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, optim.BLOCK).abs() * torch.logspace(-8, 3, 20)[:, None]
    x[3], x[4, 5] = 0.0, 0.0
    for levels, error in ((127, 0.046), (255, 0.023)):
        code, top = optim.pack(x, levels=levels)
        assert code.min() >= 0
        assert code.max() == levels
        back = optim.unpack(code, top, levels=levels)
        near = x > top * 2.0**-15.5
        assert ((back - x).abs()[near] <= error * x[near]).all()
        assert (back[x == 0] == 0).all()
        assert (back[~near] <= top.expand_as(x)[~near] * 2.0**-15).all()


def test_moments_go_there_and_back_with_their_signs() -> None:
    torch.manual_seed(0)
    m, v = torch.randn(8, optim.BLOCK), torch.rand(8, optim.BLOCK)
    state = optim.encode(m, v)
    assert (state["m"].dtype, state["v"].dtype) == (torch.int8, torch.uint8)
    m2, v2 = optim.decode(state)
    assert (m2.sign() == m.sign()).float().mean() > 0.999  # the smallest may become 0
    torch.testing.assert_close(m2, m, rtol=0.05, atol=1e-4)
    torch.testing.assert_close(v2, v, rtol=0.05, atol=1e-6)


def trained(bits: int, *, steps: int = 150) -> tuple[float, torch.optim.Optimizer, nn.Module]:
    """A small network on a fixed target; the loss it ends with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    x = torch.randn(256, 64)
    y = torch.randn(256, 64).cumsum(-1) / 8
    optimizer = optim.adamw(list(model.parameters()), lr=1e-2, weight_decay=0.01, bits=bits)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), optimizer, model


def test_the_first_step_is_that_of_adamw() -> None:
    """Before anything was packed nothing was rounded."""
    ours, theirs = trained(8, steps=1)[2], trained(32, steps=1)[2]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_one_byte_moments_learn_as_four_byte_ones_do() -> None:
    packed, plain = trained(8)[0], trained(32)[0]
    start = trained(32, steps=1)[0]
    assert plain < 0.3 * start
    assert abs(packed - plain) < 0.05 * start


def test_one_byte_moments_take_a_quarter_of_the_memory() -> None:
    _, optimizer, model = trained(8, steps=2)
    large = [p for p in model.parameters() if p.numel() >= optim.SMALL]
    held = sum(x.nbytes for p in large for x in optimizer.state[p].values())
    assert held < 2.1 * sum(p.numel() for p in large)
    assert held < 0.27 * 8 * sum(p.numel() for p in large)


def test_a_packed_optimiser_goes_on_exactly_where_it_was_saved() -> None:
    from hone.storage.files import load_optimizer, optimizer_tensors

    _, optimizer, model = trained(8, steps=3)
    twin = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    other = optim.adamw(twin, lr=1e-2, weight_decay=0.01, bits=8)
    load_optimizer(other, {k: v.clone() for k, v in optimizer_tensors(optimizer).items()})
    ours = optim.parameters_of(optimizer)
    for p, q in zip(ours, optim.parameters_of(other), strict=True):
        p.grad = torch.ones_like(p) * 0.3
        q.grad = p.grad.clone()
    optimizer.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, optim.parameters_of(other), strict=True))
