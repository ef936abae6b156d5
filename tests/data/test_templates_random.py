"""Random conversations under every format: text, tokens and masks are those of an episode that transformers plays."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_zoo import BY_NAME, FAMILIES, TOOLS, call, hugging_face, said, tokenizer_of
from test_templates import simulate

from hone.data.text.chat import continue_chat, encode_turns, render, render_prompt
from hone.errors import HoneError

pytestmark = pytest.mark.filterwarnings("ignore:the chat template closes its generation mark")

PIECES = [
    "the ",
    " weather",
    "4",
    "\n",
    "\n\n",
    " ",
    "é",
    "🙂",
    "<",
    "|>",
    "</",
    "[INST",
    "{{ x }}",
    "{%",
    "'\"\\",
    "None",
]
words = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
spoken = words.filter(lambda text: text.strip())


@st.composite
def conversations(draw, family):
    """Questions and answers, perhaps after a system prompt, perhaps with calls and thoughts between them."""
    chat = [said("system", draw(words))] if family.system and draw(st.booleans()) else []
    tools = TOOLS if family.tools and draw(st.booleans()) else None
    for _ in range(draw(st.integers(1, 3))):
        chat.append(said("user", draw(words)))
        thought = {"reasoning_content": draw(spoken)} if needs_thought(family) or thinks(family, draw) else {}
        if tools and draw(st.booleans()):
            chat.append(said("assistant", None, tool_calls=[call(draw(words))], **thought))
            chat.append(said("tool", draw(words)))
        chat.append(said("assistant", draw(spoken), **thought))
    return chat, tools


def needs_thought(family) -> bool:
    return family.reasoning == "opened by the prompt"


def thinks(family, draw) -> bool:
    return bool(family.reasoning) and draw(st.booleans())


def stripped(chat):
    """What the oracle for an opened thought expects: no line breaks around thought or answer."""
    keys = ("content", "reasoning_content")
    return [{**m, **{k: m[k].strip() for k in keys if isinstance(m.get(k), str)}} for m in chat]


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_conversation_is_encoded_as_it_would_have_been_played(name, data):
    family, tok = BY_NAME[name], tokenizer_of(name)
    chat, tools = data.draw(conversations(family))
    chat = stripped(chat) if needs_thought(family) else chat
    text = hugging_face(tok).apply_chat_template(chat, tools=tools, tokenize=False)
    assert render(tok, chat, tools=tools) == text
    rows = encode_turns(tok, chat, tools=tools, turns="split")
    expected = simulate(tok, chat, tools)
    assert [[tok.decode(run) for run in runs(*row)] for row in rows] == [
        [tok.decode(run) for run in runs(*row)] for row in expected
    ]
    for (tokens, mask), (theirs, _) in zip(rows, expected, strict=True):
        assert tok.decode(tokens) == tok.decode(theirs)
        prompt = mask.index(True)
        assert tokens[:prompt] == theirs[:prompt]


def runs(tokens, mask):
    """Maximal runs of trained tokens."""
    found, last = [], False
    for token, m in zip(tokens, mask, strict=True):
        if m:
            found = [*found[:-1], [*found[-1], token]] if last else [*found, [token]]
        last = m
    return found


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.name != "llama2"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_sampled_turn_is_continued_without_touching_its_tokens(name, data):
    family, tok = BY_NAME[name], tokenizer_of(name)
    prompt = render_prompt(tok, [said("user", "the weather")])
    text = data.draw(words)
    odd = [t for piece in text for t in tok.encode(piece)]  # letter by letter: not how the text would be encoded
    stop = {"gemma": "<end_of_turn>", "phi3": "<|end|>"}.get(name, tok.eos)
    tokens = [*prompt, *odd, tok.id_of(stop)]
    known = [said("user", "the weather"), said("assistant", text or "x")]
    shown = render(tok, [*known, said("user", "and now?")], generation=True)
    if not shown.startswith(tok.decode(tokens)):
        with pytest.raises(HoneError, match="rewrites earlier text"):
            continue_chat(tok, tokens, known, [said("user", "and now?")])
        return
    ids = continue_chat(tok, tokens, known, [said("user", "and now?")])
    whole = tok.decode([*tokens, *ids])
    assert whole == shown
    assert family.reasoning != "opened by the prompt"
