"""Log-probs under top-k, top-p and min-p are those of the tokens that the sampler draws."""

from typing import Any

import pytest
import torch
from each import each
from torch import Tensor
from vocab_cases import support_of

from hone.engine.draw import draw
from hone.engine.params import SampleParams, SamplingTensors
from hone.model.vocab import distribution
from hone.model.vocab.distribution import ROW_OF, TABLE_ROWS, Chunk, ComparedLogits
from hone.model.vocab.token_stats import token_stats

torch.set_num_threads(1)
LOGP = frozenset({"logp"})
SETTINGS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 10_000},
    {},
]


def params(temperature: float, **settings: Any) -> SampleParams:
    return SampleParams(max_tokens=1, stop_ids=frozenset(), temperature=temperature, **settings)


def log_probs(logits: Tensor, targets: Tensor, restrict: SampleParams) -> Tensor:
    """Of the targets, with the logits as hidden states and a head that is the identity."""
    head = torch.eye(logits.shape[1], dtype=logits.dtype)
    return token_stats(
        logits, head, targets, want=LOGP, temperature=restrict.temperature, chunk=7,
        support=support_of(logits, restrict),
    )["logp"]  # fmt: skip


def tied(rows: int, vocab: int) -> Tensor:
    """Many logits are equal."""
    g = torch.Generator().manual_seed(vocab)
    return torch.randint(-6, 7, (rows, vocab), generator=g).double() / 2


@each("temperature", [1.0, 0.6])
@each("setting", SETTINGS, ids=str)
def test_the_learner_gives_the_sampler_s_log_prob_of_each_token_drawn(setting: dict[str, Any], temperature: float):
    g = torch.Generator().manual_seed(0)
    restrict = params(temperature, **setting)
    for logits in (3 * torch.randn(40, 50, dtype=torch.float64, generator=g), tied(40, 50)):
        u = torch.rand(40, dtype=torch.float64, generator=g)
        token, logp, _ = draw(logits, u, SamplingTensors.of([restrict] * 40, 50, "cpu"))
        torch.testing.assert_close(log_probs(logits, token, restrict), logp, rtol=0, atol=1e-12)


@each("setting", SETTINGS, ids=str)
def test_log_probs_of_all_tokens_are_the_distribution_drawn_from(setting: dict[str, Any]):
    restrict, vocab, steps = params(0.8, **setting), 30, 3000
    logits = tied(1, vocab)
    p = log_probs(logits.expand(vocab, -1), torch.arange(vocab), restrict).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    u = (torch.arange(steps).double() + 0.5) / steps  # evenly, so that a token comes up p times of all
    token, *_ = draw(logits.expand(steps, -1), u, SamplingTensors.of([restrict] * steps, vocab, "cpu"))
    share = torch.bincount(token, minlength=vocab) / steps
    torch.testing.assert_close(share.double(), p, rtol=0, atol=1.01 / steps)
    assert not share[p == 0].any()
    assert (p == 0).any() == bool(setting and setting.get("top_k") != 10_000)


def test_a_large_vocabulary_and_half_precision():
    g = torch.Generator().manual_seed(2)
    hidden, head = (4 * torch.randn(9, 16, generator=g)).bfloat16(), torch.randn(5000, 16, generator=g).bfloat16()
    restrict = params(1.0, top_p=0.7, top_k=300)
    token, logp, _ = draw(hidden @ head.T, torch.rand(9, generator=g), SamplingTensors.of([restrict] * 9, 5000, "cpu"))
    got = token_stats(hidden, head, token, want=LOGP, support=support_of(hidden @ head.T, restrict))["logp"]
    torch.testing.assert_close(got, logp, rtol=0, atol=2e-6)


def test_a_token_that_is_never_drawn_has_no_gradient_and_spoils_none():
    hidden = torch.tensor([[3.0, 2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    head, want = torch.eye(3).double(), frozenset({"logp", "entropy"})
    got = token_stats(hidden, head, torch.tensor([2]), want=want, support=support_of(hidden, params(1.0, top_k=2)))
    assert got["logp"].item() == -torch.inf
    (grad,) = torch.autograd.grad(got["logp"].exp() + got["entropy"], hidden)  # the ratio of such a token is 0
    q = torch.tensor([3.0, 2.0]).double().softmax(-1)
    assert got["entropy"].item() == pytest.approx(-(q * q.log()).sum().item(), abs=1e-12)
    slope = -q * (q.log() + got["entropy"].detach())
    torch.testing.assert_close(grad, torch.cat([slope, torch.zeros(1).double()])[None], rtol=0, atol=1e-12)


@pytest.mark.parametrize("twice", [False, True])
def test_the_log_prob_of_a_token_that_is_cut_moves_those_that_are_kept(twice: bool):
    # -inf stays -inf, whatever the token's logit: only the sum over the two others moves
    hidden = torch.tensor([[3.0, 2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    want = frozenset({"logp", "entropy"})
    support = support_of(hidden, params(1.0, top_k=2))
    got = token_stats(hidden, torch.eye(3).double(), torch.tensor([2]), want=want, support=support)
    (grad,) = torch.autograd.grad(got["logp"].sum(), hidden, create_graph=twice)
    q = torch.tensor([3.0, 2.0]).double().softmax(-1)
    torch.testing.assert_close(grad.detach(), torch.cat([-q, torch.zeros(1).double()])[None], rtol=0, atol=1e-12)


def test_banned_tokens_are_as_if_they_were_not_there():
    g = torch.Generator().manual_seed(3)
    x, r, o = (torch.randn(6, 8, dtype=torch.float64, generator=g) for _ in range(3))
    targets, upstream = (
        torch.randint(0, 8, (6,), generator=g),
        dict.fromkeys(distribution.STATS, torch.ones(6).double()),
    )

    def numbers(x: Tensor, r: Tensor, o: Tensor, given: bool) -> tuple[Tensor, Tensor]:
        others = {name: ComparedLogits(logits=y, is_log_prob=given) for name, y in (("ref_kl", r), ("old_kl", o))}
        table = torch.zeros(len(TABLE_ROWS), 6, dtype=torch.float64)
        chunk = Chunk(logits=x.clone(), targets=targets, table=table, want=distribution.STATS, others=others)
        distribution.stats(chunk)
        distribution.grad(chunk, upstream)
        return table[[ROW_OF[name] for name in sorted(distribution.STATS)]], chunk.logits

    banned = torch.full((6, 3), -torch.inf, dtype=torch.float64)
    for given in (False, True):
        plain = [y.log_softmax(-1) if given else y for y in (r, o)]
        want = numbers(x, *plain, given)
        got = numbers(*(torch.cat([y, banned], 1) for y in (x, *plain)), given)
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(got[1], torch.cat([want[1], torch.zeros_like(banned)], 1), rtol=0, atol=1e-12)
