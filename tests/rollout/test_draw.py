"""Drawing: exact supports by hand, frequencies against the exact distribution, and numbers at the edges."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from torch import Tensor

from hone.engine.draw import draw, threshold, uniforms
from hone.engine.params import SampleParams, SamplingTensors

torch.set_num_threads(1)

# 0.4 and 0.2 + 0.2 make the edges of top-p and min-p easy to work out
P = torch.tensor([0.05, 0.4, 0.15, 0.2, 0.0, 0.2], dtype=torch.float64)
LOGITS = P.log()


def params(**settings: Any) -> SampleParams:
    return SampleParams(max_tokens=1, stop_ids=frozenset(), **settings)


def drawn(logits: Tensor, u: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Token and logp of rows that share their settings."""
    return draw(logits, u, SamplingTensors.of([params(**settings)] * len(logits), logits.shape[-1], "cpu"))[:2]


def kept(p: Tensor = P, **settings: Any) -> Tensor:
    """bool [V]: the support that top-k, top-p and min-p leave."""
    z = (p / p.max()).log()[None]
    return (p > 0) & (z >= threshold(z, z.exp(), SamplingTensors.of([params(**settings)], len(p), "cpu")))[0]


@each(
    ("settings", "support"),
    [
        ({}, {0, 1, 2, 3, 5}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3, 5}),  # 3 and 5 tie for the second place
        ({"top_k": 3}, {1, 3, 5}),
        ({"top_k": 100}, {0, 1, 2, 3, 5}),
        ({"top_p": 1e-300}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3, 5}),  # 0.4 does not reach it, 0.6 does; 3 and 5 tie
        ({"top_p": 0.79}, {1, 3, 5}),
        ({"top_p": 0.81}, {1, 2, 3, 5}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.49}, {1, 3, 5}),  # 0.49 * 0.4 = 0.196
        ({"min_p": 0.51}, {1}),
        ({"top_k": 2, "top_p": 0.49}, {1}),  # of {0.4, 0.2, 0.2} / 0.8 the first has 0.5
        ({"top_k": 2, "top_p": 0.51}, {1, 3, 5}),
        ({"top_p": 0.81, "min_p": 0.4}, {1, 3, 5}),
    ],
)
def test_support_by_hand(settings: dict[str, Any], support: set[int]):
    assert set(kept(**settings).nonzero().squeeze(1).tolist()) == support


def exact(**settings: Any) -> Tensor:
    """The distribution draw() promises, worked in probabilities instead of logits."""
    tempered = P ** (1 / settings.get("temperature", 1.0))
    tempered = tempered / tempered.sum()
    support = kept(tempered, **settings)
    return torch.where(support, tempered, 0.0) / tempered[support].sum()


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.2},
    {"top_k": 2},  # two tie for the second place
    {"top_p": 0.41},  # and for the last of the nucleus
]


@each("settings", SETTINGS)
def test_frequencies_match_the_exact_distribution(settings: dict[str, Any]):
    size = 20_000
    u = uniforms(7, range(size), 1)[0]
    token, logp = drawn(LOGITS.expand(size, -1), u, **settings)
    p = exact(**settings)
    expected, seen = p * size, torch.bincount(token, minlength=len(P)).double()
    assert seen[p == 0].sum() == 0
    live = p > 0
    chi_square = ((seen - expected)[live] ** 2 / expected[live]).sum().item()
    assert chi_square < 23.5  # with at most 4 degrees of freedom, a right sampler exceeds this once in 10,000
    torch.testing.assert_close(logp, p.log()[token], rtol=0, atol=1e-12)


@each("settings", [*SETTINGS, {"temperature": 0.0}])
@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_edge_value_draws_a_token_of_zero_probability(settings: dict[str, Any], dtype: torch.dtype):
    last, first = torch.tensor([-math.inf, 0.0, 1.0, -math.inf]), torch.tensor([0.0, -math.inf, -math.inf, -1.0])
    edges = torch.tensor([0.0, 5e-324, 0.5, 1 - 2**-53, 1.0], dtype=torch.float64)
    for logits in (last.to(dtype), first.to(dtype)):
        token, logp = drawn(logits.expand(len(edges), -1), edges, **settings)
        assert logits[token].isfinite().all()
        assert logp.isfinite().all()


def test_u_walks_through_the_tokens_in_order():
    cdf = P.cumsum(0)
    u = torch.tensor([0.0, 0.049, 0.051, 0.449, 0.451, 0.599, 0.601, 0.799, 0.801, 0.999], dtype=torch.float64)
    token, _ = drawn(LOGITS.expand(len(u), -1), u)
    assert token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 5, 5]
    assert token.tolist() == [int((cdf <= x).sum()) for x in u]


def test_large_vocabulary_reaches_its_last_token():
    u = torch.tensor([1 - 2**-53, 1.0], dtype=torch.float64)
    token, logp = drawn(torch.zeros(2, 150_001), u)
    assert token.tolist() == [150_000, 150_000]
    torch.testing.assert_close(logp, torch.full((2,), -math.log(150_001)))


def test_greedy_is_the_most_probable_token_with_its_untempered_logp():
    token, logp = drawn(LOGITS[None], torch.tensor([0.99]), temperature=0.0, top_k=1)
    assert token.tolist() == [1]
    assert logp.item() == pytest.approx(math.log(0.4), abs=1e-12)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_tiny_temperature_tends_to_greedy(temperature: float):
    token, logp = drawn(torch.tensor([[1.0, 9.0, 8.0]]), torch.tensor([0.999]), temperature=temperature)
    assert token.tolist() == [1]
    assert logp.item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_a_logp_that_is_not_finite(bad: float, temperature: float):
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
    token, logp = drawn(logits, torch.tensor([0.5, 0.5]), temperature=temperature)
    assert logp.isfinite().tolist() == [False, True]
    assert token.max() < 3


def test_stream_belongs_to_seed_and_request():
    table = uniforms(3, [5, 9, 2**40], 6)
    assert table.shape == (6, 3)
    assert ((table >= 0) & (table < 1)).all()
    for column, request in enumerate([5, 9, 2**40]):
        alone = np.random.Generator(np.random.Philox(key=np.array([3, request], dtype=np.uint64))).random(4)
        assert table[:4, column].tolist() == alone.tolist()
    assert len(set(torch.cat([table, uniforms(4, [5, 9, 2**40], 6)]).flatten().tolist())) == 36
