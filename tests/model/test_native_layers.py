"""Layers in C++ compute what plain layers compute, values and gradients, to the last digits of float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fast_models import fed, functions, gradients, model
from torch import Tensor

from hone.model.backends.native import calls, stack
from hone.model.backends.native.backend import NativeLayerBackend
from hone.model.backends.native.calls import Segments
from hone.model.backends.registry import second_order
from hone.model.decoder import Pass
from hone.model.kernels.cpp.library import library
from hone.model.rows import Rows, Spans

pytestmark = pytest.mark.skipif(isinstance(library(), str), reason="there is no C++ compiler")
COVERED = ("llama", "adapters", "adapters with biases")


@pytest.fixture(autouse=True)
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is taken as a whole, however wide vectors are."""
    monkeypatch.setattr(stack, "SMALL", 0)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The greatest distance, relative to the largest number of its tensor."""
    assert found.keys() == expected.keys()
    return max(((found[n] - x).abs().max() / x.abs().max()).item() for n, x in expected.items())


def passed(name: str, layout: str, *, native: bool, **how: bool) -> dict[str, Tensor]:
    return gradients(model(name), layout, backends=("native",) if native else (), **how)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("name", COVERED)
def test_values_and_gradients_are_those_of_plain_layers(name: str, layout: str, threads: int):
    same_as_plain_and_recomputed(name, layout, threads)


def same_as_plain_and_recomputed(name: str, layout: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = passed(name, layout, native=True)
        again = passed(name, layout, native=True, checkpoint=True)
    finally:
        torch.set_num_threads(before)
    assert apart(found, passed(name, layout, native=False)) < 1e-12
    assert all(torch.equal(again[n], x) for n, x in found.items()), "recomputed, the same bits"


def taken(name: str, layout: str = "padded", *, dtype: torch.dtype = torch.float32, asked: bool = False) -> bool:
    decoder, given = model(name, dtype), fed(layout)
    x = decoder.model.embed_tokens(given["tokens"])
    decoder.backends = ("native",) if asked else None
    return (
        NativeLayerBackend().covers(decoder, Pass(x=x, cos=decoder.cos, sin=decoder.sin, mask=given.get("mask")))
        is None
    )


def test_what_is_not_covered_goes_another_way(monkeypatch: pytest.MonkeyPatch):
    assert taken("llama")
    assert taken("adapters")
    assert taken("llama", dtype=torch.float64, asked=True)
    assert not taken("llama", dtype=torch.float64), "a run in float64 is for checking"
    assert not taken("llama", dtype=torch.bfloat16, asked=True)
    assert not taken("every option"), "norms of queries and keys, windows"
    monkeypatch.setenv("HONE_NATIVE", "0")
    assert not taken("llama")


def test_a_run_uses_them_unless_it_is_told_not_to():
    decoder, tokens = model("llama", torch.float32), fed("padded")["tokens"]
    assert "_LayerBackward" in functions(decoder(tokens))
    with second_order():
        assert "_LayerBackward" not in functions(decoder(tokens))
    decoder.backends = ()
    assert "_LayerBackward" not in functions(decoder(tokens))


def test_rows_that_share_a_prompt_are_of_one_group():
    mask = fed("shared")["mask"]
    assert isinstance(mask, Rows)
    found = Segments.of(mask.spans)
    # own, count, shared, common, skip: rows of 11, 9, 7 and 11 tokens, five of which are the row's before it
    assert found.rows.tolist() == [[0, 11, 0, 0, 0], [11, 4, 0, 5, 0], [15, 7, 15, 0, 0], [22, 6, 15, 5, 0]]
    assert found.groups.tolist() == [0, 2, 4]


def test_the_last_layer_computes_only_what_is_needed():
    mask = fed("shared")["mask"]
    assert isinstance(mask, Rows)
    needed = torch.zeros(28, dtype=torch.bool)
    needed[[6, 9, 12, 27]] = True  # of the third row nothing
    found = Segments.of(mask.spans).from_first_needed(needed)
    assert found.rows[:, 4].tolist() == [6, 1, 7, 5]
    assert found.tokens().tolist() == [6, 7, 8, 9, 10, 12, 13, 14, 27]
    decoder, given = model("adapters"), fed("shared")
    decoder.backends = ("native",)
    weights = torch.randn(28, 40, dtype=torch.float64) * needed[:, None]

    def gradient(needed: Tensor | None) -> list[Tensor]:
        rows = replace(mask, needed=needed)
        hidden = decoder(given["tokens"], positions=given["positions"], mask=rows)[0]
        wanted = [p for p in decoder.parameters() if p.requires_grad]
        return [
            hidden[needed if needed is not None else slice(0)],
            *torch.autograd.grad((hidden * weights).sum(), wanted),
        ]

    everything, some = gradient(None)[1:], gradient(needed)[1:]
    assert all(torch.allclose(x, y, rtol=0, atol=1e-12) for x, y in zip(everything, some, strict=True))
    whole = decoder(given["tokens"], positions=given["positions"], mask=mask)[0, needed]
    assert torch.allclose(gradient(needed)[0], whole, rtol=0, atol=1e-13)


def test_a_row_all_of_whose_tokens_are_anothers_asks_nothing():
    start, prefix, common = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3], [0, 0], [0, 2]))
    found = Segments.of(Spans(start=start, prefix=prefix, common=common))
    assert found.rows.tolist() == [[0, 3, 0, 0, 0], [3, 0, 0, 2, 0]]
    assert found.groups.tolist() == [0, 2]


@pytest.mark.parametrize("size", [1, 4, 5, 16, 24])
def test_attention_by_hand(size: int):
    """Rows of three and one tokens, the second after two of the first's; heads of any size."""
    torch.manual_seed(0)
    H, K, U = 4, 2, 4
    qkv = torch.randn(U, (H + 2 * K) * size, dtype=torch.float64, requires_grad=True)
    segments = Segments(np.array([[0, 3, 0, 0, 0], [3, 1, 0, 2, 0]]), np.array([0, 2]))
    q, k, v = qkv.view(U, -1, size).split([H, K, K], 1)
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    out = []
    for t, seen in enumerate([[0], [0, 1], [0, 1, 2], [0, 1, 3]]):
        weights = (torch.einsum("he,khe->hk", q[t], k[seen]) / size**0.5).softmax(-1)
        out.append(torch.einsum("hk,khe->he", weights, v[seen]).flatten())
    expected = torch.stack(out)
    given = torch.randn_like(expected)
    (slope,) = torch.autograd.grad(expected, qkv, given)
    shape = segments.shape(H, K, size)
    found, log = calls.attend(shape, qkv.detach())
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    assert torch.allclose(calls.attend_grad(shape, qkv.detach(), found, log, given), slope, rtol=0, atol=1e-14)


def test_large_scores_do_not_overflow():
    qkv = torch.full((3, 3 * 16), 300.0)
    found, _ = calls.attend(Segments.lines(1, 3).shape(1, 1, 16), qkv)
    assert torch.equal(found, torch.full((3, 16), 300.0))
    both = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert torch.allclose(calls.gate(both), torch.tensor([[0.0, 200.0]]))
    dx, _ = calls.gate_grad(both, torch.ones(1, 2))
    assert torch.allclose(dx, torch.tensor([[0.0, 1.0, 0.0, 200.0]]))


def test_in_single_precision_only_rounding_differs():
    decoder = model("llama", torch.float32)
    found = gradients(decoder, "shared", backends=("native",))
    exact = gradients(decoder.double(), "shared", backends=())
    assert apart({n: x.double() for n, x in found.items()}, exact) < 1e-5
