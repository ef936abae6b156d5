"""Small decoders, and how far fast layers are from plain ones on them."""

from typing import Any

import torch

from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.layout import lay_out_shared
from hone.model.lora import add_lora, lora_parameters
from hone.model.rows import Rows

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "every option": {"qkv_bias": True, "qk_norm": True, "o_bias": True, "mlp_bias": True, "windows": (0, 6)},
    "normed heads": {"qk_norm": True},
    "adapters": {},
    "adapters with biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
}


def model(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2, **MODELS[name],
    )  # fmt: skip
    decoder = Decoder(config).to(dtype)
    if name.startswith("adapters"):
        add_lora(decoder, rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
        with torch.no_grad():
            for p in lora_parameters(decoder):
                p.normal_(std=0.3)
    with torch.no_grad():
        for n, p in decoder.named_parameters():
            if n.endswith("bias") or "norm" in n:
                p.add_(torch.randn_like(p), alpha=0.3)
    return decoder


def fed(layout: str) -> dict[str, Any]:
    """Tokens as a table of rows, or as one list whose rows begin alike."""
    tokens = torch.randint(0, 61, (4, 11), generator=torch.Generator().manual_seed(1))
    if layout == "padded":
        return {"tokens": tokens}
    tokens[1, :5], tokens[3, :5] = tokens[0, :5], tokens[2, :5]
    real = torch.arange(11) < torch.tensor([11, 9, 7, 11])[:, None]
    lines = lay_out_shared(tokens, real, torch.tensor([0, 0, 1, 1]))
    assert isinstance(lines.mask, Rows)
    return {"tokens": lines.tokens, "positions": lines.positions, "mask": lines.mask}


def gradients(
    decoder: Decoder, layout: str, *, backends: tuple[str, ...], checkpoint: bool = False
) -> dict[str, torch.Tensor]:
    """Hidden states, by "", and the gradients of a weighted sum of them."""
    decoder.zero_grad()
    decoder.backends = backends
    given = fed(layout)
    hidden = decoder(given.pop("tokens"), checkpoint_layers=checkpoint, **given)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (hidden * weights.to(hidden.dtype)).sum().backward()
    found = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    return {"": hidden.detach(), **found}


def both_ways(decoder: Decoder) -> dict[str, Any]:
    """The greatest distance, relative to the largest number of its tensor; and whether the same have a gradient."""
    apart, same = 0.0, True
    for layout in ("padded", "shared"):
        fast, plain = (gradients(decoder, layout, backends=way) for way in (("fused",), ()))
        same = same and fast.keys() == plain.keys()
        apart = max([apart, *(((fast[n] - x).abs().max() / x.abs().max()).item() for n, x in plain.items())])
    return {"apart": apart, "same": same}


def functions(x: torch.Tensor) -> set[str]:
    """The names of all that its gradient goes through."""
    found, todo = set[str](), [x.grad_fn]
    while todo:
        if (node := todo.pop()) is not None:
            found.add(type(node).__name__)
            todo += [other for other, _ in node.next_functions]
    return found
