"""Tokenizer folders in the layouts that published models have: names, stop tokens, templates, older files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from each import each
from template_zoo import ANSWER, FAMILIES, PLAIN, QUESTION, TOOLS, hugging_face, tokenizer_of
from tokenizers import processors

from hone.data.text.chat import encode_turns, render, render_prompt
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError

pytestmark = pytest.mark.filterwarnings("ignore:the chat template closes its generation mark")


def put(folder: Path, **files) -> Path:
    """Write JSON files (None removes one); `tokenizer_config=...` is tokenizer_config.json."""
    for name, value in files.items():
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        if value is not None:
            path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture
def llama3(tmp_path) -> Path:
    tok = tokenizer_of("llama3")
    tok.inner.save(str(tmp_path / "tokenizer.json"))
    end = {"content": "<|eot_id|>", "special": True, "lstrip": False, "rstrip": False, "__type": "AddedToken"}
    config = {"bos_token": "<|begin_of_text|>", "eos_token": end, "chat_template": tok.chat_template}
    return put(tmp_path, tokenizer_config=config)


def test_every_stop_token_of_generation_config_and_config_stops(llama3):
    ids = {name: tokenizer_of("llama3").id_of(f"<|{name}|>") for name in ("eot_id", "end_of_text", "eom_id")}
    assert Tokenizer.load(llama3).stop_ids == {ids["eot_id"]}
    put(llama3, config={"eos_token_id": [ids["end_of_text"], ids["eot_id"]]})
    assert Tokenizer.load(llama3).stop_ids == {ids["eot_id"], ids["end_of_text"]}
    put(llama3, generation_config={"eos_token_id": ids["eom_id"]})
    assert Tokenizer.load(llama3).stop_ids == set(ids.values())
    put(llama3, config={"eos_token_id": 99999}, generation_config={"eos_token_id": None})
    assert Tokenizer.load(llama3).stop_ids == {ids["eot_id"]}


def test_an_ordinary_token_in_config_is_the_default_of_its_class_and_no_stop_token(llama3):
    letter = tokenizer_of("llama3").encode("a")[0]
    put(llama3, config={"eos_token_id": letter})
    assert letter not in Tokenizer.load(llama3).stop_ids


def test_the_end_of_a_turn_that_only_generation_config_names_is_trained(tmp_path):
    tok = tokenizer_of("gemma")
    tok.inner.save(str(tmp_path / "tokenizer.json"))
    put(tmp_path, tokenizer_config={"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": tok.chat_template})
    with pytest.raises(HoneError, match=r"not with a stop token.*stop_tokens in tokenizer_config.json"):
        encode_turns(Tokenizer.load(tmp_path), [QUESTION, ANSWER])[0]
    put(tmp_path, generation_config={"eos_token_id": [tok.id_of("<eos>"), tok.id_of("<end_of_turn>")]})
    assert encode_turns(Tokenizer.load(tmp_path), [QUESTION, ANSWER])[0] == encode_turns(tok, [QUESTION, ANSWER])[0]


@each("named", ["eos_token", "stop_tokens", "added_tokens_decoder"])
def test_a_stop_token_that_tokenizer_json_holds_as_text_stays_text_in_texts_as_in_transformers(tmp_path, named):
    from transformers import AutoTokenizer

    inner = tokenizers.Tokenizer.from_str(tokenizer_of("chatml").inner.to_str())
    inner.add_tokens([tokenizers.AddedToken("<end>", special=False, normalized=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    i = inner.token_to_id("<end>")
    token = {"content": "<end>", "special": True, "normalized": False}
    value = {"eos_token": "<end>", "stop_tokens": ["<end>"], "added_tokens_decoder": {str(i): token}}[named]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", named: value}
    tok = Tokenizer.load(put(tmp_path, tokenizer_config=config))
    assert i not in tok.encode("2<end>4")
    assert i in tok.encode("2<end>4", specials=True)
    assert tok.decode([*tok.encode("24"), i], specials=False) == "24"
    if named != "stop_tokens":  # Hone's own
        theirs = AutoTokenizer.from_pretrained(str(tmp_path))
        assert theirs("2<end>4", split_special_tokens=True)["input_ids"] == tok.encode("2<end>4")


def test_special_tokens_map_fills_what_the_config_leaves_out(llama3):
    config = json.loads((llama3 / "tokenizer_config.json").read_text())
    put(
        llama3,
        tokenizer_config={k: v for k, v in config.items() if not k.endswith("_token")},
        special_tokens_map={
            "eos_token": {"content": "<|eot_id|>"},
            "bos_token": "<|begin_of_text|>",
            "pad_token": "<|eom_id|>",
        },
    )
    tok = Tokenizer.load(llama3)
    assert (tok.eos, tok.bos, tok.pad) == ("<|eot_id|>", "<|begin_of_text|>", "<|eom_id|>")


def test_without_a_named_eos_the_models_first_stop_token_is_it(llama3):
    end = tokenizer_of("llama3").id_of("<|eot_id|>")
    put(llama3, tokenizer_config={"eos_token": None}, generation_config={"eos_token_id": [end, 0]})
    tok = Tokenizer.load(llama3)
    assert (tok.eos, tok.pad) == ("<|eot_id|>", None)
    assert tok.pad_id == tok.eos_id


def test_tokens_that_only_the_config_adds_are_added(llama3):
    n = tokenizer_of("llama3").vocab_size
    config = json.loads((llama3 / "tokenizer_config.json").read_text())
    added = {
        str(n): {"content": "<|new|>", "special": True},
        str(n + 1): {"content": "<tool>", "special": False, "normalized": False},
        "0": {"content": "<|begin_of_text|>", "special": True},
    }
    put(llama3, tokenizer_config={**config, "added_tokens_decoder": added})
    tok = Tokenizer.load(llama3)
    assert (tok.id_of("<|new|>"), tok.id_of("<tool>"), tok.vocab_size) == (n, n + 1, n + 2)
    assert tok.encode("<|new|><tool>", specials=True) == [n, n + 1]
    assert "<|new|>" in tok.special_tokens
    assert "<tool>" not in tok.special_tokens
    put(llama3, tokenizer_config={**config, "added_tokens_decoder": {str(n + 7): {"content": "<|new|>"}}})
    with pytest.raises(HoneError, match=rf"<\|new\|> is token {n + 7}, in tokenizer.json {n}: correct one"):
        Tokenizer.load(llama3)


@pytest.mark.parametrize("added", [[], {"x": {"content": "y"}}, {"5": 3}, {"5": {"content": 3}}])
def test_malformed_added_tokens_are_refused(llama3, added):
    config = json.loads((llama3 / "tokenizer_config.json").read_text())
    put(llama3, tokenizer_config={**config, "added_tokens_decoder": added or [1]})
    with pytest.raises(HoneError, match="added"):
        Tokenizer.load(llama3)


def test_templates_are_found_in_every_place_and_files_win(llama3):
    config = json.loads((llama3 / "tokenizer_config.json").read_text())
    put(llama3, tokenizer_config={**config, "chat_template": None})
    assert Tokenizer.load(llama3).chat_template is None
    put(llama3, chat_template={"chat_template": "legacy"})
    assert Tokenizer.load(llama3).chat_template == "legacy"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    put(llama3, chat_template=None, tokenizer_config={**config, "chat_template": named})
    tok = Tokenizer.load(llama3)
    assert (tok.chat_template, tok.tool_template) == ("plain", "tools")
    (llama3 / "chat_template.jinja").write_bytes("file\r\né".encode())
    assert Tokenizer.load(llama3).chat_template == "file\r\né"
    (llama3 / "additional_chat_templates").mkdir()
    (llama3 / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    (llama3 / "additional_chat_templates" / "rag.jinja").write_text("other")
    tok = Tokenizer.load(llama3)
    assert (tok.chat_template, tok.tool_template) == ("file\r\né", "tool file")
    (llama3 / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(HoneError, match=r"chat_template\.jinja line 1 is not UTF-8"):
        Tokenizer.load(llama3)


def test_the_only_named_template_is_the_default(llama3):
    config = json.loads((llama3 / "tokenizer_config.json").read_text())
    put(llama3, tokenizer_config={**config, "chat_template": [{"name": "chat", "template": "only"}]})
    assert Tokenizer.load(llama3).chat_template == "only"


@pytest.mark.parametrize("family", [f.name for f in FAMILIES])
def test_saved_folders_load_again_and_in_transformers(family, tmp_path):
    from transformers import AutoTokenizer

    tok = tokenizer_of(family)
    rich = replace(
        tok,
        tool_template=tokenizer_of("qwen25").chat_template,
        settings={"unk_token": tok.eos, "enable_thinking": False},
    )
    rich.save(tmp_path)
    back = Tokenizer.load(tmp_path)
    for name in ("eos", "pad", "bos", "stops", "chat_template", "tool_template", "settings", "stop_ids", "reserved"):
        assert getattr(back, name) == getattr(rich, name)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.unk_token == tok.eos
    text = theirs.apply_chat_template([QUESTION], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert text == render(back, [QUESTION], tools=TOOLS, generation=True)
    text = theirs.apply_chat_template([QUESTION], enable_thinking=False, add_generation_prompt=True, tokenize=False)
    assert text == render(back, [QUESTION], generation=True)
    tok.save(tmp_path)
    assert Tokenizer.load(tmp_path).tool_template is None


@each("family", [f.name for f in FAMILIES if f.bos is not None])
def test_bos_is_never_doubled_where_the_post_processor_adds_it_too(family):
    tok = tokenizer_of(family)
    inner = tokenizers.Tokenizer.from_str(tok.inner.to_str())
    inner.post_processor = processors.TemplateProcessing(single=f"{tok.bos} $A", special_tokens=[(tok.bos, tok.bos_id)])
    adding = replace(tok, inner=inner)
    assert adding.start_ids == [tok.bos_id]
    chat = PLAIN["several turns"] if family != "r1" else [QUESTION, {**ANSWER, "reasoning_content": "hm"}]
    assert encode_turns(adding, chat)[0] == encode_turns(tok, chat)[0]
    theirs = hugging_face(adding).apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=True)
    assert render_prompt(adding, [QUESTION]) == theirs["input_ids"]


def test_a_folder_from_before_tokenizer_json_is_converted(tmp_path):
    tok = tokenizer_of("qwen25")
    tok.inner.model.save(str(tmp_path))  # vocab.json and merges.txt
    specials = {str(tok.id_of(name)): {"content": name, "special": True} for name in tok.special_tokens}
    added = {str(tok.id_of(name)): {"content": name, "special": False} for name in ("<tool_call>", "</tool_call>")}
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": specials | added}
    put(tmp_path, tokenizer_config=config)
    old = Tokenizer.load(tmp_path)
    for text in ("the weather in Paris", "é🙂 \n\n x", "<|im_start|>user\nhi<|im_end|><tool_call>"):
        assert old.encode(text, specials=True) == tok.encode(text, specials=True)


def test_a_sentencepiece_folder_that_cannot_be_converted_names_the_remedy(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    put(tmp_path, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})
    with pytest.raises(HoneError, match=r"has no tokenizer.json, and tokenizer.model cannot be.*pip install") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_settings_that_are_no_object_are_refused(llama3):
    config = json.loads((llama3 / "tokenizer_config.json").read_text())
    put(llama3, tokenizer_config={**config, "chat_settings": [1]})
    with pytest.raises(HoneError, match="chat_settings"):
        Tokenizer.load(llama3)
