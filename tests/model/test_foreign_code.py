"""Code that lies beside a model never runs unless that was asked for, and loading a model uses no network."""

import ast
import io
import json
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import hone
from hone.data.text.pretrained import CODE, data_only
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.formats.fetch import fetch
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.gguf import load_gguf

SOURCE = Path(hone.__file__).parent
PIECES = Path(__file__).parents[1] / "fuzz" / "corpus" / "gguf" / "pieces"
TRAP = """
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import GPT2Config, GPT2LMHeadModel, GPT2ForSequenceClassification, PreTrainedTokenizerFast
class Config(GPT2Config):
    model_type = "{kind}"
class Model(GPT2LMHeadModel):
    config_class = Config
class Classifier(GPT2ForSequenceClassification):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
"""
MAP = {
    "AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model", "AutoModel": "trap.Model",
    "AutoModelForSequenceClassification": "trap.Classifier", "AutoTokenizer": ["trap.Words", "trap.Words"],
}  # fmt: skip
GPT2 = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}


@pytest.fixture
def lonely(monkeypatch):
    """No connection can be made, somebody answers yes to every question, and no module of a model is on the path."""
    tried = list[str]()

    def refuse(*words, **named):
        tried.append(str(words))
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    yield tried
    assert not tried, f"a connection was tried: {tried[0]}"


def trap(folder: Path, *, kind: str = "trapped", **config) -> Path:
    """Put code into a folder, and configs that name it; the file that appears when it runs."""
    folder.mkdir(exist_ok=True)
    mark = folder / "it_ran"
    for name in ("trap", "tokenization_trap", "modeling_trap", "configuration_trap", "__init__"):
        (folder / f"{name}.py").write_text(TRAP.format(mark=str(mark), kind=kind))
    old = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    (folder / "config.json").write_text(json.dumps({**old, "model_type": kind, "auto_map": MAP, **config}))
    named = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": MAP["AutoTokenizer"]}, "eos_token": "<e>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return mark


def saved(folder: Path, maker) -> Path:
    torch.manual_seed(0)
    maker.from_config(AutoConfig.for_model("gpt2", **GPT2, num_labels=1)).save_pretrained(folder)
    return folder


def test_code_beside_a_gguf_file_does_not_run(lonely, tmp_path):
    mark = trap(tmp_path, kind="llama")
    shutil.copy(PIECES, tmp_path / "model.gguf")
    load_gguf(tmp_path / "model.gguf")
    fetch(str(tmp_path / "model.gguf"), to=tmp_path / "out", note=lambda text: None)
    assert not mark.exists()


def test_code_of_a_language_model_does_not_run_unless_it_is_trusted(lonely, tmp_path):
    mark = trap(saved(tmp_path, AutoModelForCausalLM))
    with pytest.raises(HoneError, match="transformers cannot load"):
        load_decoder(tmp_path)
    assert not mark.exists()
    load_decoder(tmp_path, trust_remote_code=True)
    assert mark.read_text() == "ran", "the trap itself must work"


def test_code_of_a_known_family_does_not_run(lonely, tmp_path):
    mark = trap(saved(tmp_path, AutoModelForCausalLM), kind="gpt2")
    load_decoder(tmp_path)
    assert not mark.exists()


def test_code_of_a_classifier_does_not_run(lonely, tmp_path):
    for kind in ("gpt2", "trapped"):
        folder = saved(tmp_path / kind, AutoModelForSequenceClassification)
        mark = trap(folder, kind=kind, architectures=["GPT2ForSequenceClassification"])
        if kind == "gpt2":
            load_scorer(folder)
        else:
            with pytest.raises(HoneError):
                load_scorer(folder)
        assert not mark.exists(), kind


def test_code_of_a_tokenizer_from_before_tokenizer_json_does_not_run(lonely, tmp_path):
    mark = trap(tmp_path, kind="gpt2")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<e>": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    for name in ("Words", "GPT2Tokenizer", "trap.Words", "os"):
        config = {"tokenizer_class": name, "auto_map": {"AutoTokenizer": MAP["AutoTokenizer"]}, "eos_token": "<e>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with suppress(HoneError):
            Tokenizer.load(tmp_path)
        assert not mark.exists(), name


def test_an_adapter_in_the_folder_does_not_bring_another_model(lonely, tmp_path):
    saved(tmp_path, AutoModelForCausalLM)
    about = {"peft_type": "LORA", "base_model_name_or_path": "somebody/else", "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    load_decoder(tmp_path)


def test_what_transformers_gets_to_see_holds_no_code(tmp_path):
    trap(saved(tmp_path, AutoModelForCausalLM), nested={"auto_map": MAP, "_attn_implementation": "somebody/kernel"})
    with data_only(tmp_path) as place:
        assert sorted(path.suffix for path in place.iterdir() if path.suffix not in (".json", ".safetensors")) == []
        for path in place.glob("*.json"):
            assert not any(f'"{key}"' in path.read_text() for key in CODE), path
    assert not place.exists()


def calls(path: Path) -> set[str]:
    """What is called, or looked up by name, in a module."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_only_one_function_calls_from_pretrained():
    guarded = {
        "from_pretrained": {"data/text/pretrained.py"},
        "from_config": {"data/text/pretrained.py"},
        "snapshot_download": {"model/formats/hub.py"},  # hone fetch
        "hf_hub_download": set[str](),
        "get_class_from_dynamic_module": set[str](),
        "pipeline": set[str](),
    }
    used = {str(path.relative_to(SOURCE)): calls(path) for path in SOURCE.rglob("*.py")}
    for name, allowed in guarded.items():
        users = {path for path, names in used.items() if name in names}
        assert users == allowed, f"{name} is used by {sorted(users - allowed)}"
    tree = ast.parse((SOURCE / "data/text/pretrained.py").read_text(encoding="utf-8"))
    made = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "from_pretrained"]
    assert len(made) == 1
