"""Vocabulary chunks: however the positions are cut, values and gradients are those of the formulas."""

from functools import partial
from itertools import combinations

import pytest
import torch
from each import each
from torch.utils._python_dispatch import TorchDispatchMode
from vocab_cases import support_of

from hone.engine.params import SampleParams
from hone.model.backends.registry import second_order
from hone.model.layout import cells, hidden_states, lay_out
from hone.model.vocab import token_stats as vocab
from hone.model.vocab.distribution import HeadRows, at_least_float32
from hone.model.vocab.token_stats import slices, token_stats

torch.set_num_threads(1)
EVERYTHING = frozenset({"logp", "entropy", "ref_kl", "old_kl"})


def exact(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def sampled(temperature=1.0, **settings):
    return SampleParams(max_tokens=1, stop_ids=frozenset(), temperature=temperature, **settings)


def problem(N=11, V=7, D=5, seed=0):
    """Hidden states, head, targets, reference and old log-distributions."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    targets = torch.randint(0, V, (N,), generator=g)
    ref, old = draw(N, V).log_softmax(-1), draw(N, V).log_softmax(-1)
    return draw(N, D).requires_grad_(), draw(V, D).requires_grad_(), targets, ref, old


def test_statistics_against_the_direct_computation():
    hidden, weight, targets, ref, old = problem()
    T = 0.7
    got = token_stats(hidden, weight, targets, want=EVERYTHING, temperature=T, against={"ref_kl": ref, "old_kl": old})
    p = torch.softmax(hidden @ weight.T / T, -1)
    exact(got["logp"], torch.stack([p[n, t].log() for n, t in enumerate(targets)]))
    exact(got["entropy"], torch.distributions.Categorical(probs=p).entropy())
    exact(got["ref_kl"], (p * (p / ref.exp()).log()).sum(-1))
    exact(got["old_kl"], (old.exp() * (old.exp() / p).log()).sum(-1))


def test_statistics_by_hand():
    # logits log 1, log 3 -> p = 1/4, 3/4; against the fair coin KL(p || c) = 1/4 log 1/2 + 3/4 log 3/2
    hidden, weight = torch.ones(1, 1).double(), torch.tensor([[1.0], [3.0]]).double().log()
    coin = torch.full((1, 2), 0.5).double().log()
    got = token_stats(hidden, weight, torch.tensor([1]), want=EVERYTHING, against={"ref_kl": coin, "old_kl": coin})
    assert got["logp"].item() == pytest.approx(-0.2876820724517809, abs=1e-12)  # log 3/4
    assert got["entropy"].item() == pytest.approx(0.5623351446188083, abs=1e-12)
    assert got["ref_kl"].item() == pytest.approx(0.13081203594113697, abs=1e-12)
    assert got["old_kl"].item() == pytest.approx(0.14384103622589045, abs=1e-12)  # 1/2 log 2 + 1/2 log 2/3


@each("chunk", [1, 3, 10, 11, 12, None])
def test_chunk_size_changes_neither_values_nor_gradients(chunk):
    def run(chunk):
        hidden, weight, targets, ref, old = problem()
        got = token_stats(
            hidden,
            weight,
            targets,
            want=EVERYTHING,
            temperature=1.3,
            chunk=chunk,
            against={"ref_kl": ref, "old_kl": old},
        )
        loss = sum(x @ torch.arange(11).double() * (i + 1) for i, x in enumerate(got.values()))
        return got, torch.autograd.grad(loss, (hidden, weight))

    (a, grads_a), (b, grads_b) = run(chunk), run(11)
    assert a.keys() == b.keys() == EVERYTHING
    for x, y in [*((a[k], b[k]) for k in a), *zip(grads_a, grads_b, strict=True)]:
        exact(x, y)


class Sizes(TorchDispatchMode):
    """The shapes of all tensors that operations return, and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen, self.products = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += "mm" in func.__name__
        self.seen |= {
            tuple(x.shape) for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)
        }
        return out


@pytest.mark.parametrize("restricted", [False, True])
def test_no_more_than_one_chunk_of_logits_ever_exists(restricted):
    hidden, weight, targets, *_ = problem(N=40, V=50, D=3)
    ref = HeadRows(hidden.detach() + 1, weight.detach())
    support = support_of(hidden @ weight.T, sampled(top_k=9)) if restricted else None
    with Sizes() as sizes:
        got = token_stats(
            hidden, weight, targets, want=EVERYTHING - {"old_kl"}, chunk=10, against={"ref_kl": ref}, support=support
        )
        sum(x.sum() for x in got.values()).backward()
    assert max(s[0] for s in sizes.seen if s[1:] == (50,)) == 10
    with Sizes() as sizes:
        token_stats(hidden, weight, targets, want=frozenset({"logp"}), chunk=None)
    assert (40, 50) in sizes.seen  # it does see logits


