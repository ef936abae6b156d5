"""Attention by kernels of our own: the numbers and gradients of rows in tables, the same bits each time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from apart import written_by
from each import each
from fast_models import model
from row_cases import CASES, DEVICES, ROWS, batch_of, differences, inputs, rows_of, with_gradients
from torch import Tensor

from hone.model.backends.fused import shared_attention
from hone.model.backends.fused.shared_attention import SharedAttention
from hone.model.backends.registry import second_order
from hone.model.decoder import Decoder
from hone.model.layout import cells, has_row_kernels, hidden_states, lay_out_shared, lines_of
from hone.model.rows import Rows, Tables, Tiles
from hone.types import Batch


def test_the_kernels_give_what_tables_give(tmp_path: Path):
    pytest.importorskip("triton", reason="Triton is not installed")
    found = json.loads(
        written_by(Path(__file__).with_name("shared_attention_cases.py"), tmp_path / "found.json").read_text()
    )
    assert len(found) == len(CASES)
    assert {case: apart for case, apart in found.items() if not apart < 2e-6} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_they_give_what_tables_give(case: dict, size: int, dtype: torch.dtype):
    assert differences(**case | {"size": size}, dtype=dtype, device="cuda") < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_on_a_gpu_every_bit_is_the_same_again(size: int):
    rows, group, common = [513, 300, 64] * 40, [n // 6 for n in range(120)], 63
    batch = batch_of(rows, group, common, "cuda")
    decoder = model("llama", torch.bfloat16).cuda()
    mask = lines_of(batch, decoder, layout="shared").mask
    assert isinstance(mask, Rows)
    assert isinstance(mask.by, Tiles)
    given = [x.detach().cuda().bfloat16().requires_grad_() for x in inputs(int(mask.spans.start[-1]), size)]
    first = with_gradients(mask, given)
    busy = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(side):  # programs begin in another order beside other work
            busy @ busy
        assert all(torch.equal(a, b) for a, b in zip(first, with_gradients(mask, given), strict=True))


@each("name", ROWS)
@each("window", [0, 3])
def test_where_kernels_will_not_do_rows_are_put_into_one_table(name: str, window: int):
    plain, tiled = (replace(rows, window=window) for rows in rows_of(name))
    assert isinstance(plain.by, Tables)
    given = inputs(len(plain.by.owner))
    with second_order():
        found = [second(rows, given) for rows in (plain, tiled)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def second(rows: Rows, given: list[Tensor]) -> list[Tensor]:
    """Answers, gradients, and the gradients of those."""
    out = rows.attend(*given, shares_keys=True)
    first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
    return [out, *first, *torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), given)]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "every option", "normed heads", "adapters with biases"])
def test_a_decoder_gives_what_it_gives_by_tables(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch):
    batch, other = (batch_of(*ROWS["many rows"][:2], common, "cuda") for common in (20, 19))
    decoder = model(name, torch.bfloat16).cuda()
    decoder.backends = ("fused", "graphs") if graphs else ("fused",)
    found = computed(decoder, batch, Tiles)
    computed(decoder, other, Tiles)
    again = computed(decoder, batch, Tiles)
    assert {n for n in found if not torch.equal(found[n], again[n])} == set()
    monkeypatch.setattr(SharedAttention, "covers", lambda *_: "switched off")
    decoder.backends = ("fused",)
    plain = computed(decoder, batch, Tables)
    assert all(distance(plain[n], x) < 0.05 for n, x in found.items())


def computed(decoder: Decoder, batch: Batch, by: type) -> dict[str, Tensor]:
    """Hidden states and all gradients."""
    decoder.zero_grad()
    laid = lines_of(batch, decoder, layout="shared")
    assert isinstance(laid.mask, Rows)
    assert isinstance(laid.mask.by, by)
    hidden = laid.gather(hidden_states(decoder, laid), cells(batch.mask))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (hidden * weights.to(hidden)).sum().backward()
    grads = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    return {"": hidden.detach().clone(), **grads}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm())


@each(
    ("device", "dtype", "size", "usable"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.float16, 128, True),
        ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 80, False),
        ("cuda", torch.bfloat16, 8, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_what_there_are_kernels_for(device: str, dtype: torch.dtype, size: int, usable: bool):
    assert (SharedAttention().covers(torch.device(device), dtype, size) is None) == usable


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_with_heads_of_another_size_goes_by_tables(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SharedAttention, "covers", lambda *_: "switched off")
    decoder = model("llama", torch.bfloat16).to(device)
    batch = batch_of(*ROWS["a group"], device)
    found = [computed(decoder, batch, Tables) for _ in range(5)]  # none is recorded: a table's shapes change
    assert all(distance(found[0][n], x) < 0.02 for later in found[1:] for n, x in later.items())


def test_nothing_is_asked_of_an_empty_list():
    pytest.importorskip("triton", reason="Triton is not installed")
    spans, tiles = rows_of("a group")[1].spans, rows_of("a group")[1].by
    assert isinstance(tiles, Tiles)
    x = torch.zeros(0, 6, 16, requires_grad=True)
    out = shared_attention.attend(*x.split([2, 2, 2], 1), spans, tiles)
    assert out.shape == (0, 2, 16)
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("strides", [(0, 16, 1), (33, 16, 1), (32, 1, 2), (16, 8, 1)])
def test_what_the_kernels_cannot_read_as_it_lies_is_copied(strides: tuple[int, int, int]):
    x = (
        torch.randn(4, 2, 16).as_strided((3, 2, 16), strides)
        if strides[0] < 33
        else torch.randn(200).as_strided((3, 2, 16), strides)
    )
    found = shared_attention._kernel_layout(x)
    assert found.stride() == (32, 16, 1)
    assert torch.equal(found, x)


def test_where_weights_are_not_what_is_computed_in_kernels_are_asked_for_the_latter(monkeypatch: pytest.MonkeyPatch):
    """Spread over ranks, weights stay in float32 and a layer is put together in half precision."""
    asked = list[torch.dtype]()
    monkeypatch.setattr(SharedAttention, "covers", lambda _, device, dtype, size: asked.append(dtype) or "no")
    decoder = model("llama", torch.float32)
    has_row_kernels(decoder, torch.device("cuda"))
    decoder.compute_dtype = torch.bfloat16
    has_row_kernels(decoder, torch.device("cuda"))
    assert asked == [torch.float32, torch.bfloat16]
    with second_order():
        assert not has_row_kernels(decoder, torch.device("cuda"))
    assert len(asked) == 2


def test_tiles_are_not_for_layers_in_c():
    batch = batch_of(*ROWS["rows of several tiles"])
    decoder = model("llama", torch.float32)
    decoder.config = replace(decoder.config, max_position_embeddings=256)
    laid = lay_out_shared(batch.inputs, batch.real, batch.group, kernels=True)
    plain = lay_out_shared(batch.inputs, batch.real, batch.group)
    found, truth = (hidden_states(decoder, lines)[0] for lines in (laid, plain))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)
