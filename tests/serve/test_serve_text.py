"""Text as it comes: no half of a character, nothing taken back, and the same in the end as decoding at once."""

import random
from array import array
from functools import partial

import pytest
import tokenizers
from little import make_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from hone.data.text.detokenizer import Detokenizer
from hone.data.text.tokenizer import Tokenizer
from hone.engine.requests import RequestOutput
from hone.engine.stop_strings import StopFinder
from hone.serve.detokenize import Completion, TokenBytes, text_stream, token_text
from hone.types import Stop

TEXT = "Größe 日本 😀😀 €5, the cat sat " * 6


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = text_stream(TokenBytes(tokenizer))
    return [*(stream.push(i) for i in ids), stream.end()]


def metaspace() -> Tokenizer:
    """As Llama's first tokenizers: a blank before each word, and bytes where there is no token."""
    words = ["\u2581", "\u2581the", "\u2581cat", "a", "b"]
    names = ["<s>", "</s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    inner = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner, eos="</s>", bos="<s>")


def test_pieces_make_up_the_text_and_none_ends_inside_a_character():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(TEXT)
    assert any("\ufffd" in tokenizer.decode([i]) for i in ids)  # characters of several tokens are in it
    found = pieces(tokenizer, ids)
    assert "".join(found) == TEXT
    assert not any("\ufffd" in piece for piece in found)


def test_rubbish_bytes_give_the_same_text_as_decoding_at_once():
    tokenizer, draw = make_tokenizer(), random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size + 3) for _ in range(draw.randrange(1, 90))]
        window = Detokenizer(partial(tokenizer.decode, specials=False))
        decoded = [*(window.push(i) for i in ids), window.end()]
        assert "".join(pieces(tokenizer, ids)) == "".join(decoded) == tokenizer.decode(ids, specials=False)


def test_a_completion_keeps_the_blank_it_begins_with():
    tokenizer = metaspace()
    the, cat = tokenizer.id_of("\u2581the"), tokenizer.id_of("\u2581cat")
    alone, after = text_stream(TokenBytes(tokenizer)), text_stream(TokenBytes(tokenizer), [the])
    assert alone.push(cat) == "cat"
    assert after.push(cat) == " cat"
    assert after.push(the) == " the"


def test_bytes_that_stand_for_a_character_are_told_together():
    tokenizer = metaspace()
    ids = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert pieces(tokenizer, [tokenizer.id_of("a"), *ids, tokenizer.id_of("b")]) == ["a", "", "", "€", "b", ""]


def test_a_long_text_in_bytes_keeps_its_characters():
    tokenizer, text = metaspace(), "日本語 😀é " * 9
    ids = [tokenizer.id_of("\u2581" if c == " " else f"<0x{b:02X}>") for c in text for b in c.encode()]
    assert "".join(pieces(tokenizer, ids)) == text
    for cut in range(30):  # a prompt that ends in the middle of it
        stream = text_stream(TokenBytes(tokenizer), ids[:cut])
        said = "".join(stream.push(i) for i in ids[cut:]) + stream.end()
        assert said == text[-len(said) :]
        assert len(said) >= len(tokenizer.decode(ids[cut:]).replace("\ufffd", ""))
    finder = StopFinder(("語 😀é 日本",), tokenizer.decode)
    assert next(n for n, i in enumerate(ids, 1) if finder.push(i)) == len("日本語 😀é 日本".encode())
    assert finder.text() == "日本"


@pytest.mark.parametrize("make", [make_tokenizer, metaspace])
def test_the_bytes_of_tokens_make_up_the_text(make):
    tokenizer = make()
    text = TEXT if make is make_tokenizer else " the cat"
    bytes_of = TokenBytes(tokenizer)
    ids = tokenizer.encode(text)
    assert b"".join(map(bytes_of, ids)).decode().strip() == text.strip()
    assert bytes_of(tokenizer.eos_id) == tokenizer.eos.encode()
    assert bytes_of(10**6) == "\ufffd".encode()


def test_no_two_tokens_look_alike():
    tokenizer = make_tokenizer()
    bytes_of = TokenBytes(tokenizer)
    names = [token_text(bytes_of(i)) for i in range(tokenizer.vocab_size)]
    assert len(set(names)) == len(names)
    assert token_text(b"\xe2\x82") == "bytes:\\xe2\\x82"


def news(tokens: list[int], stop: Stop | None = None, text: str = "") -> RequestOutput:
    logp, raw = array("d", [0.0] * len(tokens)), array("d", [-1.0] * len(tokens))
    return RequestOutput(id=0, tokens=array("q", tokens), logp=logp, raw=raw, stop=stop, text=text)


def test_the_stop_token_is_counted_and_not_shown():
    tokenizer = make_tokenizer()
    choice = Completion(0, TokenBytes(tokenizer), before=(), stops=())
    cat = tokenizer.encode("cat")
    choice.add(news(cat))
    piece = choice.add(news([tokenizer.eos_id], Stop.TOKEN))
    assert (choice.text, choice.tokens, piece.finish, len(piece.logprobs)) == ("cat", len(cat) + 1, "stop", 0)


def test_tokens_of_a_stop_string_have_no_part_in_the_answer():
    tokenizer = make_tokenizer()
    choice = Completion(0, TokenBytes(tokenizer), before=(), stops=("\n\n",))
    ids = tokenizer.encode("ab\n\nc")
    piece = choice.add(news(ids, Stop.STRING, "ab"))
    assert (piece.text, piece.logprobs.offsets, choice.tokens) == ("ab", [0, 1], len(ids))


def test_without_the_engines_text_the_first_stop_string_ends_the_answer():
    tokenizer = make_tokenizer()
    choice = Completion(0, TokenBytes(tokenizer), before=(), stops=("d", "b"))
    assert choice.add(news(tokenizer.encode("abcd"), Stop.STRING, "something else")).text == "a"
