"""Every option of drawing, alone and together: frequencies against the exact distribution, worked token by token."""

import math
from typing import Any

import numpy as np
import torch
from each import each
from torch import Tensor

from hone.engine.draw import BLOCK, draw, philox_uniforms
from hone.engine.params import SampleParams, SamplingTensors

torch.set_num_threads(1)

SIZE = 20_000
READ = (1, 3, 3, 8)
LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 0.3, -math.inf, 1.5, -0.7, 0.9, 2.0, -2.5], dtype=torch.float64)


def params(**settings: Any) -> SampleParams:
    return SampleParams(max_tokens=1, stop_ids=frozenset(), **settings)


def exact(logits: Tensor, p: SampleParams, read: tuple[int, ...] = ()) -> Tensor:
    """float64 [V]: the distribution promised, by comparing every pair of tokens."""
    y = []
    for token, x in enumerate(logits.double().tolist()):
        if token in read:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        y.append(-math.inf if token in p.banned else x + p.bias.get(token, 0.0))
    y = torch.tensor(y, dtype=torch.float64)
    if p.temperature == 0:
        return torch.nn.functional.one_hot(y.argmax(), len(y)).double()
    weight = ((y - y.max()) / p.temperature).exp()
    more = weight[None] > weight[:, None]  # [v, w]: w is more probable than v
    if p.top_k:
        weight = weight * (more.sum(1) < p.top_k)
    weight = weight * ((more * weight).sum(1) < p.top_p * weight.sum())
    weight = weight * (weight >= p.min_p * weight.max())
    return weight / weight.sum()


def chance_of(token: Tensor, p: Tensor) -> float:
    """How often a right sampler is further from its expected counts than this one; 0 for an impossible token."""
    seen = torch.bincount(token, minlength=len(p)).double()
    if seen[p == 0].sum():
        return 0.0
    rare = p * len(token) < 10  # pooled: the approximation needs counts
    expected, seen = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (p * len(token), seen))
    expected, seen = expected[expected > 0], seen[expected > 0]
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi_square / 2)) if len(expected) > 1 else 1.0


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_p": 0.3},
    {"top_p": 0.85},
    {"min_p": 0.3},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"bias": {2: 3.0, 9: -1.0, 6: 5.0}},
    {"banned": frozenset({1, 10})},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.2},
    {"repetition_penalty": 2.0, "temperature": 0.7, "top_k": 6},
    {"bias": {0: 1.0}, "banned": frozenset({3}), "top_p": 0.7},
    {
        "temperature": 1.4, "top_k": 8, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.2,
        "bias": {4: 0.5, 11: 4.0}, "banned": frozenset({7}),
    },
    {"temperature": 0.0, "repetition_penalty": 3.0, "bias": {5: 2.0}, "banned": frozenset({10})},
]  # fmt: skip


@each("settings", OPTIONS, ids=str)
def test_frequencies_are_those_of_the_exact_distribution(settings: dict[str, Any]):
    p = params(**settings)
    knobs = SamplingTensors.of([p] * SIZE, len(LOGITS), "cpu", [READ] * SIZE)
    u = torch.from_numpy(philox_uniforms(11, np.arange(SIZE), 0, 1)[0])
    token, logp, raw = draw(LOGITS.expand(SIZE, -1), u, knobs)
    expected = exact(LOGITS, p, READ)
    assert chance_of(token, expected) > 1e-6
    torch.testing.assert_close(raw, LOGITS.log_softmax(-1)[token], rtol=0, atol=1e-12)
    if p.temperature:
        torch.testing.assert_close(logp, expected.log()[token], rtol=0, atol=1e-12)


@each(
    ("settings", "other"),
    [
        ({}, {"temperature": 1.1}),
        ({"top_k": 4}, {"top_k": 5}),
        ({"top_p": 0.85}, {"top_p": 0.7}),
        ({"min_p": 0.3}, {"min_p": 0.15}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.3}),
        ({"bias": {2: 3.0}}, {"bias": {2: 2.8}}),
        ({"banned": frozenset({1})}, {"banned": frozenset({1, 11})}),
        ({"temperature": 0.8, "top_p": 0.6}, {"top_p": 0.6}),
    ],
)
def test_the_test_notices_another_distribution(settings: dict[str, Any], other: dict[str, Any]):
    knobs = SamplingTensors.of([params(**other)] * SIZE, len(LOGITS), "cpu", [READ] * SIZE)
    token, _, _ = draw(LOGITS.expand(SIZE, -1), torch.from_numpy(philox_uniforms(11, np.arange(SIZE), 0, 1)[0]), knobs)
    assert chance_of(token, exact(LOGITS, params(**settings), READ)) < 1e-6


@each("settings", [{}, {"temperature": 0.7}, {"top_k": 300, "min_p": 0.02}, {"top_p": 0.9}], ids=str)
@each("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_over_several_blocks_of_tokens(settings: dict[str, Any], dtype: torch.dtype):
    vocab, rows = 2 * BLOCK + 77, 8_000
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    knobs = SamplingTensors.of([params(**settings)] * rows, vocab, "cpu")
    token, logp, _ = draw(
        logits.expand(rows, -1), torch.from_numpy(philox_uniforms(5, np.arange(rows), 9, 1)[0]), knobs
    )
    expected = exact(logits, params(**settings))
    assert chance_of(token, expected) > 1e-6
    torch.testing.assert_close(logp.double(), expected.log()[token], rtol=0, atol=2e-6)
    assert chance_of(token, exact(logits, params(temperature=0.9))) < 1e-6


@each("vocab", [12, BLOCK, 5 * BLOCK - 3])
@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_draws_what_it_would_draw_alone(vocab: int, dtype: torch.dtype):
    chance = torch.Generator().manual_seed(vocab)
    settings = [params(**each) for each in OPTIONS] * 3
    logits = (torch.randn(len(settings), vocab, generator=chance) * 3).to(dtype)
    u = torch.rand(len(settings), generator=chance, dtype=torch.float64)
    together = draw(logits, u, SamplingTensors.of(settings, vocab, "cpu", [READ] * len(settings)))
    for row, setting in enumerate(settings):
        alone = draw(logits[row : row + 1], u[row : row + 1], SamplingTensors.of([setting], vocab, "cpu", [READ]))
        for ours, theirs in zip(together, alone, strict=True):
            assert ours[row] == theirs[0]
    halves = [slice(20), slice(20, None)]
    apart = [
        draw(logits[h], u[h], SamplingTensors.of(settings[h], vocab, "cpu", [READ] * len(settings[h]))) for h in halves
    ]
    for ours, first, second in zip(together, *apart, strict=True):
        assert torch.equal(ours, torch.cat([first, second]))
