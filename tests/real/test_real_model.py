"""The real 135M model is sane, and the same under Hone as under transformers."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.data.text.chat import render, render_prompt
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.model.decoder import Decoder
from hone.model.formats.cache import PACKAGED
from hone.model.policy import Policy
from hone.rollout.local import LocalSampler
from hone.types import Batch, Stop

# The opening of "A Tale of Two Cities" and of "Alice's Adventures in Wonderland", both in the public domain.
DICKENS = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair."
)
CARROLL = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, and "
    "what is the use of a book, thought Alice, without pictures or conversations? So she was considering in her own "
    "mind, as well as she could, for the hot day made her feel very sleepy and stupid, whether the pleasure of making "
    "a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit "
    "with pink eyes ran close by her."
)
CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What color is the sky on a clear day?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And grass?"},
    ],
]
TRICKY = [
    "", " ", "Hello world", "  two  spaces ", "12345 67.89 1e-5 ½ ٣", "tab\tline\n\n\r\nend ", "it's they'LL we've",
    "naïve café 東京 🙂🏽 e\u0301 العربية", "def f(x):\n    return x**2  # <b>", "a\u200bb\x00c\ufeff", "\u00a0\u2003x",
    "<|im_start|>user\nhi<|im_end|>\n", "<|im_end", "<repo_name>x<|endoftext|>", "\\n \"q\" 'q' `q`",
]  # fmt: skip


def test_it_takes_as_much_of_the_disk_as_is_said_before_it_is_fetched(folder):
    bytes_ = sum(path.stat().st_size for path in folder.iterdir())
    assert round(bytes_ / 1e6) == PACKAGED["smollm2-135m"].unpacked


def logp_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """Log-probs of ids[1:], each given those before it, by way of the policy that training uses."""
    row = torch.tensor([ids])
    mask = torch.ones(1, len(ids) - 1, dtype=torch.bool)
    batch = Batch(inputs=row[:, :-1], targets=row[:, 1:], mask=mask, real=mask, group=torch.zeros(1).long())
    with torch.no_grad():
        return Policy(decoder)(batch, frozenset({"logp"})).logp[0]


def perplexity(decoder: Decoder, tokenizer: Tokenizer, text: str) -> float:
    return math.exp(-logp_of(decoder, tokenizer.encode(text)).mean())


def shuffled(text: str) -> str:
    words = text.split()
    random.Random(0).shuffle(words)
    return " ".join(words)


@pytest.mark.parametrize(("text", "below"), [(DICKENS, 6.0), (CARROLL, 40.0)], ids=["Dickens", "Carroll"])
def test_it_has_read_the_language(decoder, tokenizer, text, below):
    plain, mixed = perplexity(decoder, tokenizer, text), perplexity(decoder, tokenizer, shuffled(text))
    assert plain < below
    assert mixed > 15 * plain


def complete(decoder: Decoder, tokenizer: Tokenizer, chat: list[dict[str, str]], *, most: int = 24) -> Any:
    params = SampleParams(max_tokens=most, temperature=0.0, stop_ids=tokenizer.stop_ids, seed=0)
    prompt = render_prompt(tokenizer, chat)
    (group,) = LocalSampler(decoder).sample([prompt], n=1, params=params)
    return prompt, group[0]


def test_it_answers_a_greeting(decoder, tokenizer):
    prompt, rollout = complete(decoder, tokenizer, CHATS[0])
    answer = tokenizer.decode(rollout.tokens[len(prompt) :], specials=False).lower()
    assert any(word in answer.split("!")[0].split() for word in ("hello", "hi", "hey", "greetings"))


def test_it_knows_the_capital_of_france_and_stops(decoder, tokenizer):
    prompt, rollout = complete(decoder, tokenizer, CHATS[1])
    assert "Paris" in tokenizer.decode(rollout.tokens[len(prompt) :])
    assert rollout.stop is Stop.TOKEN
    assert tokenizer.inner.id_to_token(rollout.tokens[-1]) == "<|im_end|>"


@pytest.mark.parametrize("chat", CHATS, ids=["greeting", "capital", "turns"])
def test_greedy_tokens_are_those_of_transformers(decoder, tokenizer, theirs, chat):
    prompt, rollout = complete(decoder, tokenizer, chat)
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )  # fmt: skip
    assert list(rollout.tokens) == expected[0].tolist()


def test_log_probs_are_those_of_transformers(decoder, tokenizer, theirs):
    for text in (DICKENS, shuffled(CARROLL), "def f(x):\n    return x + 1\n"):
        ids = tokenizer.encode(text)
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(logp_of(decoder, ids), expected, rtol=0, atol=1e-3)


def test_the_samplers_log_probs_are_the_learners(decoder, tokenizer):
    prompt, rollout = complete(decoder, tokenizer, CHATS[1])
    written = logp_of(decoder, list(rollout.tokens))[len(prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(rollout.gen_logp[len(prompt) :]).float(), written, rtol=0, atol=1e-3)


def test_text_is_encoded_and_decoded_as_transformers_does(tokenizer, their_tokenizer):
    for text in TRICKY:
        ids = tokenizer.encode(text, specials=True)
        assert ids == their_tokenizer(text)["input_ids"], text
        assert tokenizer.decode(ids) == their_tokenizer.decode(ids) == text
        without = tokenizer.decode(ids, specials=False)
        assert without == their_tokenizer.decode(ids, skip_special_tokens=True), text


def test_digits_are_tokens_of_their_own(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a 2026b")] == ["a", " ", "2", "0", "2", "6", "b"]


@pytest.mark.parametrize("generation", [False, True])
def test_the_chat_template_renders_as_in_transformers(tokenizer, their_tokenizer, generation):
    for chat in CHATS:
        text = render(tokenizer, chat, generation=generation)
        ask = {"add_generation_prompt": generation}
        assert text == their_tokenizer.apply_chat_template(chat, tokenize=False, **ask)
        expected = their_tokenizer.apply_chat_template(chat, return_dict=False, **ask)
        assert tokenizer.encode(text, specials=True) == expected
    assert text.startswith("<|im_start|>system\nYou answer in one word.<|im_end|>\n")


def test_special_tokens_are_where_the_model_expects_them(tokenizer, their_tokenizer):
    assert (tokenizer.eos, tokenizer.eos_id, tokenizer.bos_id) == ("<|im_end|>", 2, 1)
    assert tokenizer.stop_ids == {2}
    assert tokenizer.start_ids == []
    assert their_tokenizer.eos_token_id == 2
    assert tokenizer.vocab_size == 49_152
