"""Layers are computed again only where memory asks for it, and then with the same numbers."""

import pytest
import torch
from fast_models import model

from hone.model.backends.fused.fused_linear import fused_layer
from hone.model.layout import SHARE, activation_numbers, exceeds_memory


def test_what_a_layer_keeps_is_what_autograd_saves_for_it():
    decoder = model("llama", torch.float32)
    cos, sin = (t[:11].repeat(4, 1) for t in (decoder.cos, decoder.sin))
    sizes, tokens = list[int](), torch.randint(0, 61, (4, 11))
    seen: set[int] = set()
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        at = x.untyped_storage().data_ptr()
        if at not in seen | weights and x.is_floating_point() and x.ndim > 1 and x.shape[-1] != decoder.config.head_dim:
            sizes.append(x.untyped_storage().nbytes() // 4)
        seen.add(at)
        return x

    x = torch.randn(4, 11, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for layer in decoder.model.layers:
            x = fused_layer((cos, sin), layer, x, None)
    per_token = sum(sizes) / tokens.numel() / 2
    assert 0.5 * activation_numbers(decoder.config) <= per_token <= 1.1 * activation_numbers(decoder.config)


def test_crowded_by_the_tokens_that_fit(monkeypatch: pytest.MonkeyPatch):
    decoder = model("llama", torch.float32)
    each = activation_numbers(decoder.config) * 2 * 4
    assert not exceeds_memory(decoder, 10**12), "a CPU's memory is the user's business"
    monkeypatch.setattr("hone.model.layout._free", lambda device: int(1_000 * each / SHARE))
    assert not exceeds_memory(decoder, 999)
    assert exceeds_memory(decoder, 1_001)


@pytest.mark.gpu
def test_a_gpu_is_asked_what_it_has():
    decoder = model("llama", torch.bfloat16).cuda()
    assert not exceeds_memory(decoder, 1_000)
    assert exceeds_memory(decoder, 10**10)
