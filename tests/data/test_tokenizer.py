"""The tokenizer: nothing added, nothing lost, special tokens only on request, and Hugging Face agrees."""

import json
import random
from array import array
from dataclasses import replace

import pytest
import tokenizers
from each import each
from tokenizers import processors

from hone.data.text.chat import DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer, byte_of, check_fits, train_bpe
from hone.errors import HoneError

TEXTS = ["the answer is 42, don't you think?\n", "hello world 1234 + 5678 = 6912\n\n", "the the the hello hello"] * 4
NASTY = ["", " ", "\n\n", "日本語 🙂\u200d", "a\x00b", "<eos>", "<eos", "<pad><eos>", "  12 345 ", "\r\n\t", "e\u0301"]


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return train_bpe(TEXTS, vocab_size=320, specials=["<|user|>", "<think>"])


def test_specials_come_first_and_pad_is_zero(tok):
    assert (tok.pad_id, tok.eos_id, tok.id_of("<|user|>"), tok.id_of("<think>")) == (0, 1, 2, 3)
    assert tok.stop_ids == {1}
    assert tok.bos_id is None
    assert tok.start_ids == []


@each("text", [*TEXTS[:3], *NASTY])
def test_decoding_gives_the_text_back_and_nothing_is_added(tok, text):
    for specials in (False, True):
        assert tok.decode(tok.encode(text, specials=specials)) == text
    assert not set(tok.encode(text)) & {0, 1, 2, 3}


def test_special_tokens_in_text_are_text_unless_asked(tok):
    assert tok.encode("a<eos>b", specials=True) == [*tok.encode("a"), 1, *tok.encode("b")]
    assert 1 not in tok.encode("a<eos>b")
    assert tok.encode("a<eos>b", specials=True) != tok.encode("a<eos>b")  # the first call changed nothing
    assert 1 not in tok.encode("a<eos>b")


def test_decoding_without_specials_leaves_them_out(tok):
    ids = tok.encode("<|user|>hi<eos>", specials=True)
    assert tok.decode(ids) == "<|user|>hi<eos>"
    assert tok.decode(ids, specials=False) == "hi"


def test_many_at_once_are_what_each_is_alone(tok):
    inner = tokenizers.Tokenizer.from_str(tok.inner.to_str())
    inner.enable_padding(length=40)  # as a tokenizer.json may ask for
    texts = [*TEXTS[:3], *NASTY]
    for one in (tok, replace(tok, inner=inner)):
        for specials in (False, True):
            assert one.encode_all(texts, specials=specials) == [tok.encode(t, specials=specials) for t in texts]
    rows = tok.encode_all(texts)
    assert tok.encode_all([]) == tok.decode_all([]) == []
    for known in (rows, [*rows, *rows, [5, tok.vocab_size + 3, 6], [10**6]]):
        single = [tok.decode(ids) for ids in known]
        assert tok.decode_all(known) == tok.decode_all([array("q", ids) for ids in known]) == single
    with pytest.raises(HoneError, match="surrogate"):
        tok.encode_all(["fine", "\ud800"])
    with pytest.raises(TypeError):
        tok.encode_all(["fine", 3])


def words(names: list[str], decoder: object = None) -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    inner.decoder = decoder
    return Tokenizer(inner, eos="a")


@pytest.mark.parametrize("kind", ["bytes", "holes", "words", "metaspace"])
def test_the_texts_of_many_arrays_are_the_librarys(tok, kind):
    draw = random.Random(0)
    names = ["a", "b c", "\u2581d", "", "\U0001f642"]
    made = {"bytes": tok, "words": words(names), "metaspace": words(names, tokenizers.decoders.Metaspace())}
    made["holes"] = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "Ã": 3, "©": 7}, [])), eos="a")
    made["holes"].inner.decoder = tokenizers.decoders.ByteLevel()
    one = made[kind]
    rows = [[draw.randrange(one.vocab_size) for _ in range(draw.choice([0, 1, 2, 30]))] for _ in range(300)]
    assert (one._pieces is None) == (kind == "metaspace")
    assert one.decode_all([array("q", ids) for ids in rows]) == one._with_specials.decode_batch(
        rows, skip_special_tokens=False
    )
    whole = [array("q", ids) for ids in rows]
    assert one.decode_all(whole, specials=False) == one._with_specials.decode_batch(rows, skip_special_tokens=True)


def test_bytes_that_are_no_characters_are_shown_as_the_library_shows_them(tok):
    draw, ends = random.Random(1), [0x00, 0x7F, 0x80, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xFF]
    byte = {b: tok.id_of(c) for c, b in byte_of().items()}
    rows = [[byte[draw.choice(ends)] for _ in range(8)] for _ in range(5000)]
    assert tok.decode_all([array("q", ids) for ids in rows]) == tok._with_specials.decode_batch(rows)


def test_an_id_beyond_the_vocabulary_is_shown_not_swallowed(tok):
    hi = tok.encode("hi")
    assert tok.decode([*hi, tok.vocab_size, *hi, tok.vocab_size + 7]) == "hi\ufffdhi\ufffd"


def test_digits_stay_single_tokens_however_often_they_stand_together(tok):
    assert len(tok.encode("1234")) == 4
    for word, count in (("1234", 4), ("abcd", 1)):
        assert len(train_bpe([f"{word} {word} {word}"] * 9, vocab_size=300).encode(word)) == count


def test_training_twice_gives_the_same_tokenizer(tok):
    again = train_bpe(iter(TEXTS), vocab_size=320, specials=["<|user|>", "<think>"])
    assert again.inner.to_str() == tok.inner.to_str()


