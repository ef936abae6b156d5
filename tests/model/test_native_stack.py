"""All layers as one function in C++ compute what plain layers compute, values and gradients, in any bundles."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fast_models import fed, functions, gradients
from torch import Tensor

from hone.model.backends.native import stack as stacked
from hone.model.backends.native.calls import Segments
from hone.model.backends.native.stack import Bundles, Workspace, stackable
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.kernels.cpp.library import library
from hone.model.lora import add_lora
from hone.model.policy import Policy
from hone.model.rows import Rows
from hone.train import optim
from hone.train.learner import BUNDLED, CACHE, Learner
from hone.types import Batch

COLUMNS = {"inputs": torch.int64, "targets": torch.int64, "mask": torch.bool, "real": torch.bool}
pytestmark = pytest.mark.skipif(isinstance(library(), str), reason="there is no C++ compiler")


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=[0, 10**9], autouse=True, ids=["by words", "by tokens"])
def often(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whether the first layer is needed once a word."""
    monkeypatch.setattr(stacked, "OFTEN", request.param)
    return request.param


def small(dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    """Of whole vectors: three heads of queries for each of keys."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    config = DecoderConfig(
        vocab_size=61, num_hidden_layers=3, head_dim=16, max_position_embeddings=64, initializer_range=0.2,
        **(sizes | changes),
    )  # fmt: skip
    decoder = Decoder(config).to(dtype)
    with torch.no_grad():
        for n, p in decoder.named_parameters():
            if "norm" in n:
                p.add_(torch.randn_like(p), alpha=0.3)
    return decoder


def passed(decoder: Decoder, layout: str, *, native: bool) -> dict[str, Tensor]:
    return gradients(decoder, layout, backends=("native",) if native else ())


@pytest.mark.parametrize("together", [1, 160])
@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_values_and_gradients_are_those_of_plain_layers(layout: str, together: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stacked, "TOGETHER", together)
    same_as_plain(layout)


def same_as_plain(layout: str) -> None:
    decoder = small()
    found, expected = passed(decoder, layout, native=True), passed(decoder, layout, native=False)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name] - x).abs().max() < 1e-12 * x.abs().max(), name
    again = passed(decoder, layout, native=True)
    assert all(torch.equal(again[n], x) for n, x in found.items()), "the same bits each time"


def test_in_single_precision_only_rounding_differs():
    decoder = small(torch.float32)
    found = passed(decoder, "shared", native=True)
    exact = passed(decoder.double(), "shared", native=False)
    assert all((found[n] - x).abs().max() < 1e-5 * x.abs().max() for n, x in exact.items())


def test_only_what_is_asked_for_is_answered():
    decoder, given = small(), fed("shared")
    needed = torch.zeros(28, dtype=torch.bool)
    needed[[6, 9, 12, 27]] = True  # of the third row nothing
    weights = torch.randn(28, 64, dtype=torch.float64) * needed[:, None]

    def found(native: bool, needed: Tensor | None) -> list[Tensor]:
        decoder.backends = ("native",) if native else ()
        rows = replace(given["mask"], needed=needed)
        hidden = decoder(given["tokens"], positions=given["positions"], mask=rows)[0]
        return [hidden * weights, *torch.autograd.grad((hidden * weights).sum(), list(decoder.model.parameters()))]

    for x, y in zip(found(True, needed), found(False, None), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-11)


def test_it_is_taken_for_small_plain_models_alone(monkeypatch: pytest.MonkeyPatch):
    tokens = fed("padded")["tokens"]
    assert "_StackBackward" in functions(small(torch.float32)(tokens))
    assert stackable(small(), torch.float64)
    assert not stackable(small(hidden_size=42), torch.float64), "no whole vectors"
    assert not stackable(small(qkv_bias=True), torch.float64)
    adapted, hooked = small(), small()
    add_lora(adapted, rank=2, alpha=2.0, targets=("q_proj",))
    assert not stackable(adapted, torch.float64)
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert not stackable(hooked, torch.float64)
    recomputed = small(torch.float32)(tokens, checkpoint_layers=True)
    assert "_StackBackward" not in functions(recomputed)
    monkeypatch.setattr(stacked, "SMALL", 1000)
    assert not stackable(small(), torch.float64)


def test_a_small_model_reads_more_tokens_at_once_than_others():
    read = Batch(**{name: torch.ones(600, 64, dtype=kind) for name, kind in COLUMNS.items()}, group=torch.arange(600))

    def rows(decoder: Decoder, rows: int = 600) -> int:
        policy = Policy(decoder)
        learner = Learner(policy=policy, optimizer=optim.adamw(policy.actor_parameters(), lr=1.0), micro_rows=rows)
        return learner.rows_of(read)

    assert (rows(small(torch.float32)), rows(small(torch.float32), 100)) == (BUNDLED // 64, 100)
    assert rows(small(torch.float32, hidden_size=42)) == CACHE // 64
    assert rows(small(torch.float32, qk_norm=True)) == CACHE // 64
    assert rows(small()) == CACHE // 64, "a run's layers are in C++ in float32 alone"


def test_words_are_asked_once_and_give_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    decoder = small(torch.float32)
    found = list[dict[str, Tensor]]()
    for times in (0, 10**9):
        monkeypatch.setattr(stacked, "OFTEN", times)
        found.append(passed(decoder, "shared", native=True))
    by_words, by_tokens = found
    assert torch.equal(by_words[""], by_tokens[""])
    others = [n for n, x in by_words.items() if not torch.equal(x, by_tokens[n])]
    assert "model.embed_tokens.weight" in others  # sums over words are taken in another order
    assert all("layers.1" not in n and "layers.2" not in n for n in others)


def test_embeddings_that_are_more_than_a_table_are_given_as_they_are():
    decoder, tokens = small(torch.float32), torch.zeros(1, 500, dtype=torch.int64)
    embedding = decoder.model.embed_tokens
    assert stacked.repeats_tokens(embedding, tokens) == (stacked.OFTEN == 0)
    handle = embedding.register_forward_hook(lambda module, given, out: out + 1.0)
    assert not stacked.repeats_tokens(embedding, tokens)
    handle.remove()
    handle = embedding.register_full_backward_hook(lambda module, given, out: None)
    assert not stacked.repeats_tokens(embedding, tokens)
    handle.remove()
    for odd in ({"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 1.0}):
        assert not stacked.repeats_tokens(torch.nn.Embedding(61, 64, **odd), tokens)
    assert not stacked.repeats_tokens(torch.nn.Sequential(embedding), tokens)


def test_a_word_that_does_not_occur_harms_nobody():
    decoder, given = small(torch.float32), fed("shared")
    missing = next(v for v in range(61) if v not in given["tokens"])
    with torch.no_grad():
        decoder.model.embed_tokens.weight[missing] = torch.nan
    decoder.backends = ("native",)
    decoder(**given).sum().backward()
    for name, p in decoder.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), name


def test_tokens_of_any_whole_kind():
    decoder, given = small(torch.float32), fed("shared")
    decoder.backends = ("native",)
    with torch.no_grad():
        expected = decoder(**given)
        assert torch.equal(decoder(**(given | {"tokens": given["tokens"].int()})), expected)


def test_weights_that_do_not_lie_in_one_piece():
    decoder, given = small(torch.float32), fed("shared")
    decoder.backends = ("native",)
    with torch.no_grad():
        expected = decoder(**given)
        for layer in decoder.model.layers:
            for x in (layer.self_attn.o_proj, layer.mlp.down_proj):  # pyright: ignore
                x.weight.data = x.weight.data.t().contiguous().t()
        assert torch.allclose(decoder(**given), expected, atol=1e-4)


def test_frozen_weights_get_no_gradient():
    decoder = small()
    decoder.backends = ("native",)
    decoder.model.layers[1].requires_grad_(False)
    decoder.model.embed_tokens.requires_grad_(False)
    decoder(fed("padded")["tokens"]).sum().backward()
    frozen = {n for n, p in decoder.named_parameters() if p.grad is None}
    assert all(n.startswith(("model.layers.1", "model.embed_tokens", "lm_head")) for n in frozen)
    assert sum(n.startswith("model.layers.1") for n in frozen) == 9


def test_a_weight_that_changed_before_the_gradient_is_refused():
    decoder = small()
    decoder.backends = ("native",)
    hidden = decoder(fed("padded")["tokens"])
    with torch.no_grad():
        next(decoder.model.layers.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_memory_is_taken_over_only_when_nobody_reads_it():
    decoder, tokens = small(), fed("padded")["tokens"]
    decoder.backends = ("native",)
    wanted = list(decoder.model.layers.parameters())
    hidden = decoder(tokens)
    expected = torch.autograd.grad(hidden.sum(), wanted, retain_graph=True)
    other = decoder(tokens.flip(1))
    torch.autograd.grad(other.sum(), wanted)
    del other
    decoder(tokens.flip(0))
    for x, y in zip(torch.autograd.grad(hidden.sum(), wanted), expected, strict=True):
        assert torch.equal(x, y)


def test_the_next_room_of_about_that_size_is_the_last_one():
    first = Workspace(1000, torch.float32)
    place = first.place.value
    second = Workspace(1000, torch.float32)
    assert second.place.value != place
    del first
    assert Workspace(1100, torch.float32).place.value == place
    assert Workspace(100, torch.float32).place.value != place, "a small one does not take a large piece"


def test_bundles_number_tokens_anew_and_share_them_evenly():
    # groups of 3 tokens, of 5 and 3 that begin with 2 of the 5, and of 12: the first two are half of all
    rows = np.array([[0, 3, 0, 0, 0], [3, 5, 3, 0, 0], [20, 3, 3, 2, 0], [8, 12, 8, 0, 0]])
    segments = Segments(rows, np.array([0, 1, 3, 4]))
    found = Bundles.of(segments, segments, 1)
    assert found is not None
    assert found.row.tolist() == [[0, 3, 0, 0, 0], [3, 5, 3, 0, 0], [8, 3, 3, 2, 0], [0, 12, 0, 0, 0]]
    assert found.rows.tolist() == [0, 3, 4]
    assert found.first.tolist() == [0, 12, 24]
    assert found.count.tolist() == [11, 12]
    assert found.order.tolist() == [*range(8), 20, 21, 22, 0, *range(8, 20)]
    even = Bundles.of(Segments.lines(6, 10), Segments.lines(6, 10), 3)
    assert even is not None
    assert even.share.tolist() == [0, 2, 4, 6]
    assert Bundles.of(Segments.lines(1, 999), Segments.lines(1, 999), 2) is None, "the other thread would wait"
    assert Bundles.of(Segments.lines(1, 10), Segments.lines(1, 10), 2) is not None, "not long enough to matter"


@pytest.mark.parametrize("seed", range(5))
def test_two_threads_share_as_evenly_as_whole_rows_can_be(seed):
    count = np.random.default_rng(seed).integers(16, 189, 24)
    own = np.concatenate([[0], np.cumsum(count)[:-1]])
    rows = np.stack([own, count, own, np.zeros_like(own), np.zeros_like(own)], 1)
    segments = Segments(rows, np.arange(25))
    found = Bundles.of(segments, segments, 2)
    assert found is not None
    first, second = (found.count[a:b].sum() for a, b in zip(found.share[:-1], found.share[1:], strict=True))
    assert first + second == count.sum()
    assert abs(first - second) == np.abs(2 * own - count.sum()).min()


def test_rows_of_the_mask_are_what_bundles_are_made_of():
    mask = fed("shared")["mask"]
    assert isinstance(mask, Rows)
    segments = Segments.of(mask.spans)
    found = Bundles.of(segments, segments, 2)
    assert found is not None
    assert found.rows.tolist() == [0, 2, 4], "two groups, two threads"
    held = [range(a, a + n) for a, n in zip(found.first[:-1].tolist(), found.count.tolist(), strict=True)]
    assert sorted(found.order[t] for span in held for t in span) == list(range(28))
