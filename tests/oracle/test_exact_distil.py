"""On-policy distillation by enumeration: the gradient is that of the exact sum over the vocabulary, full or lumped."""

import itertools
from dataclasses import replace

import tiny
import torch
from each import each
from torch import Tensor
from world import close, wave

from hone.algo import distil, objective
from hone.data.collate import collate
from hone.model.policy import Policy
from hone.model.teacher import TopKTeacher, bucket_rest
from hone.train.update import weigh
from hone.types import Batch

torch.set_num_threads(1)
V = 6


def exact(logits: Tensor, other: Tensor, k: int) -> Tensor:
    """sum of q log(q / r) over the k likeliest of q and one bucket for the rest, written out; k = V: over all."""
    q, r = logits.softmax(-1), other.softmax(-1)
    rows = list[Tensor]()
    for qs, rs in zip(q, r, strict=True):
        top = sorted(range(len(qs)), key=lambda i, qs=qs: -qs[i].item())[:k]
        rest = [i for i in range(len(qs)) if i not in top]
        kl = sum((qs[i] * (qs[i] / rs[i]).log() for i in top), torch.zeros(()).double())
        if rest:
            kl = kl + qs[rest].sum() * (qs[rest].sum() / rs[rest].sum()).log()
        rows.append(kl)
    return torch.stack(rows)


@each("k", range(1, V + 1))
def test_the_lumped_kl_and_its_gradient_are_those_of_the_exact_sum(k: int) -> None:
    logits, other = (2 * wave(9, V, shift=1.0)).requires_grad_(), 2 * wave(9, V, shift=2.0)
    rows = bucket_rest(logits.log_softmax(-1).__getitem__, other.log_softmax(-1).__getitem__, k)(slice(None))
    close(rows.exp().sum(-1), torch.ones(9).double())  # a distribution
    logq = logits.log_softmax(-1)
    found = (logq.exp() * (logq - rows)).sum(-1)
    expected = exact(logits, other, k)
    close(found, expected, atol=1e-12)
    weights = wave(9, shift=3.0)
    close(*(torch.autograd.grad((x * weights).sum(), logits)[0] for x in (found, expected)), atol=1e-12)


def test_it_stays_a_divergence_and_grows_with_k() -> None:
    logits, other = 3 * wave(50, V, shift=4.0), 3 * wave(50, V, shift=5.0)
    by_k = torch.stack([exact(logits, other, k) for k in range(1, V + 1)])
    assert (by_k >= 0).all()
    assert (by_k[1:] >= by_k[:-1] - 1e-12).all()  # a finer partition tells more apart
    close(by_k[-2], by_k[-1])  # a bucket of one token is that token
    own = bucket_rest(logits.log_softmax(-1).__getitem__, logits.log_softmax(-1).__getitem__, 2)(slice(None))
    close(own, logits.log_softmax(-1))


def test_tails_that_underflow_are_numbers() -> None:
    logits = torch.tensor([[0.0, -200.0, -300.0, -400.0]]).float()
    other = torch.tensor([[-400.0, 0.0, -1.0, -900.0]]).float()
    for k in (1, 2, 3):
        rows = bucket_rest(logits.log_softmax(-1).__getitem__, other.log_softmax(-1).__getitem__, k)(slice(None))
        assert rows.isfinite().all()


# --- the whole way: from tokens to the gradient of every parameter ---


def logits_of(policy: Policy, batch: Batch) -> Tensor:
    """[N, V] at the trained tokens, by the decoder alone."""
    hidden = policy.decoder(batch.inputs)
    return policy.decoder.logits(hidden)[batch.mask] / policy.temperature


def enumerated(policy: Policy) -> Batch:
    """Every text of two tokens after every prompt of one: no expectation is left to chance."""
    rows = tiny.random_rows(1)
    texts = itertools.product(range(3), range(tiny.VOCAB), range(tiny.VOCAB))
    made = [replace(rows[0], tokens=list(t), mask=[False, True, True], gen_logp=[0.0] * 3, text="") for t in texts]
    return collate([[r] for r in made], dtype=torch.float64)


@each("top_k", [0, 1, 4, tiny.VOCAB])
@each("layout", ["padded", "packed"])
def test_every_parameters_gradient_is_that_of_the_exact_sum(top_k: int, layout: str) -> None:
    algo = distil(top_k=top_k)
    policy = Policy(tiny.decoder(1, width=8, dtype=torch.float64), temperature=0.7, layout=layout, chunk=97)
    teacher = Policy(tiny.decoder(2, width=12, dtype=torch.float64), temperature=0.7).requires_grad_(False)
    policy.reference = TopKTeacher(teacher, top_k) if top_k else teacher
    batch = weigh(enumerated(policy), algo)
    loss = objective(policy(batch, algo.wants), batch, algo.loss)
    parameters = policy.actor_parameters()
    found = torch.autograd.grad(loss, parameters)
    expected = exact(logits_of(policy, batch), logits_of(teacher, batch), top_k or tiny.VOCAB).mean()
    close(loss.detach(), expected.detach(), atol=1e-12)
    for a, b in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        close(a, b, atol=1e-12)
    assert any(g.abs().max() > 1e-4 for g in found)


def test_one_sample_less_of_it_is_the_estimate_the_exact_sum_improves_on() -> None:
    """E over the student's own token of log(q / r) is the exact KL: the loss is its mean, without the noise."""
    policy = Policy(tiny.decoder(1, width=8, dtype=torch.float64))
    teacher = Policy(tiny.decoder(2, width=8, dtype=torch.float64))
    policy.reference = teacher
    batch = enumerated(policy)
    with torch.no_grad():
        fwd = policy(batch, frozenset({"logp", "ref_kl"}))
        ref = teacher(batch, frozenset({"logp"})).logp
    first = torch.zeros_like(batch.mask)
    first[:, 0] = True
    log_ratio = torch.where(first, fwd.logp.exp() * (fwd.logp - ref), 0.0).sum(-1)
    by_prompt = log_ratio.view(3, tiny.VOCAB, tiny.VOCAB)[:, :, 0].sum(-1)
    close(by_prompt, fwd.ref_kl[:, 0].view(3, -1)[:, 0], atol=1e-12)
