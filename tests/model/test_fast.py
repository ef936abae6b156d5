"""Fast layers compute what plain layers compute, values and gradients, in every layout, with and without adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import written_by
from fast_models import MODELS, both_ways, fed, gradients, model

from hone.model.backends.fused import elementwise
from hone.model.backends.fused.fused_linear import (
    Rotation,
    added_product,
    gated_product,
    normed_product,
    rotate_in_place,
    rotated_product,
)
from hone.model.backends.registry import second_order
from hone.model.kernels.fused_weights import Product, make_adjacent


@pytest.mark.parametrize("name", MODELS)
def test_fast_layers_are_plain_layers_to_the_last_digits(name: str):
    found = both_ways(model(name))
    assert found["same"]
    assert found["apart"] < 1e-12


@pytest.mark.parametrize("name", ["llama", "adapters"])
def test_weights_side_by_side_or_apart_give_the_same(name: str):
    decoder = model(name)
    apart = gradients(decoder, "padded", backends=("fused",))
    for layer in decoder.model.layers:
        mlp: Any = layer.mlp
        make_adjacent([getattr(p, "base", p).weight for p in (mlp.gate_proj, mlp.up_proj)])
    together = gradients(decoder, "padded", backends=("fused",))
    assert all(torch.allclose(together[n], x, rtol=0, atol=1e-12 * x.abs().max().item()) for n, x in apart.items())


def test_checkpointed_layers_give_the_same_bits():
    decoder = model("every option")
    once, again = (gradients(decoder, "shared", backends=("fused",), checkpoint=c) for c in (False, True))
    assert all(torch.equal(once[n], x) for n, x in again.items())


def test_frozen_weights_get_no_gradient_and_cost_none():
    decoder = model("llama").requires_grad_(False)
    decoder.model.layers[0].self_attn.k_proj.weight.requires_grad_(True)  # pyright: ignore
    found = gradients(decoder, "padded", backends=("fused",))
    assert found.keys() == {"", "model.layers.0.self_attn.k_proj.weight"}


def test_a_gradient_can_be_differentiated_again_where_it_is_asked_for():
    decoder = model("llama")
    decoder.backends = ("fused",)
    tokens = torch.arange(8)[None]
    weight = decoder.model.norm.weight
    with second_order():
        (first,) = torch.autograd.grad(decoder(tokens).pow(3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weight)
    assert second.abs().max() > 0
    first_layer: Any = decoder.model.layers[0]
    gain = first_layer.input_layernorm.weight
    (grad,) = torch.autograd.grad(decoder(tokens).pow(3).sum(), gain, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_each_product_passes_gradcheck(rows: int):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, n).double() for n in (3, 2)]
    down, two = Product.of(torch.nn.Linear(3, 4).double()), Product.of(*layers)
    x, gain, a, both = leaf(rows, 4), leaf(4), leaf(rows, 3), leaf(rows, 6)
    check = torch.autograd.gradcheck
    assert check(lambda x, g, *_: normed_product(x, g, 1e-5, two), (x, gain, *two.tensors()))
    assert check(lambda a, x, *_: added_product(a, x * 1, down), (a, x, *down.tensors()))
    assert check(lambda b, x, *_: gated_product(b, x * 1, down), (both, x, *down.tensors()))
    heads, cos, sin = leaf(rows, 3, 4), *(torch.randn(2, rows, 4, dtype=torch.float64).unbind())
    cos, sin = (torch.cat([t[:, :2], t[:, :2]], -1) for t in (cos, sin))
    assert check(lambda x: rotate_in_place(x * 1, cos, sin), (heads,))
    qkv, rotation = Product.of(*(torch.nn.Linear(4, n).double() for n in (8, 4, 4))), Rotation(cos, sin, 2, 1, 4)
    assert check(lambda x, g, *_: rotated_product(x, g, 1e-5, qkv, rotation), (x, gain, *qkv.tensors()))


def test_in_half_precision_fast_layers_are_nearer_to_the_truth():
    exact = gradients(model("llama"), "padded", backends=())
    half = model("llama").to(torch.bfloat16)

    def error(fast: bool) -> float:
        found = gradients(half, "padded", backends=("fused",) if fast else ())
        return sum(((found[n].double() - x).norm() / x.norm()).item() for n, x in exact.items())

    assert error(True) < error(False)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All models in one process of their own."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = tmp_path_factory.mktemp("fast") / "found.json"
    written_by(Path(__file__).with_name("fast_cases.py"), path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_compute_what_torch_computes(interpreted: dict[str, Any], name: str):
    assert interpreted[name]["same"]
    assert interpreted[name]["apart"] < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_fast_layers_are_as_near_to_the_truth_as_plain_ones(name: str, dtype: torch.dtype):
    exact = gradients(model(name), "padded", backends=())
    decoder = model(name, dtype).cuda()

    def error(fast: bool) -> float:
        decoder.zero_grad()
        decoder.backends = ("fused",) if fast else ()
        tokens = torch.randint(0, 61, (4, 11), generator=torch.Generator().manual_seed(1)).cuda()
        hidden = decoder(tokens)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).cuda()
        (hidden * weights.to(dtype)).sum().backward()
        found = {"": hidden, **{n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}}
        return sum(((found[n].double().cpu() - x).norm() / x.norm()).item() for n, x in exact.items())

    assert error(True) < 1.1 * error(False) + 1e-6


def test_empty_lists_are_no_trouble():
    x = torch.zeros(0, 8)
    assert elementwise.gate(x).shape == (0, 4)
    assert elementwise.gate_grad(x, torch.zeros(0, 4)).shape == (0, 8)
    dx, dgain = elementwise.norm_grad(x, torch.ones(8), 1e-5, x)
    assert dx.shape == (0, 8)
    assert not dgain.any()


def test_what_a_hook_keeps_of_a_layer_stays_as_it_was():
    decoder, given = model("llama"), fed("shared")
    decoder.backends = ("fused",)
    tokens, kept = given.pop("tokens"), list[tuple[torch.Tensor, torch.Tensor]]()

    def keep(_: Any, __: Any, out: torch.Tensor) -> None:
        kept.append((out, out.clone()))

    for layer in decoder.model.layers:
        layer.register_forward_hook(keep)
    with torch.no_grad():
        decoder(tokens, **given)
    assert len(kept) == 2
    assert all(torch.equal(out, copy) for out, copy in kept)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_layers_without_gradients_compute_under_autocast():
    decoder, given = model("llama", torch.float32), fed("shared")
    decoder.backends = ("fused",)
    tokens = given.pop("tokens")
    with torch.no_grad():
        plain = decoder(tokens, **given)
        with torch.autocast("cpu", torch.bfloat16):
            half = decoder(tokens, **given)
    assert (plain - half).norm() < 0.05 * plain.norm()
