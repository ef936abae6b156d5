"""hone inspect: parameters by kind as counted by hand, and updates whose singular values are known."""

import json
import math

import pytest
import torch

from hone.cli import main
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.peft import save_peft
from hone.model.formats.save import save_decoder
from hone.model.lora import adapted_layers, add_lora, lora_parameters

torch.set_num_threads(1)

Q = "model.layers.0.self_attn.q_proj.weight"


def decoder(**changes) -> Decoder:
    shape = {
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 16, "initializer_range": 0.3, **changes,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(DecoderConfig(**shape))


@pytest.fixture
def base(tmp_path):
    save_decoder(decoder(), tmp_path / "base")
    return tmp_path / "base"


def adapted(rank=2) -> Decoder:
    model = decoder()
    add_lora(model, rank=rank, alpha=6.0, targets=("q_proj", "up_proj"), rslora=True)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in lora_parameters(model):
            p.copy_(torch.randn(p.shape, generator=g))
    return model


def told(capsys, *arguments):
    """What --json says."""
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments) -> str:
    assert main(["inspect", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def updates(report):
    return {c["name"]: c["update"] for c in report["changes"]}


def test_parameters_by_kind_as_counted_by_hand(base, capsys):
    report = told(capsys, base)
    kinds = {k["kind"]: k for k in report["kinds"]}
    # two layers: q 8x8, k and v 4x8, o 8x8; gate and up 12x8, down 8x12; two norms of 8, and one at the end
    assert {name: k["numbers"] for name, k in kinds.items()} == {
        "embedding": 11 * 8,
        "attention": 2 * (64 + 32 + 32 + 64),
        "mlp": 2 * 3 * 96,
        "norm": 5 * 8,
    }
    assert {name: k["tensors"] for name, k in kinds.items()} == {"embedding": 1, "attention": 8, "mlp": 6, "norm": 5}
    assert all(k["bytes"] == 4 * k["numbers"] and k["dtypes"] == ["float32"] for k in kinds.values())
    assert report["numbers"] == sum(p.numel() for p in decoder().parameters())
    assert report["changes"] == []


def test_an_untied_head_a_bias_and_a_dtype_are_told(tmp_path, capsys):
    model = decoder(tie_word_embeddings=False, family="qwen2", qkv_bias=True).to(torch.bfloat16)
    save_decoder(model, tmp_path)
    kinds = {k["kind"]: k for k in told(capsys, tmp_path)["kinds"]}
    assert kinds["head"]["numbers"] == 88
    assert kinds["head"]["bytes"] == 176
    assert kinds["head"]["dtypes"] == ["bfloat16"]
    assert kinds["attention"]["tensors"] == 8 + 6


def test_a_full_update_with_known_singular_values(base, tmp_path, capsys):
    model = decoder()
    u, v = (torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(i))).Q for i in (1, 2))
    with torch.no_grad():
        # 3, 2, 1: squares 9, 4, 1 of 14; 9 + 4 is the first above 0.9 * 14
        model.get_parameter(Q).add_(u @ torch.diag(torch.tensor([3.0, 2.0, 1.0, 0, 0, 0, 0, 0])) @ v.T)
        model.model.norm.weight.add_(torch.tensor([3.0, 4.0, 0, 0, 0, 0, 0, 0]))
    save_decoder(model, tmp_path / "new")
    report = told(capsys, tmp_path / "new", "--base", base)
    found = updates(report)
    assert found[Q]["norm"] == pytest.approx(math.sqrt(14), rel=1e-5)
    assert found[Q]["relative"] == pytest.approx(math.sqrt(14) / decoder().get_parameter(Q).norm().item(), rel=1e-5)
    assert found[Q]["effective_rank"] == pytest.approx(36 / 14, rel=1e-4)
    assert found[Q]["energy_rank"] == 2
    # the norm's weights were all 1: length sqrt(8)
    assert found["model.norm.weight"] == {
        "norm": pytest.approx(5.0), "relative": pytest.approx(5 / math.sqrt(8)),
        "effective_rank": None, "energy_rank": None,
    }  # fmt: skip
    others = [u for name, u in found.items() if name not in (Q, "model.norm.weight")]
    assert len(others) == 18
    assert {u["norm"] for u in others} == {0.0}
    assert {u["effective_rank"] for u in others} == {0.0, None}
    assert report["update_norm"] == pytest.approx(math.sqrt(14 + 25), rel=1e-5)
    assert report["notes"] == []


