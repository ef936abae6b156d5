"""Configs, adapters and tokenizer files with absurd sizes, wrong types and slow patterns: one line each, and soon."""

import json
import os
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.peft import read_peft
from tests.fuzz.targets import ADAPTER, CONFIG, CORPUS, LAYER, folder_of, small_weights, to_safetensors, tokenizer

HUGE = 10**12
SIZES = [key for key, value in CONFIG.items() if type(value) is int]
ODD = (
    *(0, -1, HUGE, 10**30, 10**400, 1.5, -2.5, float("nan"), float("inf"), True, None, "4", "", [], [4], [[4]], {}),
    *({"a": 4}, "x" * 9999),
)
SLOW = {"rank_pattern": "(.*)*zz", "alpha_pattern": "((m|o|d|e|l|.)+)+!"}


@contextmanager
def cheaply(megabytes: int = 600, seconds: float = 20.0):
    """What runs inside takes little memory, and little processor time."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < megabytes * 1000, "it took memory"
    assert after.ru_utime - before.ru_utime < seconds, "it took long"


def refused(load, *words) -> str:
    with pytest.raises(HoneError) as caught:
        load(*words)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def config_of(**changed):
    files = {"config.json": json.dumps({**CONFIG, **changed}).encode(), "model.safetensors": small_weights()}
    return folder_of("hostile", files)


def test_the_small_model_itself_loads():
    assert load_decoder(config_of()).config.hidden_size == 4


def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_made():
    with cheaply():
        for key in SIZES:
            for value in (HUGE, 10**6, 2**31, 2**63, 10**30):
                if key != "max_position_embeddings" or value > 2**40:
                    refused(load_decoder, config_of(**{key: value}))
        refused(load_decoder, config_of(num_hidden_layers=10**9, num_attention_heads=10**9, head_dim=10**9))
        refused(load_decoder, config_of(hidden_size=2**40, vocab_size=2**40))
        refused(load_decoder, config_of(model_type="mistral", sliding_window=4, num_hidden_layers=10**9))
        load_decoder(config_of(max_position_embeddings=10**9))


def test_values_of_every_kind_are_refused_or_taken_but_never_crash():
    keys = [*CONFIG, "head_dim", "rope_theta", "rms_norm_eps", "hidden_act", "sliding_window", "rope_parameters"]
    keys += ["rope_scaling", "layer_types", "max_window_layers", "use_sliding_window", "initializer_range", "hone"]
    keys += ["architectures", "attention_bias", "mlp_bias", "partial_rotary_factor"]
    with cheaply():
        for key in keys:
            for value in ODD:
                for load in (load_decoder, load_scorer) if key in ("hone", "architectures") else (load_decoder,):
                    try:
                        load(config_of(**{key: value}))
                    except HoneError as error:
                        said = str(error)
                        if "\n" in said or len(said) > 600:
                            pytest.fail(f"{key}={str(value)[:40]}: {said[:200]}")


def test_rotary_scalings_that_divide_by_zero_are_refused():
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
    llama3 = {**yarn, "rope_type": "llama3"}
    assert load_decoder(config_of(rope_parameters=yarn))
    for change in ({"rope_theta": 1.0}, {"rope_theta": 1}, {"beta_fast": float("nan")}, {"mscale": float("inf")},
                   {"attention_factor": float("nan")}, {"beta_fast": 1e-320}, {"factor": -1}):  # fmt: skip
        refused(load_decoder, config_of(rope_parameters={**yarn, **change}))
    for change in ({"low_freq_factor": 4.0, "high_freq_factor": 4.0}, {"low_freq_factor": "1"}):
        refused(load_decoder, config_of(rope_parameters={**llama3, **change}))


def test_models_that_run_through_transformers_are_held_to_their_weights(tmp_path):
    sizes = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    load_decoder(tmp_path)
    with cheaply():
        for key, value in {"vocab_size": HUGE, "n_embd": 10**8, "n_layer": 10**9, "n_positions": 10**10,
                           "n_inner": 10**9}.items():  # fmt: skip
            (tmp_path / "config.json").write_text(json.dumps({**whole, key: value}))
            refused(load_decoder, tmp_path)
        for value in (-1, "x", [], None, float("nan"), 10**400):
            (tmp_path / "config.json").write_text(json.dumps({**whole, "n_layer": value, "n_embd": value}))
            refused(load_decoder, tmp_path)


def test_a_pipe_a_device_and_a_file_without_end_are_no_configs(tmp_path):
    def late(number, frame):
        pytest.fail("it was read")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        for name in ("config.json", "adapter_config.json", "tokenizer_config.json"):
            load = {"c": load_decoder, "a": read_peft, "t": Tokenizer.load}[name[0]]
            os.mkfifo(tmp_path / name)
            refused(load, tmp_path)
            (tmp_path / name).unlink()
            (tmp_path / name).symlink_to("/dev/zero")
            refused(load, tmp_path)
            (tmp_path / name).unlink()
            with (tmp_path / name).open("wb") as file:
                file.truncate(10**11)  # a hole
            refused(load, tmp_path)
            (tmp_path / name).unlink()
    finally:
        signal.alarm(0)


# --- adapters ---


def adapter_of(**changed):
    layers = [LAYER.replace(".0.", f".{i}.") for i in range(4)]
    pairs = {f"{layer}.lora_A.weight": torch.ones(2, 4).numpy() for layer in layers}
    pairs |= {f"{layer}.lora_B.weight": torch.ones(4, 2).numpy() for layer in layers}
    content = json.dumps({**ADAPTER, **changed}).encode()
    return folder_of(
        "hostile_adapter", {"adapter_config.json": content, "adapter_model.safetensors": to_safetensors(pairs)}
    )


def test_numbers_of_an_adapter_are_finite_and_positive():
    assert read_peft(adapter_of()).scale("model.layers.0.self_attn.q_proj") == 2.0
    for key in ("r", "lora_alpha"):
        for value in (0, -1, float("nan"), float("inf"), 10**400, True, None, "8", [8], {}):
            assert key in refused(read_peft, adapter_of(**{key: value}))
    for key in ("rank_pattern", "alpha_pattern"):
        for value in (float("nan"), float("inf"), -1, "8", None, {"a": 1}):
            assert key in refused(read_peft, adapter_of(**{key: {"q_proj": value}}))
    for value in (float("nan"), float("inf"), -0.5, 1, "x", [0.1], True):
        assert "lora_dropout" in refused(read_peft, adapter_of(lora_dropout=value))


def test_values_of_every_kind_in_an_adapter_never_crash():
    for key in (*ADAPTER, "bias", "modules_to_save", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights",
                "base_model_name_or_path", "layers_pattern", "layers_to_transform", "exclude_modules"):  # fmt: skip
        for value in ODD:
            try:
                read_peft(adapter_of(**{key: value}))
            except HoneError as error:
                if "\n" in str(error) or len(str(error)) > 600:
                    pytest.fail(f"{key}={str(value)[:40]}: {error}")


def test_slow_patterns_of_an_adapter_are_stopped():
    for key, pattern in SLOW.items():
        said = refused(read_peft, adapter_of(**{key: {"k_proj": 2, pattern: 2}}))
        assert "processor time" in said, f"{key} {pattern}: {said}"
    for key in ("target_modules", "layers_pattern", "exclude_modules"):  # what says nothing that the weights do not
        assert read_peft(adapter_of(**{key: "(.*)*(.*)*x"})).tensors


def test_weights_of_an_adapter_are_floats():
    folder = adapter_of()
    for dtype in (torch.complex64, torch.int8, torch.bool):
        pair = {"lora_A": torch.ones(2, 4, dtype=dtype), "lora_B": torch.ones(4, 2, dtype=dtype)}
        save_file({f"{LAYER}.{name}.weight": x for name, x in pair.items()}, folder / "adapter_model.safetensors")
        assert str(dtype) in refused(read_peft, folder)


# --- tokenizers ---


def words(**changed):
    content = json.loads((CORPUS / "tokenizer" / "split").read_bytes())
    files = {
        "tokenizer.json": json.dumps({**content, **changed}).encode(),
        "tokenizer_config.json": b'{"eos_token": "<eos>"}',
    }
    return folder_of("hostile_words", files)


def split(pattern: str):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replaced(pattern: str, content: str = "y"):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def test_tokenizers_that_panic_hang_or_grow_are_refused():
    assert Tokenizer.load(words()).encode("ab")
    growing = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 999}] * 9
    cases = {
        "nested repetition": {"pre_tokenizer": split("(a+)+$")},
        "of another letter": {"pre_tokenizer": split("(?:Q|QQ)+Z$")},
        "in a normalizer": {"normalizer": replaced("(x|xx)+$")},
        "alternatives": {"pre_tokenizer": split(r"(\w|\d|_)*(\w|\d)*(\w|\d)*=")},
        "no regex": {"pre_tokenizer": split("(")},
        "growth": {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "a"), *growing]}},
        "half a charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
        "a token that is not there": {"post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}], "pair": [],
            "special_tokens": {}}},
        "an unknown word that is not there": {"model": {
            "type": "WordPiece", "unk_token": "q", "continuing_subword_prefix": "#", "max_input_chars_per_word": 10**18,
            "vocab": {"a": 0, "<eos>": 1}}},
        "an id beyond": {"model": {"type": "Unigram", "unk_id": 99, "vocab": [["a", -1.0]], "byte_fallback": False}},
        "a list for a model": {"model": [1]},
        "nothing": {"model": None},
    }  # fmt: skip
    with cheaply():
        for name, change in cases.items():
            try:
                found = Tokenizer.load(words(**change))
            except HoneError as error:
                said = str(error)
            else:
                said = f"it encodes\n{found.encode('some text')}"
            if "\n" in said or len(said) > 800:
                pytest.fail(f"{name}: {said}")


def test_padding_and_cutting_that_a_file_asks_for_are_passed_over():
    padding = {"strategy": {"Fixed": 10**13}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "a"}  # fmt: skip
    cutting = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    with cheaply():
        assert len(Tokenizer.load(words(padding=padding, truncation=cutting)).encode("ab ab ab")) > 2


def test_ids_of_every_kind_in_a_tokenizer_config_never_crash():
    inner = tokenizer().inner.to_str().encode()
    for key in ("9" * 5000, "-1", "x", "4294967296", "1.5", ""):
        content = {"eos_token": "<eos>", "added_tokens_decoder": {key: {"content": "<new>"}}}
        files = {"tokenizer_config.json": json.dumps(content).encode(), "tokenizer.json": inner}
        refused(Tokenizer.load, folder_of("hostile_ids", files))
    files = {"tokenizer_config.json": b'{"eos_token": "<eos>"}', "tokenizer.json": inner}
    for value in (2**32, 2**70, -1, "x", [2**40], [[1]], {"a": 1}, 1.5):
        more = {"generation_config.json": json.dumps({"eos_token_id": value}).encode()}
        refused(Tokenizer.load, folder_of("hostile_stops", {**files, **more}))