@pytest.mark.parametrize(
    ("want", "frozen", "counts"),
    [
        (
            {"logp"},
            False,
            (3, 2 + 3 + 3),
        ),  # logits; logits of all chunks but the one that is still there, and two gradients
        ({"logp", "entropy"}, True, (3, 2 + 3)),
        ({"logp"}, True, (3 + 3, 0)),  # logits and what is left to be scaled
    ],
)
def test_no_product_is_computed_that_need_not_be(want, frozen, counts):
    hidden, weight, targets, *_ = problem(N=30)
    with Sizes() as before:
        got = token_stats(hidden, weight.detach() if frozen else weight, targets, want=frozenset(want), chunk=10)
    with Sizes() as after:
        sum(x.sum() for x in got.values()).backward()
    assert (before.products, after.products) == counts


@pytest.mark.parametrize(
    ("want", "frozen", "law", "whole"),
    [
        ({"logp"}, False, {}, True),
        ({"logp", "entropy"}, True, {"temperature": 0.5}, True),
        ({"logp"}, True, {}, False),  # spent in the forward pass as it is
        ({"logp", "ref_kl"}, False, {}, False),
        ({"logp"}, False, {"finish": torch.tanh}, False),  # several times the memory of its logits
        ({"logp"}, False, {"support": True}, False),
        ({"logp"}, False, {"chunk": 10}, False),
    ],
)
def test_all_logits_are_kept_where_that_saves_a_product(want, frozen, law, whole, monkeypatch):
    hidden, weight, targets, *_ = problem(N=40, V=50, D=3)
    monkeypatch.setitem(vocab.BUDGET, "cpu", 10 * 50 * 8)
    against = {"ref_kl": HeadRows(hidden.detach() + 1, weight.detach())}
    head = weight.detach() if frozen else weight
    law = law | {"support": support_of(hidden @ weight.T, sampled(top_k=9))} if "support" in law else law
    found = []
    for keep in (False, True):
        with Sizes() as sizes:
            got = token_stats(hidden, head, targets, want=frozenset(want), keep=keep, against=against, **law)
        with Sizes() as back:
            gradients = torch.autograd.grad(sum(x.sum() for x in got.values()), [hidden, *([] if frozen else [weight])])
        assert ((40, 50) in sizes.seen | back.seen) == (keep and whole)
        if keep and whole:
            assert back.products == (1 if frozen else 2), "gradients alone"
        found.append([*got.values(), *gradients])
    for a, b in zip(*found, strict=True):
        exact(a.detach(), b.detach())
    with torch.no_grad(), Sizes() as sizes:
        token_stats(hidden, head, targets, want=frozenset(want), keep=True, against=against, **law)
    assert (40, 50) not in sizes.seen, "what is only read is read in chunks"


def test_nothing_of_the_size_of_logits_is_saved_by_autograd():
    hidden, weight, targets, *_ = problem(N=40, V=50, D=3)
    held = []

    def note(x):
        held.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        token_stats(hidden, weight, targets, want=frozenset({"logp", "entropy"}), chunk=10)
    assert (50, 3) in held
    assert not [s for s in held if s[-1] == 50]


def test_distributions_may_be_computed_a_chunk_at_a_time():
    hidden, weight, targets, ref, _ = problem()
    asked = []

    def rows(at):
        asked.append((at.start, at.stop))
        return ref[at]

    want = frozenset({"ref_kl"})
    lazy = token_stats(hidden, weight, targets, want=want, chunk=4, against={"ref_kl": rows})["ref_kl"]
    assert asked == [(0, 4), (4, 8), (8, 11)]
    exact(lazy, token_stats(hidden, weight, targets, want=want, against={"ref_kl": ref})["ref_kl"])


def test_no_gradient_reaches_the_other_distribution():
    hidden, weight, targets, *_ = problem()
    other_hidden, other_weight, *_ = problem(seed=5)
    rows = HeadRows(other_hidden, other_weight)
    out = token_stats(hidden, weight, targets, want=frozenset({"ref_kl"}), against={"ref_kl": rows})["ref_kl"].sum()
    grads = torch.autograd.grad(out, (other_hidden, other_weight), allow_unused=True)
    assert grads == (None, None)


