"""Adapters in PEFT's format, against the `peft` package: what either writes, the other computes the same with."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_decoder
from hone.model.formats.foreign import Foreign
from hone.model.formats.peft import CONFIG, WEIGHTS, is_adapter, load_peft, read_peft, save_peft
from hone.model.formats.save import save_decoder
from hone.model.lora import (
    LoRALinear,
    adapted_layers,
    adapter_names,
    add_lora,
    lora_parameters,
    merge_lora,
    plain_state,
    use_adapter,
)
from hone.model.policy import Policy

torch.set_num_threads(1)
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
CLOSE = {"rtol": 0, "atol": 5e-6}  # transformers norms and rotates in float32, whatever the weights are
SAME = {"rtol": 0, "atol": 1e-12}
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# how an adapter may be made: in our words, and in PEFT's
WAYS = {
    "query and value": ({"targets": ("q_proj", "v_proj")}, {"target_modules": ["q_proj", "v_proj"]}),
    "all linear": ({"targets": ("all-linear",)}, {"target_modules": "all-linear"}),
    "rsLoRA": ({"targets": ("q_proj", "up_proj"), "rslora": True},
               {"target_modules": ["q_proj", "up_proj"], "use_rslora": True}),
    "an expression": ({"targets": (r".*layers\.1\..*_proj",)}, {"target_modules": r".*layers\.1\..*_proj"}),
    "one layer": ({"targets": ("model.layers.0.mlp.down_proj",)}, {"target_modules": ["model.layers.0.mlp.down_proj"]}),
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biases"])
def home(request, tmp_path_factory):
    """A model folder in float64: of Llama's family, or with Qwen2's biases."""
    config = DecoderConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3, tie_word_embeddings=False,
        family="qwen2" if request.param else "llama", qkv_bias=request.param,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = Decoder(config).double()
        for name, p in decoder.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(p)
    save_decoder(decoder, folder)
    return folder


def ours(home):
    return load_decoder(home, dtype=torch.float64)


def theirs(home):
    return transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float64)


def our_logits(decoder):
    with torch.no_grad():
        return decoder.lm_head(decoder(TOKENS))


def their_logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def move(parameters, seed=1):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.2)


def in_ours(home, **settings):
    decoder = ours(home)
    add_lora(decoder, **{"rank": 3, "alpha": 6.0, **settings})
    move(lora_parameters(decoder))
    return decoder


def in_peft(home, **settings):
    made = peft.get_peft_model(theirs(home), peft.LoraConfig(**{"r": 3, "lora_alpha": 6, **settings}))
    move([p for n, p in made.named_parameters() if "lora_" in n])
    return made


@pytest.mark.parametrize("way", WAYS)
def test_peft_loads_what_we_save(way, home, tmp_path):
    decoder = in_ours(home, **WAYS[way][0])
    save_peft(decoder, tmp_path)
    model = peft.PeftModel.from_pretrained(theirs(home), tmp_path)
    torch.testing.assert_close(their_logits(model), our_logits(decoder), **CLOSE)
    assert (our_logits(decoder) - our_logits(ours(home))).abs().max() > 0.01
    number = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert number == sum(p.numel() for p in lora_parameters(decoder))  # no layer more than we adapted
    merge_lora(decoder)
    for key, x in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(decoder.state_dict()[key], x, **SAME)


@pytest.mark.parametrize("way", WAYS)
def test_we_load_what_peft_saves(way, home, tmp_path):
    model = in_peft(home, **WAYS[way][1])
    model.save_pretrained(tmp_path)
    decoder = ours(home)
    found = load_peft(decoder, tmp_path)
    assert found.notes == ()
    torch.testing.assert_close(our_logits(decoder), their_logits(model), **CLOSE)
    assert (our_logits(decoder) - our_logits(ours(home))).abs().max() > 0.01
    merged = model.merge_and_unload().state_dict()
    for name, x in plain_state(decoder).items():
        torch.testing.assert_close(x, merged[name], **SAME)


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_comes_back_bit_for_bit(way, home, tmp_path):
    decoder, again = in_ours(home, **WAYS[way][0], alpha=5.3), ours(home)
    save_peft(decoder, tmp_path / "one", base="somewhere")
    assert load_peft(again, tmp_path / "one").base == "somewhere"
    assert torch.equal(our_logits(again), our_logits(decoder))
    save_peft(again, tmp_path / "two", base="somewhere")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_ranks_and_alphas_by_pattern(home, tmp_path):
    patterns = {"rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\.up_proj": 1}, "alpha_pattern": {"up_proj": 20}}
    model = in_peft(home, target_modules=["q_proj", "v_proj", "up_proj"], **patterns)
    model.save_pretrained(tmp_path / "theirs")
    decoder = ours(home)
    load_peft(decoder, tmp_path / "theirs")
    sizes = {name: (a.rank, a.scale) for name, m in decoder.named_modules() if isinstance(m, LoRALinear)
             for a in [m.adapter]}  # fmt: skip
    assert sizes["model.layers.0.self_attn.q_proj"] == (5, 6 / 5)
    assert sizes["model.layers.0.self_attn.v_proj"] == (3, 6 / 3)
    assert sizes["model.layers.0.mlp.up_proj"] == (3, 20 / 3)
    assert sizes["model.layers.1.mlp.up_proj"] == (1, 20.0)
    torch.testing.assert_close(our_logits(decoder), their_logits(model), **CLOSE)
    save_peft(decoder, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(theirs(home), tmp_path / "ours")
    torch.testing.assert_close(their_logits(back), their_logits(model), **CLOSE)


def test_training_goes_on_with_equal_gradients_and_steps(home, tmp_path, make_batch, rows):
    model = in_peft(home, target_modules="all-linear")
    model.save_pretrained(tmp_path / "start")
    decoder = ours(home)
    load_peft(decoder, tmp_path / "start")
    policy = Policy(decoder)
    batch = make_batch(rows[:1])
    tokens = torch.tensor(rows[:1])
    optimizers = [
        torch.optim.SGD(policy.actor_parameters(), lr=0.05),
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05),
    ]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = -policy(batch, frozenset({"logp"})).logp[batch.mask].sum()
        logp = model(tokens).logits[:, 1:-1].log_softmax(-1).gather(-1, tokens[:, 2:, None])
        torch.testing.assert_close(loss, -logp.sum(), **CLOSE)
        loss.backward()
        (-logp.sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
    save_peft(decoder, tmp_path / "after")
    model.save_pretrained(tmp_path / "theirs")
    mine, other = (load_file(tmp_path / name / WEIGHTS) for name in ("after", "theirs"))
    start = load_file(tmp_path / "start" / WEIGHTS)
    assert mine.keys() == other.keys()
    for name, x in mine.items():
        torch.testing.assert_close(x, other[name], **CLOSE)
        assert (x - start[name]).abs().max() > 1e-4


def test_several_adapters_on_one_base_are_those_of_peft(home, tmp_path):
    ways = {"one": {"target_modules": "all-linear"}, "two": {"target_modules": ["q_proj"], "r": 2, "use_rslora": True}}
    decoder, expected = ours(home), {}
    for name, settings in ways.items():
        model = in_peft(home, **settings)
        model.save_pretrained(tmp_path / name)
        expected[name] = their_logits(model)
        load_peft(decoder, tmp_path / name, name=name)
    assert adapter_names(decoder) == ["one", "two"]
    both = peft.PeftModel.from_pretrained(theirs(home), tmp_path / "one", adapter_name="one")
    both.load_adapter(tmp_path / "two", adapter_name="two")
    for name in ways:
        with use_adapter(decoder, name):
            torch.testing.assert_close(our_logits(decoder), expected[name], **CLOSE)
            save_peft(decoder, tmp_path / f"{name} again")
        both.set_adapter(name)
        torch.testing.assert_close(their_logits(both), expected[name], **CLOSE)
        assert load_file(tmp_path / f"{name} again" / WEIGHTS).keys() == load_file(tmp_path / name / WEIGHTS).keys()
    with use_adapter(decoder, None):
        assert torch.equal(our_logits(decoder), our_logits(ours(home)))
    with pytest.raises(HoneError, match='"two" already'):
        load_peft(decoder, tmp_path / "two", name="two")


def test_an_untied_head_loads_with_the_copy_of_it_that_peft_brings(home, tmp_path):
    model = in_peft(home, target_modules=["lm_head", "q_proj"])
    with pytest.warns(UserWarning, match="embedding layers"):
        model.save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in state
    decoder = ours(home)
    load_peft(decoder, tmp_path)
    torch.testing.assert_close(our_logits(decoder), their_logits(model), **CLOSE)
    state[copy] += 1.0  # a head that was trained as well
    save_file(state, tmp_path / WEIGHTS)
    with pytest.raises(HoneError, match="brings a lm_head that differs"):
        load_peft(ours(home), tmp_path)


def test_a_tied_head_is_refused(make_decoder, tmp_path):
    decoder = make_decoder(tie_word_embeddings=False)
    add_lora(decoder, rank=2, alpha=2.0, targets=("lm_head",))
    save_peft(decoder, tmp_path)
    with pytest.raises(HoneError, match="tied to the embedding"):
        load_peft(make_decoder(), tmp_path)


REFUSED = {
    "DoRA": ({"use_dora": True}, "use_dora"),
    "biases": ({"bias": "lora_only"}, "changes biases"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, r"whole layers of its own \(lm_head, modules_to_save\)"),
    "a bias in B": ({"lora_bias": True}, "lora_bias"),
    "the embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens.*no low-rank update of a linear"),
    "new tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "a changed base": ({"init_lora_weights": "pissa"}, "changed base weights"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_can_and_we_cannot_is_refused_with_the_reason(case, home, tmp_path):
    settings, match = REFUSED[case]
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **settings})
    base = theirs(home).float() if case == "a changed base" else theirs(home)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    decoder = ours(home)
    with pytest.raises(HoneError, match=match) as error:
        load_peft(decoder, tmp_path)
    assert "merge_and_unload" in str(error.value)
    assert "\n" not in str(error.value)
    assert all(p.requires_grad for p in decoder.parameters())  # nothing was changed
    assert adapter_names(decoder) == []


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig"])
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_adapter_are_refused(kind, home, tmp_path):
    extra = {"feedforward_modules": []} if kind == "IA3Config" else {}
    config = getattr(peft, kind)(target_modules=["q_proj"], **extra)
    peft.get_peft_model(theirs(home).float(), config).save_pretrained(tmp_path)
    with pytest.raises(HoneError, match="only LoRA can be loaded"):
        load_peft(ours(home), tmp_path)


def test_dropout_is_refused_for_training_and_passed_over_for_sampling(home, tmp_path):
    model = in_peft(home, target_modules=["q_proj"], lora_dropout=0.1)
    model.save_pretrained(tmp_path)
    with pytest.raises(HoneError, match=r"lora_dropout 0\.1.*not the model that samples"):
        load_peft(ours(home), tmp_path)
    decoder = ours(home)
    assert load_peft(decoder, tmp_path, train=False).notes == (
        "lora_dropout 0.1 is for training only and was passed over",
    )
    torch.testing.assert_close(our_logits(decoder), their_logits(model), **CLOSE)
    assert not any(p.requires_grad for p in decoder.parameters())


def rewrite(folder, **changes):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop(folder, name):
    state = load_file(folder / WEIGHTS)
    del state[name]
    save_file(state, folder / WEIGHTS)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
DAMAGE = {
    "no config": (lambda f: (f / CONFIG).unlink(), "has no adapter_config.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "pickles are not loaded"),
    "half a config": (lambda f: (f / CONFIG).write_text('{"peft_type"'), "is not JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[1]"), "names no peft_type"),
    "half the weights": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:99]), "is damaged"),
    "half a pair": (lambda f: drop(f, f"{Q}.lora_B.weight"), "only half of the update of model.layers.0"),
    "another rank": (lambda f: rewrite(f, r=4), r"rank 3 and 3 in .* 4 in adapter_config"),
    "no rank": (lambda f: rewrite(f, r=None), "r is None: it must be a positive number"),
    "a word for alpha": (lambda f: rewrite(f, lora_alpha="big"), "lora_alpha is 'big'"),
    "a word in a pattern": (lambda f: rewrite(f, alpha_pattern={"q_proj": "big"}), "alpha_pattern q_proj is 'big'"),
    "a list of patterns": (lambda f: rewrite(f, rank_pattern=["q_proj"]), "must be an object"),
    "a bad pattern": (lambda f: rewrite(f, rank_pattern={"(": 3}), "no regular expression"),
    "nothing adapted": (lambda f: save_file({}, f / WEIGHTS), "adapts no layer"),
    "what we do not know": (lambda f: rewrite(f, future_setting=True), "more than a plain LoRA .future_setting"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_named_in_one_line(case, make_decoder, tmp_path):
    decoder = make_decoder()
    add_lora(decoder, rank=3, alpha=3.0)
    save_peft(decoder, tmp_path)
    damage, match = DAMAGE[case]
    damage(tmp_path)
    with pytest.raises(HoneError, match=match) as error:
        load_peft(make_decoder(), tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "match"),
    [({"num_hidden_layers": 1}, "adapts model.layers.1.*which the model does not have"),
     ({"hidden_size": 8, "num_attention_heads": 2}, "of 16 x 16, the model's is 8 x 8")],
)  # fmt: skip
def test_an_adapter_of_another_model_is_refused(shape, match, make_decoder, tmp_path):
    decoder = make_decoder()
    add_lora(decoder, rank=3, alpha=3.0)
    save_peft(decoder, tmp_path)
    with pytest.raises(HoneError, match=match):
        load_peft(make_decoder(**shape), tmp_path)


def test_the_files_are_readable_by_others_and_say_what_they_are(make_decoder, tmp_path):
    decoder = make_decoder()
    add_lora(decoder, rank=4, alpha=8.0, rslora=True, targets=("q_proj",))
    save_peft(decoder, tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_mode & 0o044 == (tmp_path / CONFIG).stat().st_mode & 0o044
    config = json.loads((tmp_path / CONFIG).read_text())
    assert {k: config[k] for k in ("r", "lora_alpha", "use_rslora", "target_modules", "lora_dropout")} == {
        "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"], "lora_dropout": 0.0,
    }  # fmt: skip
    assert is_adapter(tmp_path)
    found = read_peft(tmp_path)
    assert {found.scale(layer) for layer in found.tensors} == {8 / math.sqrt(4)}
    shutil.rmtree(tmp_path)
    assert not is_adapter(tmp_path)
    with pytest.raises(HoneError, match="no adapter to save"):
        save_peft(make_decoder(), tmp_path)


def test_saving_one_adapter_while_another_is_selected(make_decoder, tmp_path):
    decoder = make_decoder()
    add_lora(decoder, name="a", rank=2, alpha=2.0, targets=("q_proj",), seed=1)
    add_lora(decoder, name="b", rank=3, alpha=2.0, targets=("q_proj",), seed=2)
    with use_adapter(decoder, "a"):
        save_peft(decoder, tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    assert len(state) == 2 * decoder.config.num_hidden_layers
    for name, adapter in ((name, m.adapters["a"]) for name, m in adapted_layers(decoder)):
        assert torch.equal(state[f"base_model.model.{name}.lora_A.weight"], adapter.lora_A)


@pytest.mark.parametrize("way", ["query and value", "all linear"])
def test_a_model_that_runs_through_transformers_takes_and_gives_adapters(way, tmp_path):
    config = transformers.Olmo2Config(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    decoder = in_ours(tmp_path / "base", **WAYS[way][0])
    assert isinstance(decoder, Foreign)
    save_peft(decoder, tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(theirs(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(their_logits(model), our_logits(decoder), **CLOSE)
    again = ours(tmp_path / "base")
    load_peft(again, tmp_path / "adapter")
    assert torch.equal(our_logits(again), our_logits(decoder))
    with use_adapter(decoder, None):
        assert torch.equal(our_logits(decoder), our_logits(ours(tmp_path / "base")))
    save_decoder(decoder, tmp_path / "merged")
    torch.testing.assert_close(our_logits(ours(tmp_path / "merged")), our_logits(decoder), **CLOSE)
