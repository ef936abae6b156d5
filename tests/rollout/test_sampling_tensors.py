"""Settings row by row: seated, moved and gathered in place, hostile values, and what is refused by name."""

import math
import re
from typing import Any

import pytest
import torch
from each import each
from torch import Tensor

from hone.engine.draw import BLOCK, draw, process, top_logprobs
from hone.engine.params import SampleParams, SamplingTensors, Uses, check_params
from hone.errors import HoneError

torch.set_num_threads(1)

EDGES = torch.tensor([0.0, 5e-324, 0.5, 1 - 2**-53, 1.0], dtype=torch.float64)


def params(**settings: Any) -> SampleParams:
    return SampleParams(max_tokens=1, stop_ids=frozenset(), **settings)


def drawn(logits: Tensor, u: Tensor, read: tuple[int, ...] = (), **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    return draw(
        logits, u, SamplingTensors.of([params(**settings)] * len(logits), logits.shape[-1], "cpu", [read] * len(logits))
    )


def same(a: SamplingTensors, b: SamplingTensors) -> bool:
    tables = ((a.table, b.table), (torch.from_numpy(a.host), torch.from_numpy(b.host)))
    return all(torch.equal(x, y) for x, y in tables) and a.uses.tolist() == b.uses.tolist()


LIST = [
    params(temperature=0.5, top_k=3),
    params(temperature=0.0, bias={2: 1.0}),
    params(repetition_penalty=2.0, banned=frozenset({0})),
    params(top_p=0.5),
]


def test_rows_seated_one_by_one_are_rows_made_together():
    made = SamplingTensors.of(LIST, 6, "cpu", [(1, 2)] * 4)
    seated = SamplingTensors.plain(4, 6, "cpu")
    assert seated.bias is None
    assert seated.seen is None
    assert seated.any == Uses.SAMPLED
    for row in (2, 0, 3, 1):
        seated.seat(row, LIST[row], (1, 2))
    assert same(made, seated)
    assert made.bias is not None
    assert seated.bias is not None
    assert torch.equal(made.bias, seated.bias)
    assert made.bias[1].tolist() == [0, 0, 1, 0, 0, 0]
    assert made.bias[2].tolist() == [-math.inf, 0, 0, 0, 0, 0]
    assert made.seen is not None
    assert made.seen.tolist() == [[False] * 6, [False] * 6, [False, True, True, False, False, False], [False] * 6]


def test_a_row_seated_again_keeps_nothing():
    knobs = SamplingTensors.of(LIST, 6, "cpu", [(1,)] * 4)
    for row in range(4):
        knobs.seat(row, params())
    assert knobs.any == Uses.SAMPLED
    assert same(knobs, SamplingTensors.plain(4, 6, "cpu"))
    assert knobs.bias is not None
    assert not knobs.bias.any()
    assert knobs.seen is not None
    assert not knobs.seen.any()


def test_rows_move_and_are_gathered_with_all_they_have():
    knobs = SamplingTensors.of(LIST, 6, "cpu", [(1,)] * 4)
    picked = knobs.rows(torch.tensor([2, 1]))
    knobs.move(2, 0)
    assert same(knobs.head(2), picked)
    for ours, theirs in ((knobs.bias, picked.bias), (knobs.seen, picked.seen)):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours[:2], theirs)
    picked.seat(0, params())
    assert knobs.uses[0] == Uses.of(LIST[2])  # a gathered row is a copy


def test_what_the_first_rows_write_is_seen_by_all():
    knobs = SamplingTensors.of([params(repetition_penalty=2.0)] * 3, 4, "cpu", [(0,)] * 3)
    knobs.head(2).add_written(torch.tensor([3, 1]))
    assert knobs.seen is not None
    assert knobs.seen.int().tolist() == [[1, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]]


def test_penalty_bias_and_banned_by_hand():
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0, 2.0]])
    knobs = SamplingTensors.of(
        [params(repetition_penalty=4.0, bias={0: 1.0, 3: -1.5}, banned=frozenset({4}))], 5, "cpu", [(0, 1)]
    )
    # 2 / 4 + 1, -2 * 4, 0, 1 - 1.5, banned
    assert process(logits, knobs).tolist() == [[1.5, -8.0, 0.0, -0.5, -math.inf]]
    assert logits.tolist() == [[2.0, -2.0, 0.0, 1.0, 2.0]]
    token, logp, raw = draw(logits, torch.tensor([0.0]), knobs)
    assert token.item() == 0
    assert logp.item() == pytest.approx(1.5 - math.log(math.exp(1.5) + math.exp(-8) + 1 + math.exp(-0.5)), abs=1e-6)
    assert raw.item() == pytest.approx(logits.log_softmax(-1)[0, 0].item(), abs=1e-6)