@pytest.mark.parametrize("chunk", [4096, 4])
def test_no_positions_give_empty_results_that_depend_on_the_head(chunk):
    hidden, weight, targets, ref, old = problem(N=0)
    got = token_stats(hidden, weight, targets, want=EVERYTHING, chunk=chunk, against={"ref_kl": ref, "old_kl": old})
    assert all(x.shape == (0,) for x in got.values())
    grads = torch.autograd.grad(sum(x.sum() for x in got.values()), (hidden, weight))
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_statistics_can_be_differentiated_twice():
    hidden, weight, targets, ref, old = problem(N=3, V=4, D=2)

    def f(h, w):
        return tuple(token_stats(h, w, targets, want=EVERYTHING, against={"ref_kl": ref, "old_kl": old}).values())

    assert torch.autograd.gradgradcheck(f, (hidden, weight))


def test_fisher_vector_product_through_the_decoder(make_decoder, make_batch, rows):
    decoder, batch = make_decoder(), make_batch(rows[:2])
    params = list(decoder.parameters())
    lines = lay_out(batch.inputs, batch.real)

    def kl_gradient(old, create_graph=False):
        hidden = lines.gather(hidden_states(decoder, lines), cells(batch.mask))
        args = (hidden, decoder.lm_head.weight, batch.targets[batch.mask])
        kl = token_stats(*args, want=frozenset({"old_kl"}), against={"old_kl": old})["old_kl"].sum()
        return torch.autograd.grad(kl, params, create_graph=create_graph)

    with second_order():
        hidden = lines.gather(hidden_states(decoder, lines), cells(batch.mask))
        old = HeadRows(hidden, decoder.lm_head.weight)(slice(None)).detach()
        g = torch.Generator().manual_seed(3)
        v = [torch.randn(p.shape, dtype=p.dtype, generator=g) for p in params]
        dot = sum((a * b).sum() for a, b in zip(kl_gradient(old, create_graph=True), v, strict=True))
        product = torch.autograd.grad(dot, params)

    eps, sides = 1e-6, []
    for sign in (1, -1):  # central difference of the gradient, with the fused kernel
        with torch.no_grad():
            for p, d in zip(params, v, strict=True):
                p.add_(sign * eps * d)
        sides.append(kl_gradient(old))
        with torch.no_grad():
            for p, d in zip(params, v, strict=True):
                p.sub_(sign * eps * d)
    for hv, up, down in zip(product, *sides, strict=True):
        torch.testing.assert_close(hv, (up - down) / (2 * eps), rtol=1e-5, atol=1e-6)


def test_half_precision_logits_are_widened_before_the_softmax():
    hidden, weight, targets, *_ = problem()
    got = token_stats(hidden.bfloat16(), weight.bfloat16(), targets, want=frozenset({"logp"}))["logp"]
    assert got.dtype == torch.float32
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    torch.testing.assert_close(got, logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    assert at_least_float32(hidden).dtype == torch.float64


@each(
    ("wrong", "match"),
    [
        ({"want": frozenset({"perplexity"})}, "unknown statistics"),
        ({"want": frozenset({"ref_kl"})}, "ref_kl needs"),
        ({"want": frozenset({"old_kl"})}, "old_kl needs"),
        ({"want": frozenset({"ref_kl"}), "against": {"ref_kl": torch.zeros(11, 1)}}, "expected"),
        ({"want": frozenset({"logp"}), "temperature": 0.0}, "positive"),
        ({"want": frozenset({"logp"}), "chunk": 0}, "positive"),
        ({"want": frozenset({"logp"}), "targets": torch.full((11,), 7)}, "targets from 7 to 7 in a vocabulary of 7"),
        ({"want": frozenset({"logp"}), "targets": torch.arange(-1, 10) % 7 - 1}, "targets from -1"),
    ],
)
def test_wrong_arguments_are_refused(wrong, match):
    hidden, weight, targets, *_ = problem()
    targets = wrong.pop("targets", targets)
    with pytest.raises(ValueError, match=match):
        token_stats(hidden, weight, targets, **wrong)


def by_autograd(*args, **kwargs):
    """The same numbers by the path that autograd differentiates."""
    return token_stats(*args, **kwargs, finish=lambda x: x)


MIXTURES = [frozenset(some) for n in (1, 2, 3, 4) for some in combinations(sorted(EVERYTHING), n)]
RESTRICTIONS = [None, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}]


