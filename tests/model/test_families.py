"""Every family that the decoder computes, against Hugging Face's own model: both ways, logits, gradients and cache."""

import json
from typing import Any

import pytest
import torch
from theirs import random_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hone.engine.params import SampleParams
from hone.model.decoder import Decoder
from hone.model.formats import save
from hone.model.formats.folder import load_decoder
from hone.model.formats.save import save_decoder, save_scorer
from hone.model.layout import hidden_states, lay_out
from hone.model.scorer import Scorer
from hone.rollout.local import LocalSampler

torch.set_num_threads(1)
SHAPE: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
SOME = ["full_attention", "sliding_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "Llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "SmolLM2": ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "Llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear scaling": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn, whole": ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "yarn, no frequency scaled": (
        "llama",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 8, "truncate": False, "beta_slow": 2.0}},
    ),
    "yarn, mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "yarn, stated": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.25}}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral with a window": ("mistral", {"sliding_window": 5}),
    "Mistral with wide heads": ("mistral", {"head_dim": 8}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2.5 with yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": False}),
    "Qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "Qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "Qwen3 with windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "layer_types": SOME}),
    "Qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
}
TOKENS = torch.randint(0, 23, (2, 40), generator=torch.Generator().manual_seed(0))


def theirs_of(name: str) -> Any:
    family, settings = FAMILIES[name]
    return random_model(family, **{**SHAPE, **settings})


def logits_of(decoder: Decoder, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return decoder.lm_head(decoder(tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_logits_are_equal(name, tmp_path):
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(logits_of(ours), expected, rtol=2e-5, atol=2e-5)
    assert expected.std() > 0.1, "flat logits would agree whatever the attention did"

    save_decoder(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, expected, rtol=1e-6, atol=1e-6)
    assert load_decoder(tmp_path / "ours").config == ours.config


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_equal(name, tmp_path):
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    logits_of(ours).logsumexp(-1).sum().backward()
    theirs(TOKENS).logits.logsumexp(-1).sum().backward()
    expected = dict(theirs.named_parameters())
    for key, p in ours.named_parameters():
        assert p.grad is not None
        scale = float(expected[key].grad.abs().max())
        torch.testing.assert_close(p.grad, expected[key].grad, rtol=1e-3, atol=1e-4 * scale, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sampler_and_the_learner_agree(name, tmp_path):
    """Cached, left-padded decoding against the full pass, past every window."""
    theirs_of(name).save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, dtype=torch.float64)
    params = SampleParams(max_tokens=20, stop_ids=frozenset(), seed=1)
    groups = LocalSampler(ours).sample([[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]], n=2, params=params)
    for rollout in (r for g in groups for r in g):
        tokens = torch.tensor([list(rollout.tokens)])
        with torch.no_grad():
            logp = logits_of(ours, tokens[:, :-1]).log_softmax(-1)[0].gather(-1, tokens[0, 1:, None])[:, 0]
        written = torch.tensor(rollout.mask[1:])
        torch.testing.assert_close(logp[written], torch.tensor(rollout.gen_logp, dtype=torch.float64)[1:][written])


def test_a_mistral_with_layer_types_has_windows_where_they_say(tmp_path):
    """Hugging Face's Auto classes take it for a Ministral."""
    theirs = random_model("ministral", **SHAPE, head_dim=8, sliding_window=5, layer_types=SOME)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_decoder(tmp_path)
    assert ours.config.windows == (0, 5, 5)
    save_decoder(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours), theirs(TOKENS).logits, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(again(TOKENS).logits, theirs(TOKENS).logits, rtol=2e-5, atol=2e-5)


def test_a_window_matters_beyond_its_length_only(tmp_path):
    theirs_of("Mistral with a window").save_pretrained(tmp_path)
    windowed = load_decoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    full = load_decoder(tmp_path)
    with torch.no_grad():
        near, far = logits_of(windowed), logits_of(full)
    torch.testing.assert_close(near[:, :5], far[:, :5])
    assert (near[:, 5:] - far[:, 5:]).abs().amax(-1).min() > 1e-3


def test_a_long_context_grows_its_tables_when_they_are_needed(monkeypatch):
    """The sampler is the first to need them, without gradients; the learner differentiates through them after."""
    from hone.model import decoder as module
    from hone.model.config import DecoderConfig

    shape = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    torch.manual_seed(0)
    whole = Decoder(DecoderConfig(**shape, max_position_embeddings=64))
    monkeypatch.setattr(module, "TABLE", 8)
    torch.manual_seed(0)
    lazy = Decoder(DecoderConfig(**shape, max_position_embeddings=64))
    assert len(lazy.cos) == 8
    with torch.inference_mode():
        assert torch.equal(lazy(TOKENS[:, :20]), whole(TOKENS[:, :20]))
    assert len(lazy.cos) == 20
    lazy(TOKENS).sum().backward()
    assert len(lazy.cos) == 40
    assert torch.equal(lazy(TOKENS), whole(TOKENS))


@pytest.mark.parametrize("name", ["Qwen3", "Llama 2"])
def test_weights_are_cut_into_files_that_both_sides_read(name, tmp_path, monkeypatch):
    theirs_of(name).save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    ours = load_decoder(tmp_path / "theirs")
    monkeypatch.setattr(save, "SHARD", 3000)
    save_decoder(ours, tmp_path / "ours")
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits_of(ours), rtol=2e-5, atol=2e-5)
    again = load_decoder(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("name", ["Llama 3", "Mistral with a window", "Qwen2 with windows", "Qwen3"])
def test_a_reward_model_of_every_family_is_one_of_transformers(name, tmp_path):
    theirs_of(name).save_pretrained(tmp_path / "base")
    scorer = Scorer(load_decoder(tmp_path / "base"))
    save_scorer(scorer, tmp_path / "scorer", extra={"pad_token_id": 0})
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer", attn_implementation="eager").eval()
    row = TOKENS[:1, :20] % 22 + 1  # none is the pad token
    with torch.no_grad():
        expected = theirs(row).logits[0, 0]
        lines = lay_out(row, torch.ones_like(row, dtype=torch.bool))
        got = scorer.head(hidden_states(scorer.decoder, lines))[0, -1]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert float(expected.abs()) > 1e-3