@each("vocab", [5, BLOCK + 5, 3 * BLOCK])
@each("settings", [{}, {"temperature": 1.8}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}], ids=str)
def test_the_one_token_not_banned_is_written_at_every_u(vocab: int, settings: dict[str, Any]):
    for only in (0, vocab // 2, vocab - 1):
        banned = frozenset(range(vocab)) - {only}
        token, logp, raw = drawn(torch.randn(len(EDGES), vocab), EDGES, banned=banned, **settings)
        assert token.tolist() == [only] * len(EDGES)
        assert logp.tolist() == [0.0] * len(EDGES)
        assert (raw < 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_no_u_draws_what_has_no_probability_in_a_large_vocabulary(dtype: torch.dtype):
    logits = torch.full((len(EDGES), 4 * BLOCK), -math.inf, dtype=dtype)
    logits[:, BLOCK + 3], logits[:, 3 * BLOCK - 1] = 1.0, 0.5
    for settings in ({}, {"temperature": 0.7}, {"top_p": 0.999}, {"top_k": 40}):
        token, logp, raw = drawn(logits, EDGES, **settings)
        assert token.tolist() == [BLOCK + 3] * 3 + [3 * BLOCK - 1] * 2
        assert logp.isfinite().all()
        assert raw.isfinite().all()


@each("vocab", [5, 2 * BLOCK + 1])
@each("bad", [math.nan, math.inf, -math.inf])
@each(
    "settings",
    [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"bias": {1: 1.0}},
     {"repetition_penalty": 2.0}, {"banned": frozenset({1})}],
    ids=str,
)  # fmt: skip
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(vocab: int, bad: float, settings: dict[str, Any]):
    logits = torch.randn(3, vocab)
    fine = drawn(logits, torch.tensor([0.3] * 3), (0, 1), **settings)
    logits[1] = -math.inf
    logits[1, 1] = bad  # -inf: no token is left
    token, logp, raw = drawn(logits, torch.tensor([0.3] * 3), (0, 1), **settings)
    assert logp.isfinite().tolist() == [True, False, True]
    assert raw.isfinite().tolist() == [True, False, True]
    assert 0 <= token[1] < vocab
    assert (token[0], token[2]) == (fine[0][0], fine[0][2])


@each(
    "settings",
    [{"temperature": 1e-300}, {"temperature": 1e300}, {"repetition_penalty": 1e300}, {"repetition_penalty": 1e-300},
     {"bias": {1: 1e300}}, {"bias": {1: -1e300}}, {"top_k": 10**12}, {"top_p": 1e-300}, {"top_p": 1 - 1e-16},
     {"min_p": 1e-300}],
    ids=str,
)  # fmt: skip
@each("dtype", [torch.float32, torch.float64])
def test_extreme_settings_stay_finite(settings: dict[str, Any], dtype: torch.dtype):
    logits = torch.tensor([[0.0, 3.0, -2.0, -math.inf]] * len(EDGES), dtype=dtype)
    token, logp, raw = drawn(logits, EDGES, (0, 1), **settings)
    assert logp.isfinite().all()
    assert raw.isfinite().all()
    assert (token != 3).all()


@each("settings", [{"top_p": 0.9}, {"top_k": 50, "top_p": 0.6}, {"top_p": 0.999, "min_p": 0.001}])
@each("scale", [0.5, 3.0, 8.0])  # nearly flat, or nearly all on one token
def test_the_support_in_a_large_vocabulary_is_the_sorted_one(settings: dict[str, Any], scale: float):
    logits = torch.randn(2, 6000, generator=torch.Generator().manual_seed(1)) * scale
    least = drawn(logits, torch.tensor([0.0, 0.0]), **settings)  # any token: what counts is the mass that is left
    for row in range(2):
        p = logits[row].double().softmax(-1).sort(descending=True).values
        p = p[: settings["top_k"]] if "top_k" in settings else p
        p = p / p.sum()
        p = p[p.cumsum(0) - p < settings["top_p"]]
        p = p[p >= settings.get("min_p", 0) * p[0]]
        kept = (logits[row].double().softmax(-1) / logits[row].double().softmax(-1).max()).log()
        mass = kept[kept >= (p[-1] / p[0]).log() - 1e-6].exp().sum()
        token = least[0][row]
        assert least[1][row].item() == pytest.approx((kept[token] - mass.log()).item(), abs=1e-5)


def test_top_logprobs_are_the_best_of_log_softmax():
    logits = torch.randn(3, 50).bfloat16()
    token, logp = top_logprobs(logits, 4)
    whole = logits.float().log_softmax(-1)
    torch.testing.assert_close(logp, whole.sort(descending=True).values[:, :4])
    torch.testing.assert_close(whole.gather(-1, token), logp)
    assert top_logprobs(logits[:, :2], 5)[0].shape == (3, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bias": {3: 0.0, 8: 1.0}}, "biased token 8 is outside the model's vocabulary of 8"),
        ({"banned": frozenset({9})}, "banned token 9 is outside"),
        ({"stop_ids": frozenset({2, 8})}, "stop id 8 is outside"),
        ({"banned": frozenset(range(8))}, "all 8 tokens are banned: leave at least one"),
    ],
)
def test_tokens_the_model_does_not_have_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(HoneError, match=re.escape(words)):
        check_params(SampleParams(**{"max_tokens": 1, "stop_ids": frozenset(), **settings}), 8)
    check_params(SampleParams(max_tokens=1, stop_ids=frozenset({7}), bias={7: 1.0}, banned=frozenset({7})), 8)


def test_working_memory_fits_whatever_comes_next():
    knobs = SamplingTensors.plain(4, 9, "cpu")
    for rows, dtype in ((2, torch.float32), (4, torch.float64), (3, torch.bfloat16), (4, torch.float32)):
        logits = torch.randn(rows, 9).to(dtype)
        with torch.inference_mode(rows == 3):
            token, logp, _ = draw(logits, torch.rand(rows, dtype=torch.float64), knobs.head(rows))
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        torch.testing.assert_close(logp, logits.to(kind).log_softmax(-1).gather(-1, token[:, None]).squeeze(-1))
