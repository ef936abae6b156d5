"""GGUF files against the models they were written from, against transformers' reading of them, and under attack."""

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from gguf import GGMLQuantizationType as Kind
from gguf_files import SPECIALS, byte_level, model_of, shape_of, tensors_of, write, written
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hone.data.text.chat import render
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_decoder
from hone.model.formats.gguf import config_of, convert_gguf, halves, load_gguf, read_gguf
from hone.model.formats.gguf_tokenizer import KINDS, build_tokenizer

TOKENS = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SmolLM2": ("llama", "llama", {"tie_word_embeddings": True}),
    "Llama 2": ("llama", "llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "Llama 3": ("llama", "llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "Llama with every bias": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "linear scaling": (
        "llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "Mistral": ("mistral", "llama", {"sliding_window": None, "head_dim": 8}),
    "Qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "Qwen2.5 with yarn": ("qwen2", "qwen2", {"rope_parameters": YARN}),
    "Qwen3": ("qwen3", "qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}  # fmt: skip
TRICKY = [
    "", " ", "the cat", "  two  spaces ", "12345 6.78", "tab\tline\n\n\r\nend", "naïve café 東京 🙂🏽 e\u0301",
    "<|im_end|>x<think>y</think>", "it's they'LL", "a\u200bb\x00c", "½ ² Ⅷ ٣",
]  # fmt: skip


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.lm_head(model(TOKENS)) if isinstance(model, Decoder) else model(TOKENS).logits


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A llama file that the tests below may read but not change."""
    return written(tmp_path_factory.mktemp("gguf") / "small.gguf", "llama", model_of("llama"))


# --- the numbers ---


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_the_file_was_written_from(name, tmp_path):
    family, arch, settings = MODELS[name]
    theirs = model_of(family, **settings)
    ours, _ = load_gguf(written(tmp_path / "m.gguf", arch, theirs))
    expected = logits_of(theirs)
    torch.testing.assert_close(logits_of(ours), expected, rtol=2e-5, atol=2e-5)
    assert expected.std() > 0.1, "flat logits would agree whatever the attention did"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_is_converted_is_what_transformers_reads_from_the_file(family, kind, tmp_path):
    path = written(tmp_path / "m.gguf", family, model_of(family), kind=kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    convert_gguf(path, tmp_path / "folder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    expected = theirs.state_dict()
    for name, x in again.state_dict().items():
        assert torch.equal(x, expected[name]), name
    torch.testing.assert_close(logits_of(again), logits_of(theirs), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits_of(load_decoder(tmp_path / "folder")), logits_of(theirs), rtol=2e-5, atol=2e-5)


def test_a_window_makes_a_llama_file_a_mistral(tmp_path):
    theirs = model_of("mistral", sliding_window=5)
    shape = shape_of(theirs.config) | {"attention.sliding_window": 5}
    ours, _ = load_gguf(written(tmp_path / "m.gguf", "llama", theirs, shape=shape))
    assert ours.config.family == "mistral"
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=2e-5, atol=2e-5)


@each("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_scales_linearly_as_in_llama_cpp(key, tmp_path):
    theirs = model_of("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    shape = {k: v for k, v in shape_of(theirs.config).items() if not k.startswith("rope.scal")} | {key: 4.0}
    ours, _ = load_gguf(written(tmp_path / f"{key}.gguf", "llama", theirs, shape=shape))
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=2e-5, atol=2e-5)


def test_a_file_that_counts_no_key_value_heads_has_as_many_as_query_heads(tmp_path):
    theirs = model_of("qwen2", num_key_value_heads=4)
    shape = {k: v for k, v in shape_of(theirs.config).items() if k != "attention.head_count_kv"}
    ours, _ = load_gguf(written(tmp_path / "m.gguf", "qwen2", theirs, shape=shape))
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=2e-5, atol=2e-5)


def test_numbers_of_the_metadata_are_the_decimals_that_were_meant(small):
    config = config_of(read_gguf(small))
    assert (config.rms_norm_eps, config.rope.theta) == (1e-5, 10_000.0)


def test_rows_of_a_head_go_from_pairs_to_halves():
    # two heads of four rows; pairs (0, 1), (2, 3): first members 0 2, second members 1 3
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert halves(rows[:, 0], 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_the_weights_can_be_trained_on_and_do_not_hang_on_the_file(small, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(small.read_bytes())
    decoder, _ = load_gguf(copy)
    before = logits_of(decoder)
    copy.write_bytes(bytes(copy.stat().st_size))
    assert torch.equal(logits_of(decoder), before)
    decoder.lm_head(decoder(TOKENS)).sum().backward()
    assert all(p.grad is not None for p in decoder.parameters())


# --- the tokenizer ---


def test_the_tokenizer_comes_back(small, tmp_path):
    trained, words = byte_level()
    convert_gguf(small, tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TRICKY:
        ids = ours.encode(text, specials=True)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids) == text
        if not any(name in text for name in SPECIALS):
            assert ids == trained.encode(text)
    assert (ours.eos, ours.pad, ours.bos, ours.stops) == ("<|im_end|>", "<pad>", "<|im_start|>", ("<eos>",))
    assert (theirs.eos_token, theirs.pad_token, theirs.bos_token) == ("<|im_end|>", "<pad>", "<|im_start|>")
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [words["eos_token_id"], words["eot_token_id"]]
    assert ours.vocab_size == 318, "unused rows are no tokens"


def test_special_tokens_are_special_and_the_users_own_are_whole(small):
    tokenizer = load_gguf(small)[1]
    assert tokenizer.special_tokens == {"<pad>", "<eos>", "<|im_start|>", "<|im_end|>"}
    assert len(tokenizer.encode("<think>")) == 1, "part of a text, so that it is whole even where specials are text"
    assert len(tokenizer.encode("<|im_end|>", specials=True)) == 1
    assert len(tokenizer.encode("<|im_end|>")) > 1


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("gpt-2", "it's 1234\n\nx", ["it", "'s", "Ġ1234", "Ċ", "Ċ", "x"]),
        ("smollm", "it's 1234\n\nx", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ċ", "Ċ", "x"]),
        ("llama-bpe", "it'S 1234\n\nx (y)!!\n", ["it", "'S", "Ġ", "123", "4", "ĊĊ", "x", "Ġ(", "y", ")!!Ċ"]),
        ("qwen2", "it'S 1234\n\nx (y)!!\n", ["it", "'S", "Ġ", "1", "2", "3", "4", "ĊĊ", "x", "Ġ(", "y", ")!!Ċ"]),
        ("tekken", "camelCase 12 a//\n", ["camel", "Case", "Ġ", "1", "2", "Ġa", "//Ċ"]),
    ],
)
def test_text_is_cut_into_words_as_each_family_does(kind, text, words, tmp_path):
    meta = {f"tokenizer.ggml.{key}": value for key, value in byte_level()[1].items()}
    tokenizer = build_tokenizer(meta | {"tokenizer.ggml.pre": kind}, tmp_path)
    assert [word for word, _ in tokenizer.inner.pre_tokenizer.pre_tokenize_str(text)] == words


def test_every_kind_gives_every_text_back(tmp_path):
    meta = {f"tokenizer.ggml.{key}": value for key, value in byte_level()[1].items()}
    for kind in KINDS:
        tokenizer = build_tokenizer(meta | {"tokenizer.ggml.pre": kind}, tmp_path)
        for text in TRICKY:
            composed = text.replace("e\u0301", "é") if kind in ("qwen2", "deepseek-r1-qwen") else text
            assert tokenizer.decode(tokenizer.encode(text, specials=True)) == composed, kind


def test_llama_3_takes_a_whole_word_where_merges_do_not_lead_to_it(tmp_path):
    words = byte_level()[1]
    words["tokens"][-1], words["token_type"][-1] = "zqz", 1
    meta = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    whole = build_tokenizer(meta | {"tokenizer.ggml.pre": "llama-bpe"}, tmp_path)
    assert whole.encode("zqz") == [319]
    assert len(build_tokenizer(meta, tmp_path).encode("zqz")) == 3


@pytest.mark.parametrize(
    ("add", "pre", "starts"), [(True, "smollm", 1), (False, "llama-bpe", 0), (None, "llama-bpe", 1)]
)
def test_text_starts_with_bos_where_the_file_says_so(add, pre, starts, tmp_path):
    words = {key: value for key, value in byte_level()[1].items() if key != "add_bos_token"}
    words |= {"pre": pre} | ({} if add is None else {"add_bos_token": add})
    tokenizer = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in words.items()}, tmp_path)
    assert tokenizer.start_ids == [words["bos_token_id"]] * starts


def test_the_chat_template_comes_along(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\r\n{{ m.content }}<|im_end|>{% endfor %}"
    path = written(tmp_path / "m.gguf", "llama", model_of("llama"), template=template)
    convert_gguf(path, tmp_path / "folder")
    chat = [{"role": "user", "content": "hi ü"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "folder").apply_chat_template(chat, tokenize=False)
    assert render(Tokenizer.load(tmp_path / "folder"), chat) == theirs
    assert Tokenizer.load(tmp_path / "folder").chat_template == template


def pieces() -> dict[str, Any]:
    """A vocabulary of scored pieces: bytes, letters, and longer ones, best first."""
    longer = ["he", "ll", "llo", "hello", "\u2581hello", "\u2581w"]
    letters = ["\u2581", *"helowrd"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *longer, *letters]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(longer) + len(letters))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(longer) + len(letters))],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_vocabulary_of_scored_pieces(tmp_path):
    model, words = model_of("llama"), pieces()
    convert_gguf(written(tmp_path / "m.gguf", "llama", model, words=words), tmp_path / "folder")
    ours, theirs = Tokenizer.load(tmp_path / "folder"), AutoTokenizer.from_pretrained(tmp_path / "folder")
    at = {token: i for i, token in enumerate(words["tokens"])}
    # h e l l o: "he" (0) first, then "ll" (-1), "llo" (-2), "hello" (-3) and with its space (-4)
    assert ours.encode("hello") == [at["\u2581hello"]]
    assert ours.encode("hello w\u00e9") == [at["\u2581hello"], at["\u2581w"], at["<0xC3>"], at["<0xA9>"]]
    for text in ("hello", "hello w\u00e9", "world hello", "\U0001f642 x\n"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
        assert theirs(text)["input_ids"] == [1, *ours.encode(text)]
        assert ours.decode(ours.encode(text)) == text
    assert ours.start_ids == [1]


# --- under attack ---


def refusal(path: Any) -> str:
    with pytest.raises(HoneError) as caught:
        load_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
    whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
    places = [0, 1, 3, 4, 7, 8, 15, 16, 23, 24, 31, 60, *range(100, len(whole), len(whole) // 40), len(whole) - 1]
    for n in places:
        cut.write_bytes(whole[:n])
        assert "damaged" in refusal(cut), n


def test_bytes_changed_in_the_header_never_raise_anything_else(small, tmp_path):
    whole, spoilt, draw = small.read_bytes(), tmp_path / "spoilt.gguf", random.Random(0)
    header = read_gguf(small).tensors["token_embd.weight"].data_offset
    for _ in range(120):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 4])):
            data[draw.randrange(header)] = draw.randrange(256)
        spoilt.write_bytes(data)
        with contextlib.suppress(HoneError):  # a changed letter of a token does no harm
            load_gguf(spoilt)


@pytest.mark.timeout(20)
def test_an_array_that_claims_to_be_endless_is_refused_at_once(small, tmp_path):
    data = bytearray(small.read_bytes())
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8  # its type, its items' type
    data[at : at + 8] = (2**60).to_bytes(8, "little")
    path = tmp_path / "endless.gguf"
    path.write_bytes(data)
    assert "ends too early" in refusal(path)


@pytest.mark.parametrize(("content", "says"), [(b"", "damaged"), (b"PK\x03\x04" * 50, "magic"), (b"\0" * 500, "magic")])
def test_what_is_no_gguf_file_is_refused(content, says, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    assert says in refusal(tmp_path / "m.gguf")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "no GGUF file" in refusal(tmp_path / "absent.gguf")
    assert "no GGUF file" in refusal(tmp_path)


SPOILT_SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, "mixture of experts"),
    "partial rotation": ({"rope.dimension_count": 8}, "partial_rotary_factor"),
    "unequal values": ({"attention.value_length": 8}, "values of another size"),
    "unequal layers": ({"attention.head_count_kv": [2, 4]}, "unequal attention.head_count_kv"),
    "no layers": ({"block_count": 0}, "2 layers, its metadata say 0"),
    "no heads": ({"attention.head_count": 0}, "64 query rows, its metadata say 0 heads"),
    "heads that do not divide": ({"attention.head_count_kv": 3}, "3 key-value heads"),
    "another scaling": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
    "more layers than there are": ({"block_count": 2**31}, "2 layers, its metadata say 2147483648"),
    "fewer layers than there are": ({"block_count": 1}, "2 layers, its metadata say 1"),
    "heads of another size": ({"attention.key_length": 2**31}, "4 heads of 2147483648"),
    "another width": ({"feed_forward_length": 128}, "has shape"),
    "a size in words": ({"embedding_length": "wide"}, "embedding_length is 'wide', not a number"),
}


@pytest.mark.parametrize("name", SPOILT_SHAPES)
def test_a_shape_that_the_decoder_does_not_have_is_refused(name, tmp_path):
    changes, says = SPOILT_SHAPES[name]
    model = model_of("llama")
    message = refusal(written(tmp_path / "m.gguf", "llama", model, shape=shape_of(model.config) | changes))
    assert says in message
    assert str(tmp_path / "m.gguf") in message
    assert "config.json" not in message


def test_a_size_that_is_missing_is_named(tmp_path):
    model = model_of("llama")
    shape = {key: value for key, value in shape_of(model.config).items() if key != "block_count"}
    assert "lacks num_hidden_layers" in refusal(written(tmp_path / "m.gguf", "llama", model, shape=shape))


def test_another_architecture_is_refused_by_name(tmp_path):
    parts = {"shape": {}, "tensors": {"x.weight": np.zeros((2, 32), np.float32)}, "words": byte_level()[1]}
    assert "architecture gemma2" in refusal(write(tmp_path / "m.gguf", arch="gemma2", **parts))


def spoilt_tensors() -> dict[str, tuple[dict[str, Any], str]]:
    nan = np.zeros(64, np.float32)
    nan[7] = np.nan
    return {
        "a strange one": ({"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, "tensor blk.0.attn_sinks.weight"),
        "whole numbers": ({"output_norm.weight": np.ones(64, np.int32)}, "is I32"),
        "not a number": ({"output_norm.weight": nan}, "not finite"),
        "odd rows": ({"blk.0.attn_k.weight": np.zeros((31, 64), np.float32)}, "31 rows"),
        "no embedding": ({"token_embd.weight": None}, "no tensor token_embd.weight"),
        "no norm": ({"blk.1.ffn_norm.weight": None}, "the weights lack model.layers.1.post_attention_layernorm.weight"),
        "other frequencies": ({"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}, "rotary frequencies"),
    }


@pytest.mark.parametrize("name", spoilt_tensors())
def test_weights_that_the_decoder_does_not_have_are_refused(name, tmp_path):
    changes, says = spoilt_tensors()[name]
    model = model_of("llama")
    tensors = {key: x for key, x in (tensors_of(model, "llama") | changes).items() if x is not None}
    assert says in refusal(written(tmp_path / "m.gguf", "llama", model, tensors=tensors))


SPOILT_WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "another tokenizer": ({"model": "bert"}, "tokenizer of kind bert"),
    "another cut": ({"pre": "viking"}, "as viking"),
    "no cut": ({"pre": None}, "tokenizer.ggml.pre"),
    "no tokens": ({"tokens": None}, "holds no tokens"),
    "no types": ({"token_type": None}, "token_type"),
    "few types": ({"token_type": [1, 1]}, "320 tokens, 2 types"),
    "no end": ({"eos_token_id": None}, "no eos token"),
    "an end outside": ({"eos_token_id": 4000}, "eos_token_id is 4000"),
    "an end that is unused": ({"eos_token_id": 319}, "'[PAD319]' is unused"),
    "a merge of nothing": ({"merges": ["a b", "zz yy"]}, "its merges"),
    "half a merge": ({"merges": ["a"]}, "its merges"),
    "no space before a text": ({**pieces(), "add_space_prefix": False}, "no space before"),
}


@pytest.mark.parametrize("name", SPOILT_WORDS)
def test_a_tokenizer_that_is_not_known_or_whole_is_refused(name, tmp_path):
    changes, says = SPOILT_WORDS[name]
    words = {key: value for key, value in (byte_level()[1] | changes).items() if value is not None}
    message = refusal(written(tmp_path / "m.gguf", "llama", model_of("llama"), words=words))
    assert says in message
    assert str(tmp_path / "m.gguf") in message


def test_a_token_that_stands_twice_is_refused(tmp_path):
    words = byte_level()[1]
    words["tokens"][30] = words["tokens"][31]
    assert "stands twice" in refusal(written(tmp_path / "m.gguf", "llama", model_of("llama"), words=words))


def test_more_tokens_than_rows_are_refused(tmp_path):
    message = refusal(written(tmp_path / "m.gguf", "llama", model_of("llama", vocab_size=310)))
    assert "318 tokens, the model 310" in message