def test_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(HoneError, match="at least 258"):
        train_bpe(TEXTS, vocab_size=257)
    with pytest.raises(HoneError, match="no text"):
        train_bpe(iter([]), vocab_size=300)
    assert train_bpe([], vocab_size=258).encode("é\xff") != []  # bytes alone need no text


def test_unpaired_surrogate_is_an_error_that_says_so(tok):
    for specials in (False, True):
        with pytest.raises(HoneError, match="surrogate"):
            tok.encode("a\ud800b", specials=specials)


def test_a_length_limit_inside_tokenizer_json_does_not_cut(tok):
    inner = tokenizers.Tokenizer.from_str(tok.inner.to_str())
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    limited = Tokenizer(inner, eos="<eos>", pad="<pad>")
    assert limited.encode("the answer is 42 hello") == tok.encode("the answer is 42 hello")


def test_all_stop_tokens_are_in_stop_ids(tok):
    assert replace(tok, stops=("<|user|>",)).stop_ids == {1, 2}
    with pytest.raises(HoneError, match="no token '<nope>'"):
        replace(tok, stops=("<nope>",))


def test_without_a_pad_token_eos_pads(tok):
    assert replace(tok, pad=None).pad_id == tok.eos_id


def test_bos_starts_plain_text_only_where_the_post_processor_adds_it(tok):
    inner = tokenizers.Tokenizer.from_str(tok.inner.to_str())
    inner.post_processor = processors.TemplateProcessing(single="<think> $A", special_tokens=[("<think>", 3)])
    assert Tokenizer(inner, eos="<eos>", bos="<think>").start_ids == [3]
    assert replace(tok, bos="<think>").start_ids == []
    assert Tokenizer(inner, eos="<eos>", bos="<think>").encode("a") == tok.encode("a")


def test_check_fits_compares_with_the_models_vocabulary(tok):
    check_fits(tok, tok.vocab_size)
    with pytest.raises(HoneError, match=f"the tokenizer has {tok.vocab_size} tokens, the model {tok.vocab_size - 1}:"):
        check_fits(tok, tok.vocab_size - 1)


def test_a_vocabulary_with_holes_needs_its_largest_id():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 9}, unk_token="<eos>"))
    assert Tokenizer(inner, eos="<eos>").vocab_size == 10


def test_save_and_load_give_the_same_tokenizer(tok, tmp_path):
    rich = replace(tok, stops=("<|user|>",), bos="<think>", chat_template="{{ x }}\r\né")
    rich.save(tmp_path / "a" / "b")
    back = Tokenizer.load(tmp_path / "a" / "b")
    for name in ("eos", "pad", "bos", "stops", "chat_template", "stop_ids", "vocab_size"):
        assert getattr(back, name) == getattr(rich, name)
    for text in NASTY:
        assert back.encode(text) == tok.encode(text)
        assert back.encode(text, specials=True) == tok.encode(text, specials=True)


def test_saving_without_a_template_removes_an_old_one(tok, tmp_path):
    replace(tok, chat_template="old").save(tmp_path)
    tok.save(tmp_path)
    assert Tokenizer.load(tmp_path).chat_template is None


def test_stop_tokens_of_generation_config_are_read(tok, tmp_path):
    tok.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert Tokenizer.load(tmp_path).stop_ids == {1, 2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 99999}')
    with pytest.raises(HoneError, match="99999"):
        Tokenizer.load(tmp_path)


def test_hugging_face_forms_of_tokens_and_templates_are_read(tok, tmp_path):
    tok.save(tmp_path)
    config = {
        "eos_token": {"content": "<eos>", "special": True},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    back = Tokenizer.load(tmp_path)
    assert (back.eos, back.pad, back.chat_template) == ("<eos>", None, "yes")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "there is no tokenizer.json"),
        ("tokenizer_config.json", None, "there is no tokenizer_config.json"),
        ("tokenizer.json", "{", "is not JSON"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer.json", "[1]", "not a JSON object"),
        ("tokenizer_config.json", "\xff", "is not JSON"),
        ("tokenizer_config.json", "{}", 'names no "eos_token"'),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token is 3"),
        ("tokenizer_config.json", '{"eos_token": "<missing>"}', "no token '<missing>'"),
        ("tokenizer_config.json", '{"eos_token": "<eos>", "stop_tokens": 1}', "stop_tokens"),
        ("tokenizer_config.json", '{"eos_token": "<eos>", "chat_template": 1}', "chat_template"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(tok, tmp_path, file, content, says):
    tok.save(tmp_path)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(HoneError) as caught:
        Tokenizer.load(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(HoneError, match="no tokenizer folder"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize("model_type", [None, "llama"])
def test_auto_tokenizer_loads_the_folder_with_equal_ids(tok, tmp_path, model_type):
    from transformers import AutoTokenizer

    replace(tok, chat_template=DEFAULT_TEMPLATE).save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    pieces = ["don't", " ", "\n", "\r", "12", "hello", "é", "(", "<eos>", "<think>", " world", "the", "."]
    draw = random.Random(0)
    for text in [*NASTY, *("".join(draw.choices(pieces, k=12)) for _ in range(200))]:
        assert theirs(text)["input_ids"] == tok.encode(text, specials=True)
        assert theirs(text, split_special_tokens=True)["input_ids"] == tok.encode(text)
        assert theirs.decode(tok.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (tok.eos_id, tok.pad_id, None)
    assert theirs.chat_template == DEFAULT_TEMPLATE
