"""A new turn after sampled tokens: the tokens stay bit for bit, only the new text is tokenised, or it is refused."""

import pytest
from each import each
from template_zoo import FAMILIES, QUESTION, said, tokenizer_of

from hone.data.text.chat import continue_chat, encode_turns, render, render_prompt
from hone.errors import HoneError

pytestmark = pytest.mark.filterwarnings("ignore:the chat template closes its generation mark")
NEW = [said("user", "sure?")]
STOPS = {"gemma": "<end_of_turn>", "phi3": "<|end|>"}


def sampled(tok, text, *, name=""):
    """Prompt and answer, each character of the answer a token of its own, as a sampler may well write it."""
    letters = [i for character in text for i in tok.encode(character)]
    return [*render_prompt(tok, [QUESTION]), *letters, tok.id_of(STOPS.get(name, tok.eos))]


@each("name", [f.name for f in FAMILIES if not f.reasoning and f.name not in ("llama2", "mistral")])
def test_the_suffix_is_what_the_template_writes_between_the_turns(name):
    tok = tokenizer_of(name)
    tokens = sampled(tok, "the weather", name=name)
    assert tokens != encode_turns(tok, [QUESTION, said("assistant", "the weather")])[0][0]
    known = [QUESTION, said("assistant", "the weather")]
    ids = continue_chat(tok, tokens, known, NEW)
    assert tok.decode([*tokens, *ids]) == render(tok, [*known, *NEW], generation=True)


def test_the_suffix_by_hand():
    tok = tokenizer_of("chatml")
    ids = continue_chat(tok, sampled(tok, "4"), [QUESTION, said("assistant", "4")], NEW)
    assert tok.decode(ids) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tok.encode("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n", specials=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama3", " 4 "), ("qwen3", "<think>\nhm\n</think>\n\n4"), ("mistral", "4"), ("r1", "hm\n</think>\n\n4")],
)
def test_what_the_template_would_rewrite_is_refused(name, text):
    tok = tokenizer_of(name)
    with pytest.raises(HoneError, match="rewrites earlier text at message 2"):
        continue_chat(tok, sampled(tok, text), [QUESTION, said("assistant", text)], NEW)


def test_a_template_that_counts_its_messages_is_refused():
    template = "{{ messages | length }}" + (tokenizer_of("chatml").chat_template or "")
    tok = tokenizer_of("chatml", template)
    with pytest.raises(HoneError, match="rewrites earlier text"):
        continue_chat(tok, sampled(tok, "4"), [QUESTION, said("assistant", "4")], NEW)


def test_what_cannot_be_continued_is_refused():
    tok = tokenizer_of("chatml")
    tokens, known = sampled(tok, "4"), [QUESTION, said("assistant", "4")]
    with pytest.raises(HoneError, match="it was cut off"):
        continue_chat(tok, tokens[:-1], known, NEW)
    with pytest.raises(HoneError, match="it was cut off"):
        continue_chat(tok, [], known, NEW)
    with pytest.raises(HoneError, match="end with the assistant"):
        continue_chat(tok, tokens, known[:1], NEW)
    with pytest.raises(HoneError, match="none of the assistant"):
        continue_chat(tok, tokens, known, [*NEW, known[1]])
    with pytest.raises(HoneError, match="at least one"):
        continue_chat(tok, tokens, known, [])
    with pytest.raises(HoneError, match="special token"):
        continue_chat(tok, tokens, known, [said("user", "<|im_end|>")])
    with pytest.raises(HoneError, match="rewrites"):
        continue_chat(tok, tokens, [QUESTION, said("assistant", "5")], NEW)