@each("want", MIXTURES, ids=lambda want: "+".join(sorted(want)))
@each("chunk", [4, None])
def test_gradients_of_every_mixture(want, chunk):
    hidden, weight, targets, _, old = problem(N=7, V=6, D=3)
    lazy = HeadRows(hidden.detach() + 0.3, weight.detach().flip(0), 0.8)
    factors = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def f(h, w):
        against = {"ref_kl": lazy, "old_kl": old}
        got = token_stats(h, w, targets, want=want, chunk=chunk, temperature=1.3, against=against)
        return sum(x * c for x, c in zip(got.values(), factors, strict=False))

    assert torch.autograd.gradcheck(f, (hidden, weight))


@each("lazy", [False, True])
@each("restriction", RESTRICTIONS, ids=str)
@each("chunk", [1, 4, 5, None])
def test_the_closed_form_is_what_autograd_gives(restriction, chunk, lazy):
    hidden, weight, targets, ref, old = problem(N=13, V=9)
    support = None if restriction is None else support_of(hidden @ weight.T, sampled(0.7, **restriction))
    if lazy:
        ref = HeadRows(hidden.detach() * 2, weight.detach(), 0.7, support)
        old = HeadRows(hidden.detach() + 1, weight.detach(), 1.0, support)
    # against a distribution that is not restricted it would be infinite
    want = EVERYTHING if restriction is None or lazy else EVERYTHING - {"old_kl"}
    if restriction is not None:  # as is the log-prob of a token that is never drawn
        targets = (hidden @ weight.T).argmax(-1)
    found = []
    for compute in (token_stats, by_autograd):
        got = compute(
            hidden, weight, targets, want=want, temperature=0.7, chunk=chunk, support=support,
            against={"ref_kl": ref, "old_kl": old},
        )  # fmt: skip
        loss = sum(x @ torch.arange(13).double() * (i - 1.5) for i, x in enumerate(got.values()))
        grads = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        again = torch.autograd.grad(loss, (hidden, weight), create_graph=True)
        found.append([*got.values(), *grads, *again])
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        exact(a, b)


@pytest.mark.parametrize("restriction", RESTRICTIONS, ids=str)
def test_chunks_and_restrictions_can_be_differentiated_twice(restriction):
    hidden, weight, _, ref, old = problem(N=3, V=9, D=2)
    targets = (hidden @ weight.T).argmax(-1)
    support = None if restriction is None else support_of(hidden @ weight.T, sampled(0.7, **restriction))
    want = EVERYTHING if restriction is None else EVERYTHING - {"old_kl"}

    def f(h, w):
        against = {"ref_kl": ref, "old_kl": old}
        got = token_stats(h, w, targets, want=want, chunk=2, against=against, support=support, temperature=0.7)
        return tuple(got.values())

    assert torch.autograd.gradcheck(f, (hidden, weight))
    assert torch.autograd.gradgradcheck(f, (hidden, weight))


def test_a_statistic_without_a_gradient_of_its_own_changes_no_other():
    hidden, weight, targets, ref, old = problem()
    got = token_stats(hidden, weight, targets, want=EVERYTHING, chunk=4, against={"ref_kl": ref, "old_kl": old})
    for name, value in got.items():
        alone = by_autograd(hidden, weight, targets, want=frozenset({name}), against={"ref_kl": ref, "old_kl": old})
        for a, b in zip(
            torch.autograd.grad(value.sum(), (hidden, weight), retain_graph=True),
            torch.autograd.grad(alone[name].sum(), (hidden, weight)),
            strict=True,
        ):
            exact(a, b)  # and the logits that were kept are not needed again for the second name


@pytest.mark.parametrize("want", [frozenset({"logp"}), EVERYTHING], ids=["logp", "everything"])
@pytest.mark.parametrize("chunk", [4, None])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(want, chunk):
    hidden, weight, targets, ref, old = problem()
    found = []
    for h, w in ((hidden, weight), (hidden, weight.detach()), (hidden.detach(), weight)):
        got = token_stats(h, w, targets, want=want, chunk=chunk, against={"ref_kl": ref, "old_kl": old})
        loss = sum(x @ torch.arange(11).double() for x in got.values())
        twice = [torch.autograd.grad(loss, [x for x in (h, w) if x.requires_grad], retain_graph=True) for _ in "ab"]
        found.append(twice[0])
        for a, b in zip(*twice, strict=True):
            exact(a, b)
    exact(found[0][0], found[1][0])
    exact(found[0][1], found[2][0])
    assert len(found[1]) == len(found[2]) == 1