def test_an_adapter_and_the_model_it_was_merged_into_tell_the_same(base, tmp_path, capsys):
    model = adapted()
    save_peft(model, tmp_path / "adapter", base=str(base))
    save_decoder(model, tmp_path / "merged")
    thin = updates(told(capsys, tmp_path / "adapter"))
    whole = {n: u for n, u in updates(told(capsys, tmp_path / "merged", "--base", base)).items() if u["norm"]}
    assert thin.keys() == whole.keys() == {f"{name}.weight" for name, _ in adapted_layers(model)}
    for name, layer in adapted_layers(model):
        one, two = thin[f"{name}.weight"], whole[f"{name}.weight"]
        assert one["norm"] == pytest.approx(layer.adapter.update().norm().item(), rel=1e-5)
        assert 1 < one["effective_rank"] <= 2
        assert one["energy_rank"] == two["energy_rank"] <= 2
        for key in ("norm", "relative", "effective_rank"):
            assert one[key] == pytest.approx(two[key], rel=1e-4)


def test_an_adapter_without_its_base_has_no_relative_norms(base, tmp_path, capsys):
    save_peft(adapted(), tmp_path / "adapter", base="somebody/gone")
    report = told(capsys, tmp_path / "adapter")
    assert report["base"] == ""
    assert {u["relative"] for u in updates(report).values()} == {None}
    assert "give --base" in report["notes"][0]
    with_base = told(capsys, tmp_path / "adapter", "--base", base)
    assert with_base["notes"] == []
    assert all(u["relative"] > 0 for u in updates(with_base).values())


def test_layers_come_in_order_and_the_table_has_every_weight(tmp_path, capsys):
    save_decoder(decoder(), tmp_path / "base")
    shape = {"num_hidden_layers": 11, "hidden_size": 4, "intermediate_size": 4, "vocab_size": 5}
    deep = Decoder(DecoderConfig(num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=8, **shape))
    save_decoder(deep, tmp_path / "deep")
    numbers = sum(p.numel() for p in deep.parameters())
    names = [c["name"] for c in told(capsys, tmp_path / "deep", "--base", tmp_path / "deep")["changes"]]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    add_lora(deep, rank=1, alpha=1.0)
    save_peft(deep, tmp_path / "adapter")
    layers = [int(c["name"].split(".")[2]) for c in told(capsys, tmp_path / "adapter")["changes"]]
    assert layers == sorted(layers)
    assert len(layers) == 22
    assert main(["inspect", str(tmp_path / "deep"), "--base", str(tmp_path / "deep")]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names)
    assert "effective rank" in out
    assert "float32" in out
    assert f"{numbers:,}" in out


def test_weights_of_one_side_are_named(base, tmp_path, capsys):
    save_decoder(decoder(tie_word_embeddings=False), tmp_path / "untied")
    report = told(capsys, tmp_path / "untied", "--base", base)
    assert report["notes"] == ["only in the model: lm_head.weight"]


def test_what_cannot_be_inspected_is_said_in_one_line(base, tmp_path, capsys):
    save_decoder(decoder(intermediate_size=16), tmp_path / "wide")
    save_peft(adapted(), tmp_path / "adapter")
    (tmp_path / "empty").mkdir()
    assert "no model folder" in refused(capsys, tmp_path / "none")
    assert "has no model.safetensors" in refused(capsys, tmp_path / "empty")
    assert "no model folder" in refused(capsys, base, "--base", tmp_path / "none")
    assert "give the model it was trained from as --base" in refused(capsys, tmp_path / "wide", "--base", base)
    assert "is an adapter" in refused(capsys, base, "--base", tmp_path / "adapter")
    assert "it was trained on as --base" in refused(capsys, tmp_path / "adapter", "--base", tmp_path / "wide")
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:100])
    assert "is damaged" in refused(capsys, base)
