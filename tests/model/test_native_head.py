"""The vocabulary head and the last norm in C++ against float64: values and gradients, whatever the sizes."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from each import each
from fast_models import functions
from torch import Tensor

from hone.model.backends.native import vocab
from hone.model.backends.native.layer import final_norm
from hone.model.backends.native.vocab import NativeVocab
from hone.model.decoder import RMSNorm
from hone.model.kernels.cpp.library import library
from hone.model.vocab.distribution import HeadRows, Plan
from hone.model.vocab.token_stats import slices, token_stats

pytestmark = pytest.mark.skipif(isinstance(library(), str), reason="there is no C++ compiler")
D = 64
# of positions: none, less than a tile, whole tiles, more than a thread takes at once
COUNTS = [0, 1, 3, 4, 7, 24, 29, 61]
# of tokens: less than a vector, than a panel, whole panels, one more, more than a block of weights
VOCABS = [1, 5, 16, 31, 32, 33, 61, 96, 1024, 1100]
WANTS = [frozenset({"logp"}), frozenset({"logp", "entropy"})]


@dataclass(frozen=True)
class Problem:
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    targets: Tensor  # [N]

    def double(self) -> "Problem":
        hidden, weight = (x.detach().double().requires_grad_() for x in (self.hidden, self.weight))
        return Problem(hidden, weight, self.targets)


def problem(N: int, V: int, *, spread: float = 1.0) -> Problem:
    """spread: of the logits, about."""
    g = torch.Generator().manual_seed(1000 * N + V)
    hidden = torch.randn(N, D, generator=g).mul_(spread)
    weight = torch.randn(V, D, generator=g).div_(D**0.5)
    found = Problem(hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (N,), generator=g))
    plan = Plan(names=("entropy", "logp"), targets=found.targets, others={}, slices=slices(N, "fit", weight))
    assert NativeVocab().covers_head(HeadRows(found.hidden, found.weight), plan) is None, (
        "or the tests would be of another way"
    )
    return found


def exact(p: Problem) -> dict[str, Tensor]:
    """By the formulas in float64."""
    logq = (p.hidden @ p.weight.t()).log_softmax(-1)
    logp = logq.gather(1, p.targets[:, None])[:, 0]
    return {"logp": logp, "entropy": -(logq.exp() * logq).sum(-1)}


def gradients(stats: dict[str, Tensor], p: Problem, want: frozenset[str]) -> tuple[Tensor, ...]:
    """Of the statistics, each position's with a factor of its own."""
    factor = torch.linspace(-1.5, 2.0, len(p.targets)).to(p.hidden)
    total = sum((stats[name] * factor).sum() for name in sorted(want))
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, [x for x in (p.hidden, p.weight) if x.requires_grad])


def close(found: Tensor, expected: Tensor, *, atol: float) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=atol)


def same_as_exact(p: Problem, want: frozenset[str], *, atol: float = 3e-6) -> None:
    doubled = p.double()
    found, expected = token_stats(p.hidden, p.weight, p.targets, want=want), exact(doubled)
    with torch.no_grad():
        apart = token_stats(p.hidden, p.weight, p.targets, want=want)
    for name in want:
        assert found[name].shape == p.targets.shape
        close(found[name].detach(), expected[name].detach(), atol=atol)
        assert torch.equal(apart[name], found[name]), "with gradients and without"
    for x, y in zip(gradients(found, p, want), gradients(expected, doubled, want), strict=True):
        close(x, y, atol=atol * max(1.0, float(y.abs().max())) if y.numel() else atol)


@each("want", WANTS, ids=len)
@each("V", VOCABS)
@each("N", [7, 24])
def test_any_vocabulary(N: int, V: int, want: frozenset[str]):
    same_as_exact(problem(N, V), want)


@each("want", WANTS, ids=len)
@each("V", [31, 64])
@each("N", COUNTS)
def test_any_number_of_positions(N: int, V: int, want: frozenset[str]):
    same_as_exact(problem(N, V), want)


@each("spread", [30.0, 300.0, 3000.0])
@each("V", [5, 61, 1100])
def test_logits_that_are_far_apart(V: int, spread: float):
    # a product in float32 is off by its rounding, which is relative to the logits
    same_as_exact(problem(13, V, spread=spread), WANTS[1], atol=3e-6 * spread)


@pytest.mark.parametrize("shift", [-(2.0**14), 2.0**14])
def test_logits_that_are_all_large_have_the_log_probs_of_small_ones(shift: float):
    # the last feature adds a power of two to every logit, of which none is rounded
    weight = torch.zeros(37, D)
    weight[:, 0], weight[:, -1] = torch.arange(37) / 8, shift
    hidden, targets = torch.zeros(6, D), torch.tensor([0, 36, 18, 1, 35, 7])
    hidden[:, 0] = 1.0
    small = token_stats(hidden, weight, targets, want=WANTS[1])
    hidden[:, -1] = 1.0
    large = token_stats(hidden, weight, targets, want=WANTS[1])
    assert all(torch.equal(large[name], small[name]) for name in small)


