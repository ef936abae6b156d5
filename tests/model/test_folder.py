"""Model folders: transformers reads what we write, we read what it writes, and every damage is named."""

import json
import os

import pytest
import torch
from each import each
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from hone.errors import HoneError
from hone.model.config import Rope
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.hf_config import Unsupported, config_from_hf
from hone.model.formats.save import config_to_hf, save_decoder, save_scorer
from hone.model.lora import add_lora, lora_parameters
from hone.model.scorer import Scorer

torch.set_num_threads(1)
TOKENS = torch.randint(0, 23, (2, 12), generator=torch.Generator().manual_seed(0))
VALUE = frozenset({"value"})
EMBEDDING = "model.embed_tokens.weight"


def logits(decoder):
    with torch.no_grad():
        return decoder.lm_head(decoder(TOKENS))


def llama(tie, kv_heads=2, **more):
    shape = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 32}
    return LlamaConfig(**shape, tie_word_embeddings=tie, initializer_range=0.3, **more)


@pytest.fixture
def saved(make_decoder, tmp_path):
    save_decoder(make_decoder(rope=Rope(theta=123.0)).float(), tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_was_saved_with_equal_logits(tie, dtype, make_decoder, tmp_path):
    decoder = make_decoder(tie_word_embeddings=tie, rope=Rope(theta=777.0)).to(dtype)
    save_decoder(decoder, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == dtype
    with torch.no_grad():
        got = theirs.float()(TOKENS).logits
    torch.testing.assert_close(got, logits(load_decoder(tmp_path)), rtol=1e-5, atol=1e-5)
    if dtype == torch.float32:
        torch.testing.assert_close(got, logits(decoder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_we_load_what_transformers_saved_with_equal_logits(tie, kv_heads, tmp_path):
    theirs = LlamaForCausalLM(llama(tie, kv_heads, rope_parameters={"rope_type": "default", "rope_theta": 50.0})).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(logits(load_decoder(tmp_path)), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_shards_are_put_together(tmp_path):
    theirs = LlamaForCausalLM(llama(False))
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    assert not (tmp_path / "model.safetensors").exists()
    with torch.no_grad():
        torch.testing.assert_close(logits(load_decoder(tmp_path)), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)
    shard = next(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(HoneError, match=shard.name):
        load_decoder(tmp_path)


@pytest.mark.parametrize("tie", [True, False])
def test_saving_and_loading_gives_the_same_bits(tie, make_decoder, tmp_path):
    decoder = make_decoder(tie_word_embeddings=tie)
    save_decoder(decoder, tmp_path / "deep" / "folder")
    twin = load_decoder(tmp_path / "deep" / "folder", dtype=torch.float64)
    assert twin.config == decoder.config
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), decoder.parameters(), strict=True))
    assert all(p.requires_grad and not p.is_meta for p in twin.parameters())
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == tie
    assert torch.equal(logits(twin), logits(decoder))


def test_loading_draws_no_random_numbers(saved):
    before = torch.get_rng_state()
    load_decoder(saved)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loaded_model_does_not_change_when_its_file_is_written_again(saved, make_decoder):
    decoder = load_decoder(saved)
    before = logits(decoder)
    with open(saved / "model.safetensors", "r+b") as file:  # the same inode, not a new file
        size = os.path.getsize(file.name)
        file.seek(size - 4000)
        file.write(b"\1" * 4000)
    assert torch.equal(logits(decoder), before)


def test_a_tied_head_is_written_once(saved):
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")


def test_the_weights_file_is_as_readable_as_the_config(saved):
    assert (saved / "model.safetensors").stat().st_mode == (saved / "config.json").stat().st_mode


def test_adapters_are_merged_into_what_is_saved(make_decoder, tmp_path):
    decoder = make_decoder()
    add_lora(decoder, rank=2, alpha=4.0, targets=("all-linear",))
    for p in lora_parameters(decoder):
        torch.nn.init.normal_(p, std=0.2)
    save_decoder(decoder, tmp_path)
    twin = load_decoder(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(logits(twin), logits(decoder), rtol=0, atol=1e-12)
    assert (logits(make_decoder()) - logits(decoder)).abs().max() > 0.01
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_special_tokens_are_null_unless_given(make_decoder, tmp_path):
    save_decoder(make_decoder().float(), tmp_path / "a")
    save_decoder(make_decoder().float(), tmp_path / "b", extra={"eos_token_id": 7})
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / x).config for x in "ab")
    assert (a.eos_token_id, a.bos_token_id, b.eos_token_id) == (None, None, 7)


def test_config_goes_there_and_back(make_decoder):
    config = make_decoder(tie_word_embeddings=False, rope=Rope(theta=3.0), rms_norm_eps=1e-3).config
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_rope_and_dtype_are_written_for_both_generations_of_readers(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 123.0
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]


@each("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_absent_keys_have_hugging_faces_defaults(family):
    """A window of 4096 tokens in a Mistral, for one."""
    given = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 30}
    given |= {"model_type": family, "num_attention_heads": 32, "use_sliding_window": True}
    ours, theirs = config_from_hf(given), AutoConfig.for_model(**given)
    for name in ("rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    assert ours.windows == (tuple(window if k == "sliding_attention" else 0 for k in kinds) if window else ())


def test_a_config_of_the_older_style_is_read():
    five = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    old_style = config_from_hf({"model_type": "llama", **five, "rope_theta": 5e5, "rope_scaling": None})
    assert old_style.rope.theta == 5e5
    # transformers takes the trained context from beside the scaling if it is in both places
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    both = {"model_type": "llama", **five, "rope_scaling": scaling, "original_max_position_embeddings": 16}
    theirs = LlamaConfig(**{key: value for key, value in both.items() if key != "model_type"})
    theirs.standardize_rope_params()  # as its model does
    assert config_from_hf(both).rope.original == theirs.rope_parameters["original_max_position_embeddings"] == 16


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "gpt2"}, "do not fit its config"),
        ({"model_type": "unheard of"}, "transformers cannot load"),
        ({"model_type": ...}, "has no model_type"),
        ({"hidden_size": ..., "vocab_size": ...}, "lacks vocab_size, hidden_size"),
        ({"hidden_size": "16"}, "hidden_size is '16', not a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 3, "head_dim": ...}, "heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rope_parameters": 7}, "rope_parameters 7"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "rope factor is 'x'"),
        ({"head_dim": 8}, r"q_proj.weight has shape \(16, 16\), config.json asks for \(32, 16\)"),
        ({"head_dim": 3}, "heads of 3 dimensions"),
        ({"attention_bias": True}, "lack model.layers.0.self_attn.k_proj.bias"),
        ({"mlp_bias": True}, "lack model.layers.0.mlp.down_proj.bias"),
        ({"model_type": "qwen3"}, r"lack .*k_norm.weight"),
        ({"vocab_size": 25}, "vocab_size is 25 but model.embed_tokens.weight has 23 rows"),
        ({"intermediate_size": 25}, r"gate_proj.weight has shape \(24, 16\), config.json asks for \(25, 16\)"),
        ({"num_hidden_layers": 3}, r"lack model.layers.2.* and 6 more"),
        ({"num_hidden_layers": 1}, r"unknown tensors model.layers.1"),
        ({"tie_word_embeddings": False}, "lack lm_head.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_named(change, match, saved):
    edit_config(saved, **change)
    with pytest.raises(HoneError, match=match) as error:
        load_decoder(saved)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope type 'longrope'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, "layer_types": ["mamba"]}, "'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_the_decoder_does_not_compute_is_named(change, match, saved):
    edit_config(saved, **change)
    with pytest.raises(Unsupported, match=match):
        config_from_hf(json.loads((saved / "config.json").read_text()))


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"', "\udcff"])
def test_a_config_that_is_no_json_object_is_named(content, saved):
    (saved / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(HoneError, match="JSON"):
        load_decoder(saved)


def test_missing_files_are_named(saved):
    with pytest.raises(HoneError, match="no model folder"):
        load_decoder(saved / "nowhere")
    with pytest.raises(HoneError, match="no model folder"):
        load_decoder(saved / "config.json")
    (saved / "model.safetensors").unlink()
    with pytest.raises(HoneError, match=r"no model\.safetensors"):
        load_decoder(saved)
    (saved / "config.json").unlink()
    with pytest.raises(HoneError, match=r"no config\.json"):
        load_decoder(saved)


def test_truncated_or_corrupt_weights_are_named_wherever_the_cut(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for cut in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(HoneError, match="damaged") as error:
            load_decoder(saved)
        assert "\n" not in str(error.value)
    for junk in (b"\xff" * len(whole), whole[:8] + b"x" * 50 + whole[58:], whole + b"more"):
        path.write_bytes(junk)
        with pytest.raises(HoneError, match="damaged"):
            load_decoder(saved)


def rename(tensors):
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (rename, r"lack model\.norm\.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown tensors extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(4, 4)}), r"norm.weight has shape \(4, 4\)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(16).char()}), "int8"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(23, 16)}), "differs from the embedding"),
        (lambda t: t.update({EMBEDDING: torch.zeros(23, 8)}), r"shape \(23, 8\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, match, saved):
    edit_weights(saved, change)
    with pytest.raises(HoneError, match=match):
        load_decoder(saved)


def test_harmless_extras_are_taken(saved):
    before = logits(load_decoder(saved))
    edit_weights(saved, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    edit_weights(saved, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    assert torch.equal(logits(load_decoder(saved)), before)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{}", "is no index of weights"),
        ("x", "is no index of weights"),
        ('{"weight_map": {"a": "../../secret"}}', "names files outside the folder"),
        ('{"weight_map": {"a": 3}}', "names files outside the folder"),
    ],
)
def test_a_bad_index_is_named(index, match, saved):
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(HoneError, match=match):
        load_decoder(saved)


def test_what_the_disk_refuses_is_an_os_error(make_decoder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        save_decoder(make_decoder(), tmp_path / "file")
    (tmp_path / "model.safetensors" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match=r"model\.safetensors") as error:
        save_decoder(make_decoder(), tmp_path)
    assert error.value.errno


def test_scorer_goes_there_and_back_with_its_calibration(make_decoder, make_batch, rows, tmp_path):
    for kind in ("reward", "value", "step"):
        scorer = Scorer(make_decoder(tie_word_embeddings=False), kind=kind, mean=0.25, std=3.0).float()
        if scorer.head.bias is not None:
            torch.nn.init.constant_(scorer.head.bias, 0.5)
        save_scorer(scorer, tmp_path)
        twin = load_scorer(tmp_path)
        assert (twin.kind, twin.mean, twin.std) == (kind, 0.25, 3.0)
        batch = make_batch(rows)
        assert torch.equal(twin(batch, VALUE).value, scorer(batch, VALUE).value)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_transformers_scores_as_we_do(make_decoder, make_batch, tmp_path):
    scorer = Scorer(make_decoder().float())
    save_scorer(scorer, tmp_path, extra={"pad_token_id": 0})
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    row = [5, 6, 7, 8]
    with torch.no_grad():
        expected = theirs(torch.tensor([row])).logits[0, 0]
        got = scorer(make_batch([row]), VALUE).value[0, -1]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_reward_model_of_transformers_can_be_loaded(make_batch, tmp_path):
    theirs = LlamaForSequenceClassification(llama(False, num_labels=1, pad_token_id=0)).eval()
    theirs.save_pretrained(tmp_path)
    scorer = load_scorer(tmp_path)
    row = [5, 6, 7, 8]
    with torch.no_grad():
        expected = theirs(torch.tensor([row])).logits[0, 0]
        got = scorer(make_batch([row]), VALUE).value[0, -1]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert scorer.kind == "reward"


def test_scorers_that_do_not_fit_are_named(make_decoder, saved):
    with pytest.raises(HoneError, match=r"no score\.weight"):
        load_scorer(saved)
    save_scorer(Scorer(make_decoder()), saved)
    with pytest.raises(HoneError, match=r"unknown tensors score\.weight"):
        load_decoder(saved)
    edit_config(saved, hone={"kind": "judge"})
    with pytest.raises(HoneError, match="unknown kind"):
        load_scorer(saved)
    for wrong in ({"mean": "x"}, [], {"std": None}):
        edit_config(saved, hone=wrong)
        with pytest.raises(HoneError, match="save the scorer again"):
            load_scorer(saved)
    edit_config(saved, hone={})
    edit_weights(saved, lambda t: t.update({"score.weight": torch.zeros(2, 16)}))
    with pytest.raises(HoneError, match="has 2 labels: a reward is one number"):
        load_scorer(saved)
