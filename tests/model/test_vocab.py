"""Vocabulary chunks: however the positions are cut, values and gradients are those of the formulas."""

import pytest
import torch

from hone.model.forward import hidden_states, lay_out, plain_attention, wide
from hone.model.vocab import HeadRows, token_stats

torch.set_num_threads(1)
EVERYTHING = frozenset({"logp", "entropy", "ref_kl", "old_kl"})


def exact(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("chunk", [1, 3, 10, 11, 12, None])
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


def test_no_more_than_one_chunk_of_logits_is_held():
    hidden, weight, targets, *_ = problem(N=40, V=50, D=3)
    held = []

    def note(x):
        held.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        token_stats(hidden, weight, targets, want=frozenset({"logp", "entropy"}), chunk=10)
        assert not [s for s in held if s and s[-1] == 50]
        token_stats(hidden, weight, targets, want=frozenset({"logp", "entropy"}), chunk=40, finish=lambda x: x)
        assert (40, 50) in held  # the hook does see logits when they are kept


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
        hidden = lines.gather(hidden_states(decoder, lines), batch.mask)
        args = (hidden, decoder.lm_head.weight, batch.targets[batch.mask])
        kl = token_stats(*args, want=frozenset({"old_kl"}), against={"old_kl": old})["old_kl"].sum()
        return torch.autograd.grad(kl, params, create_graph=create_graph)

    with plain_attention():
        hidden = lines.gather(hidden_states(decoder, lines), batch.mask)
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
    assert wide(hidden).dtype == torch.float64


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"want": frozenset({"perplexity"})}, "unknown statistics"),
        ({"want": frozenset({"ref_kl"})}, "ref_kl needs"),
        ({"want": frozenset({"old_kl"})}, "old_kl needs"),
        ({"want": frozenset({"ref_kl"}), "against": {"ref_kl": torch.zeros(11, 1)}}, "expected"),
        ({"want": frozenset({"logp"}), "temperature": 0.0}, "positive"),
        ({"want": frozenset({"logp"}), "chunk": 0}, "positive"),
    ],
)
def test_wrong_arguments_are_refused(wrong, match):
    hidden, weight, targets, *_ = problem()
    with pytest.raises(ValueError, match=match):
        token_stats(hidden, weight, targets, **wrong)
