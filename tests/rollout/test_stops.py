"""Stop strings against the plain way: decode everything after every token, and look."""

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hone.data.text.detokenizer import Detokenizer
from hone.data.text.tokenizer import train_bpe
from hone.engine.stop_strings import Automaton, StopFinder


def by_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer of bytes, whose tokens cut characters."""
    return bytes(tokens).decode("utf-8", errors="replace")


def by_fallback(tokens: Sequence[int]) -> str:
    """As tokenizers with byte fallback: half a character makes all bytes beside it unreadable."""
    text = bytes(tokens)
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(text)


PIECES = ["a", "b", "ab", "ba", " a", "", "abab", "é", "中", "\n", "STOP", "ST", "OP"]


def by_pieces(tokens: Sequence[int]) -> str:
    """Tokens of several characters, and of none; like SentencePiece it drops the blank that begins a text."""
    return "".join(PIECES[t] for t in tokens).removeprefix(" ")


def plain(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> tuple[int, str] | None:
    """How many tokens it takes until the text has a stop string, and the text before the first of them."""
    for n in range(1, len(tokens) + 1):
        text = decode(list(tokens[:n]))
        places = [at for stop in stops if (at := text.find(stop)) >= 0]
        if places:
            return n, text[: min(places)]
    return None


def search(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> tuple[int, str] | None:
    finder = StopFinder(stops, decode)
    for n, token in enumerate(tokens, start=1):
        if finder.push(token):
            return n, finder.text()
        assert finder.safe <= n
    assert finder.close() == decode(list(tokens))
    return None


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(st.text("abSTOP é中\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_pieces_are_searched_as_the_plain_way_does(tokens: list[int], stops: list[str]):
    assert search(tokens, stops, by_pieces) == plain(tokens, stops, by_pieces)


@given(st.text("ab é中🙂", max_size=30), st.lists(st.text("ab é中🙂", min_size=1, max_size=4), min_size=1, max_size=3))
def test_bytes_are_searched_as_the_plain_way_does(text: str, stops: list[str]):
    tokens = list(text.encode())
    for decode in (by_bytes, by_fallback):
        assert search(tokens, stops, decode) == plain(tokens, stops, decode), decode


@given(st.lists(st.sampled_from([0x41, 0x80, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F]), max_size=60))
def test_bytes_that_are_no_text_are_read_on(tokens: list[int]):
    detokenizer = Detokenizer(by_bytes)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.end()
    assert text.replace("\ufffd", "") == by_bytes(tokens).replace("\ufffd", "")
    assert len(detokenizer.window) <= 16


def test_a_stop_string_over_three_tokens_is_cut_out_of_the_text():
    tokens = [PIECES.index(piece) for piece in ("ab", "abab", "ST", "OP", "a")]
    assert search(tokens, ["bST"], by_pieces) == (3, "ababa")
    assert search(tokens, ["bSTOPa"], by_pieces) == (5, "ababa")


def test_of_two_that_one_token_completes_the_first_to_begin_counts():
    assert search([PIECES.index("abab")], ["bab", "ab"], by_pieces) == (1, "")
    assert search([PIECES.index("abab")], ["ba", "bab"], by_pieces) == (1, "a")


def test_a_character_in_several_tokens_is_found_with_its_last():
    tokens = list("x中y".encode())
    assert search(tokens, ["中"], by_bytes) == (4, "x")
    assert search(tokens, ["中y"], by_bytes) == (5, "x")


def test_text_before_a_character_that_is_not_whole_is_searched_at_once():
    tokens = [*b"END", 0xE4]
    assert search(tokens, ["D"], by_bytes) == (3, "EN")
    decode = {(0,): "STOP\ufffd", (0, 1): "STOP中"}
    assert search([0, 1], ["STOP"], lambda t: decode[tuple(t)]) == (1, "")


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    st.lists(st.text("abSTOP", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_token_is_safe_once_no_stop_string_can_begin_in_it(tokens: list[int], stops: list[str]):
    finder = StopFinder(stops, "".join if not tokens else lambda ts: "".join(PIECES[t] for t in ts))
    text = ""
    ends: list[int] = []
    for token in tokens:
        if finder.push(token):
            return
        text += PIECES[token]
        ends.append(len(text))
        held = max((k for s in stops for k in range(len(s)) if text.endswith(s[:k])), default=0)
        assert finder.safe == sum(end <= len(text) - held for end in ends)


def test_tokens_of_a_character_that_may_begin_a_stop_string_are_held_back():
    finder = StopFinder(["中x"], by_bytes)
    safe = []
    for token in "a中b".encode():
        assert not finder.push(token)
        safe.append(finder.safe)
    assert safe == [1, 1, 1, 1, 5]


@pytest.mark.parametrize("stop", ["e\n\n", "中🙂", "🙂🏽", "fo", "zz"])
def test_a_tokenizer_of_hone_is_searched_too(stop: str):
    text = "one two three\n\nfour 中🙂🏽 é one two"
    tokenizer = train_bpe([text], vocab_size=280)
    tokens = tokenizer.encode(text)
    assert plain(tokens, [stop], tokenizer.decode) == search(tokens, [stop], tokenizer.decode)


@given(st.text("ab", min_size=1, max_size=6), st.text("ab", max_size=30))
@example("aa", "aaaa")
@example("abab", "abababcabab")
@example("aab", "aaaab")
def test_the_automaton_finds_every_end_of_the_word(word: str, text: str):
    automaton = Automaton(word)
    assert [automaton.push(c) for c in text] == [text[: i + 1].endswith(word) for i in range(len(text))]


@pytest.mark.parametrize("token", [ord("a"), 0x80], ids=["text", "rubbish"])
def test_cost_is_linear(token: int):
    def seconds(count: int) -> float:
        finder = StopFinder(["a" * 2000 + "b", "aab"], by_bytes)
        start = time.process_time()
        for _ in range(count):
            assert not finder.push(token)
        return time.process_time() - start

    seconds(500)
    short = min(seconds(2_000) for _ in range(3))
    long = min(seconds(16_000) for _ in range(3))
    assert long < 8 * short * 2.5  # 8 times the tokens; quadratic would be 64 times the time
