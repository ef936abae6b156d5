"""Weights side by side in memory are the same parameters: what reads, saves, copies or trains them notices nothing."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder, Layer
from hone.model.formats.folder import load_decoder
from hone.model.formats.save import save_decoder
from hone.model.kernels.fused_weights import as_view, base_linear, gate_up, make_adjacent, qkv
from hone.model.lora import add_lora, plain_state
from hone.storage.files import load_tensors, save_tensors

torch.set_num_threads(1)
TOKENS = torch.arange(8)[None]


def build(seed: int = 0) -> Decoder:
    config = DecoderConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, qkv_bias=True, mlp_bias=True, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder = Decoder(config)
        for p in decoder.parameters():
            if p.ndim == 1:
                nn.init.normal_(p)
    return decoder


def layers(decoder: Decoder) -> list[Layer]:
    return [layer for layer in decoder.model.layers if isinstance(layer, Layer)]


def fuse(decoder: Decoder) -> list[tuple[Tensor, Tensor | None]]:
    return [weights for layer in layers(decoder) for weights in (qkv(layer.self_attn), gate_up(layer.mlp))]


def bytes_held(decoder: Decoder) -> int:
    rooms = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in decoder.parameters()}
    return sum(rooms.values())


def state(decoder: Decoder) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in decoder.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_weight_holds_the_others_in_order_and_nothing_is_doubled():
    decoder = build()
    before, held = state(decoder), bytes_held(decoder)
    parameters = list(decoder.parameters())
    fuse(decoder)
    assert same(state(decoder), before)
    assert bytes_held(decoder) == held
    assert all(p is q for p, q in zip(decoder.parameters(), parameters, strict=True))
    attention = layers(decoder)[1].self_attn
    weight, bias = qkv(attention)
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(weight, torch.cat([layer.weight for layer in parts]))
    assert bias is not None
    assert torch.equal(bias, torch.cat([layer.bias for layer in parts]))
    assert gate_up(layers(decoder)[0].mlp)[0].shape == (48, 16)


def test_a_second_call_moves_nothing():
    decoder = build()
    fuse(decoder)
    places = [p.data_ptr() for p in decoder.parameters()]
    first, second = fuse(decoder), fuse(decoder)
    assert [p.data_ptr() for p in decoder.parameters()] == places
    assert [w.data_ptr() for w, _ in first] == [w.data_ptr() for w, _ in second]
    assert first[0][0].data_ptr() == layers(decoder)[0].self_attn.q_proj.weight.data_ptr()


def test_training_is_the_same_and_is_seen_in_the_fused_weight():
    apart, together = build(), build()
    fuse(together)
    for decoder in (apart, together):
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            decoder.logits(decoder(TOKENS)).logsumexp(-1).sum().backward()
            optimizer.step()
    assert same(state(together), state(apart))
    attention = layers(together)[0].self_attn
    weight, _ = qkv(attention)
    assert weight.data_ptr() == attention.q_proj.weight.data_ptr()
    assert torch.equal(weight[16:24], attention.k_proj.weight)
    assert not weight.requires_grad
    assert attention.k_proj.weight.requires_grad
    assert attention.k_proj.weight.is_leaf


def test_weights_fused_while_sampling_can_be_trained():
    decoder = build()
    with torch.inference_mode():
        fuse(decoder)
    decoder.logits(decoder(TOKENS)).sum().backward()
    grad = layers(decoder)[0].self_attn.v_proj.weight.grad
    assert grad is not None
    assert float(grad.abs().sum()) > 0


def test_a_deep_copy_stands_alone():
    decoder = build()
    fuse(decoder)
    twin = copy.deepcopy(decoder)
    assert same(state(twin), state(decoder))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not any(p.eq(0).all() for p in decoder.parameters())
    assert float(fuse(twin)[0][0].abs().sum()) == 0


def test_other_precision_and_loading_with_assign_lay_them_out_again():
    decoder, other = build(), build(seed=1)
    fuse(decoder)
    decoder.to(torch.float64)
    weight, _ = qkv(layers(decoder)[0].self_attn)
    assert weight.dtype == torch.float64
    decoder.load_state_dict(other.state_dict(), assign=True)
    weight, _ = qkv(layers(decoder)[0].self_attn)
    assert torch.equal(weight[:16], layers(other)[0].self_attn.q_proj.weight)
    assert weight.data_ptr() == layers(decoder)[0].self_attn.q_proj.weight.data_ptr()
    decoder.load_state_dict(build(seed=2).state_dict())
    assert torch.equal(weight[:16], layers(build(seed=2))[0].self_attn.q_proj.weight)


def test_saving_and_loading(tmp_path):
    decoder = build()
    before = state(decoder)
    fuse(decoder)
    save_tensors(tmp_path / "a.safetensors", decoder.state_dict())
    assert same(load_tensors(tmp_path / "a.safetensors"), before)
    untied = {name: x for name, x in decoder.state_dict().items() if name != "lm_head.weight"}
    save_file(untied, tmp_path / "b.safetensors")  # views of one storage that do not overlap
    assert same(load_file(tmp_path / "b.safetensors"), untied)
    torch.save(decoder.state_dict(), tmp_path / "c.pt")
    assert same(torch.load(tmp_path / "c.pt", weights_only=True), before)


def test_the_folder_of_a_fused_model_is_the_folder_of_the_model(tmp_path):
    decoder = Decoder(
        DecoderConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_key_value_heads=2)
    )
    save_decoder(decoder, tmp_path / "apart")
    fuse(decoder)
    save_decoder(decoder, tmp_path / "together")
    apart, together = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("apart", "together"))
    assert apart == together
    loaded = load_decoder(tmp_path / "together")
    fuse(loaded)
    assert same(state(loaded), state(decoder))


def test_adapted_layers_give_the_weights_below_the_adapters():
    decoder = build()
    before = state(decoder)["model.layers.0.self_attn.q_proj.weight"]
    add_lora(decoder, rank=2, alpha=4.0, targets=("q_proj", "up_proj"))
    fuse(decoder)
    weight, _ = qkv(layers(decoder)[0].self_attn)
    assert torch.equal(weight[:16], before)
    assert base_linear(layers(decoder)[0].self_attn.q_proj).weight.data_ptr() == weight.data_ptr()
    assert torch.equal(plain_state(decoder)["model.layers.0.self_attn.q_proj.weight"], before)


def test_neighbours_by_chance_and_parts_out_of_order_are_not_taken_for_one():
    room = torch.arange(24.0).view(6, 4)
    first, second = nn.Parameter(room[:2]), nn.Parameter(room[2:6])
    assert as_view([first, second]).data_ptr() == room.data_ptr()
    assert make_adjacent([first, second]).data_ptr() == room.data_ptr()
    swapped = make_adjacent([second, first])
    assert torch.equal(swapped, torch.cat([room[2:], room[:2]]))
    assert second.data_ptr() == swapped.data_ptr()
    strided = [nn.Parameter(torch.arange(12.0).view(4, 3).t()), nn.Parameter(torch.ones(2, 4))]
    joined = make_adjacent(strided)
    assert joined.is_contiguous()
    assert torch.equal(joined[:3], strided[0])


def test_two_layers_of_which_one_has_a_bias_are_refused():
    attention = layers(build())[0].self_attn
    attention.k_proj.bias = None
    with pytest.raises(ValueError, match="some of the layers have a bias"):
        qkv(attention)