def test_targets_may_lie_apart_or_be_of_another_kind():
    p = problem(14, 61)
    twice = torch.stack([p.targets, p.targets.flip(0)], 1)
    found = [token_stats(p.hidden, p.weight, t, want=WANTS[1]) for t in (p.targets, twice[:, 0], p.targets.int())]
    for other in found[1:]:
        assert all(torch.equal(other[name], x) for name, x in found[0].items())
    grads = [torch.autograd.grad(some["logp"].sum(), [p.hidden, p.weight]) for some in found]
    assert all(torch.equal(a, b) for some in grads[1:] for a, b in zip(some, grads[0], strict=True))


def test_by_hand():
    # logits 0, 0 and -200: a token of no weight adds nothing to the entropy, and its log-prob is finite
    weight, hidden = torch.zeros(3, D), torch.zeros(3, D)
    weight[2, 0], hidden[:, 0] = -200.0, 1.0
    found = token_stats(hidden, weight, torch.tensor([0, 1, 2]), want=WANTS[1])
    half = torch.tensor(2.0).log()
    torch.testing.assert_close(found["logp"], torch.stack([-half, -half, -200.0 - half]))
    torch.testing.assert_close(found["entropy"], half.expand(3))


@pytest.mark.parametrize("N", [5, 24])
def test_a_head_that_is_frozen(N: int):
    p = problem(N, 61)
    p.weight.requires_grad_(False)
    found = gradients(token_stats(p.hidden, p.weight, p.targets, want=WANTS[0]), p, WANTS[0])
    doubled = p.double()
    close(found[0], gradients(exact(doubled), doubled, WANTS[0])[0], atol=3e-6)


@pytest.mark.parametrize("V", [61, 64])
def test_a_position_is_the_same_to_the_bit_in_any_company_and_for_any_threads(V: int):
    p, threads = problem(61, V), torch.get_num_threads()
    whole = token_stats(p.hidden, p.weight, p.targets, want=WANTS[1])
    for count, step in ((1, 1), (1, 5), (2, 61), (2, 24)):
        torch.set_num_threads(count)
        parts = [slice(i, i + step) for i in range(0, 61, step)]
        cut = [token_stats(p.hidden[at], p.weight, p.targets[at], want=WANTS[1]) for at in parts]
        torch.set_num_threads(threads)
        for name in whole:
            assert torch.equal(torch.cat([x[name] for x in cut]), whole[name]), (count, step)


@pytest.mark.parametrize("change", ["temperature", "float64", "width", "a large head"])
def test_what_it_does_not_compute(change: str, monkeypatch: pytest.MonkeyPatch):
    p = problem(4, 33)
    hidden, weight = (x.detach() for x in (p.hidden, p.weight))
    rows = HeadRows(hidden, weight)
    if change == "temperature":
        rows = HeadRows(hidden, weight, 0.5)
    elif change == "float64":
        rows = HeadRows(hidden.double(), weight.double())
    elif change == "width":
        rows = HeadRows(hidden[:, :42].contiguous(), weight[:, :42].contiguous())
    else:
        monkeypatch.setattr(vocab, "SMALL", 33 * D * 4 - 1)
    plan = Plan(names=("logp",), targets=p.targets, others={}, slices=(slice(0, 4),))
    assert NativeVocab().covers_head(rows, plan)
    # the other way gives the same numbers, but for rounding
    found = token_stats(rows.hidden, rows.weight, p.targets, want=WANTS[0], temperature=rows.temperature)["logp"]
    expected = (rows.hidden.double() @ rows.weight.double().t() / rows.temperature).log_softmax(-1)
    torch.testing.assert_close(found.double(), expected.gather(1, p.targets[:, None])[:, 0], rtol=1e-5, atol=3e-6)


# --- the last norm ---


@each("threads", [1, 2])
@each("shape", [(1, 1, 64), (3, 7, 64), (2, 5, 42), (0, 4, 64), (40, 50, 64)], ids=str)
def test_the_norm_s_values_and_gradients_are_torch_s(shape: tuple[int, ...], threads: int):
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(shape[-1], eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_(mean=1.0, std=0.3, generator=g)
    x = torch.randn(shape, generator=g).mul_(3.0).requires_grad_()
    slope = torch.randn(shape, generator=g)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    y = final_norm(norm, x)
    found = torch.autograd.grad((y * slope).sum(), (x, norm.weight))
    torch.set_num_threads(before)
    wide, gain = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    plain = F.rms_norm(wide, shape[-1:], gain, norm.eps)
    expected = torch.autograd.grad((plain * slope).sum(), (wide, gain))
    assert "_NormBackward" in functions(y)
    torch.testing.assert_close(y.double(), plain, rtol=1e-5, atol=1e-6)
    for a, b in zip(found, expected, strict=True):
        most = float(b.abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6 * max(1.0, most))


def test_a_norm_with_a_hook_goes_its_own_way():
    norm, seen = RMSNorm(D, eps=1e-5), list[int]()
    norm.register_forward_hook(lambda *_: seen.append(1))
    final_norm(norm, torch.randn(2, 3, D))
    assert seen == [1]