def test_without_gradients_nothing_is_kept():
    hidden, weight, targets, *_ = problem()
    with torch.no_grad():
        got = token_stats(hidden, weight, targets, want=frozenset({"logp"}))["logp"]
    assert not got.requires_grad
    exact(got, by_autograd(hidden, weight, targets, want=frozenset({"logp"}))["logp"].detach())
    assert token_stats(hidden, weight, targets, want=frozenset()) == {}


def test_a_vocabulary_of_one_token_is_certain():
    hidden, weight, targets, *_ = problem(V=1)
    one = torch.zeros(11, 1).double()
    got = token_stats(hidden, weight, targets, want=EVERYTHING, chunk=3, against={"ref_kl": one, "old_kl": one})
    assert all(torch.equal(x, torch.zeros(11).double()) for x in got.values())
    assert not any(g.any() for g in torch.autograd.grad(sum(x.sum() for x in got.values()), (hidden, weight)))


def test_huge_logits_do_not_overflow():
    hidden, weight, targets, *_ = problem()
    found = []
    for dtype in (torch.float32, torch.float64):
        h, w = (hidden.detach() * 1e6).to(dtype).requires_grad_(), (weight.detach() * 1e3).to(dtype).requires_grad_()
        ref = HeadRows(h.detach(), w.detach())
        got = token_stats(
            h, w, targets, want=EVERYTHING, chunk=4, against={"ref_kl": ref, "old_kl": ref}, temperature=0.1
        )
        found.append([*got.values(), *torch.autograd.grad(sum(x.sum() for x in got.values()), (h, w))])
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def test_half_precision_gradients_are_summed_over_chunks_in_float32():
    hidden, weight, targets, *_ = problem(N=64, V=20, D=8)
    found = []
    for chunk in (1, None):
        h, w = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
        got = token_stats(h, w, targets, want=frozenset({"logp"}), chunk=chunk)["logp"]
        found.append(torch.autograd.grad(got.sum(), (h, w)))
    for a, b in zip(*found, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b.float()).norm() < 2**-8 * b.float().norm()  # a rounding of each, not one for each chunk


def test_chunks_fit_the_budget_and_are_of_one_size(monkeypatch):
    weight = torch.empty(1000, 1)  # 4 bytes: 4,000 a position
    monkeypatch.setitem(vocab.BUDGET, "cpu", 400_000)
    assert slices(100, "fit", weight) == (slice(0, 100),)
    assert slices(101, "fit", weight) == (slice(0, 51), slice(51, 101))
    assert slices(101, "fit", weight, tables=2) == (slice(0, 34), slice(34, 68), slice(68, 101))
    assert slices(3, "fit", weight, tables=1000) == (slice(0, 1), slice(1, 2), slice(2, 3))
    assert slices(101, None, weight) == (slice(0, 101),)
    assert slices(5, 2, weight) == (slice(0, 2), slice(2, 4), slice(4, 5))
    assert slices(0, "fit", weight) == slices(0, None, weight) == (slice(0, 0),)


def test_a_chunk_of_altered_or_restricted_logits_takes_more_than_its_logits():
    hidden, head, *_ = problem()
    assert vocab.only_logits(HeadRows(hidden, head, 0.5))
    assert not vocab.only_logits(HeadRows(hidden, head, finish=torch.tanh))
    assert not vocab.only_logits(HeadRows(hidden, head, support=support_of(hidden @ head.T, sampled(top_k=3))))


def test_a_gpu_takes_few_chunks_while_they_are_a_small_part_of_its_memory():
    some = partial(vocab.positions_per_chunk, each=1_000, budget=500_000)
    assert some(16_384, memory=0) == 500  # elsewhere the budget alone counts
    assert some(1_200, memory=32_000_000_000) == 500  # three chunks would be smaller than the budget's
    assert some(16_384, memory=32_000_000_000) == 5_462
    assert some(16_384, memory=32_000 * 2_000) == 2_000  # a thirty-second of its memory
    assert some(16_384, memory=32_000) == 500
    assert vocab.positions_per_chunk(5, 10**9, budget=1, memory=1) == 1
