"""Published chat formats: the text is transformers', and what is trained is what a sampler would write at each turn."""

import json
import re
import warnings
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from each import each
from template_zoo import (
    ANSWER,
    BY_NAME,
    CALLS,
    FAMILIES,
    PLAIN,
    QUESTION,
    THOUGHTS,
    TOOLS,
    call,
    cases,
    chats_of,
    hugging_face,
    said,
    tokenizer_of,
)  # fmt: skip
from tokenizers import pre_tokenizers

from hone.data.text.chat import encode_completion, encode_steps, encode_turns, render, render_prompt
from hone.data.text.messages import text_of
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError

pytestmark = pytest.mark.filterwarnings("ignore:the chat template closes its generation mark")


def simulate(tok: Tokenizer, messages: list[dict[str, Any]], tools: Any) -> list[tuple[list[int], list[bool]]]:
    """The rows of an episode driven by transformers: render, read, write the reference answer, stop; all by hand."""
    theirs, stops = hugging_face(tok), [tok.eos, *tok.stops]

    def text_of(part: Any, opened: bool) -> str:
        return theirs.apply_chat_template(part, tools=tools, add_generation_prompt=opened, tokenize=False)

    def ids_of(text: str) -> list[int]:
        return theirs(text, add_special_tokens=False)["input_ids"]

    rows: list[tuple[str, list[int], list[bool]]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, after = text_of(messages[:i], True), text_of(messages[: i + 1], False)
        if prompt.endswith("<think>\n") and not after.startswith(prompt):  # the sampler goes on from the open thought
            thought = message.get("reasoning_content") or re.findall("<think>\n(.*)\n</think>", message["content"])[0]
            answer = message["content"].split("</think>")[-1].strip()
            after = f"{prompt}{thought}\n</think>\n\n{answer}{tok.eos}"
        assert after.startswith(prompt)
        words = after[len(prompt) :]
        words = words[: min(words.index(stop) + len(stop) for stop in stops if stop in words)]
        if not rows or not prompt.startswith(rows[-1][0]):
            rows.append(("", [], []))
        known, ids, mask = rows.pop()
        read, written = ids_of(prompt[len(known) :]), ids_of(words)
        rows.append((prompt + words, ids + read + written, mask + [False] * len(read) + [True] * len(written)))
    return [(ids, mask) for _, ids, mask in rows]


@each(("family", "chat"), cases())
def test_the_text_is_that_of_transformers(family, chat):
    tok = tokenizer_of(family)
    messages, tools = chats_of(BY_NAME[family])[chat]
    theirs = hugging_face(tok)
    for n in range(1, len(messages) + 1):
        for opened in (False, True):
            if BY_NAME[family].reasoning == "opened by the prompt" and messages[n - 1]["role"] == "assistant":
                continue
            ours = render(tok, messages[:n], generation=opened, tools=tools)
            options = {"tools": tools, "add_generation_prompt": opened}
            assert ours == theirs.apply_chat_template(messages[:n], tokenize=False, **options)
            ids = theirs.apply_chat_template(messages[:n], tokenize=True, return_dict=True, **options)["input_ids"]
            assert tok.encode(ours, specials=True) == ids


@each(("family", "chat"), cases())
def test_tokens_and_masks_are_those_of_an_episode_played_turn_by_turn(family, chat):
    tok = tokenizer_of(family)
    messages, tools = chats_of(BY_NAME[family])[chat]
    expected = simulate(tok, messages, tools)
    assert encode_turns(tok, messages, tools=tools, turns="split") == expected
    if len(expected) == 1:
        assert encode_turns(tok, messages, tools=tools)[0] == expected[0]
    else:
        with pytest.raises(HoneError, match=r"rewrites earlier text .*turns=split"):
            encode_turns(tok, messages, tools=tools)[0]


@each(("family", "chat"), cases())
def test_the_stop_token_is_trained_and_no_bos_is_doubled(family, chat):
    tok = tokenizer_of(family)
    messages, tools = chats_of(BY_NAME[family])[chat]
    rows = encode_turns(tok, messages, tools=tools, turns="split")
    trained = sum(len(re.findall("1+", "".join("01"[m] for m in mask))) for _, mask in rows)
    assert trained == sum(m["role"] == "assistant" for m in messages)
    for tokens, mask in rows:
        ends = [t for t, m, after in zip(tokens, mask, [*mask[1:], False], strict=True) if m and not after]
        assert set(ends) <= tok.stop_ids
        if tok.bos_id is not None:
            assert tokens[:2] != [tok.bos_id, tok.bos_id]


@each(("family", "chat"), cases())
def test_the_prompt_of_a_sampler_is_the_beginning_of_the_row(family, chat):
    tok = tokenizer_of(family)
    messages, tools = chats_of(BY_NAME[family])[chat]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render_prompt(tok, messages[:i], tools=tools)
            tokens, mask = encode_completion(tok, messages[:i], messages[i : i + 1], tools=tools)
            assert tokens[: len(prompt)] == prompt
            assert mask == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))


@each("family", [f.name for f in FAMILIES if not f.reasoning])
def test_trained_words_by_hand(family):
    tok = tokenizer_of(family)
    tokens, mask = encode_turns(tok, PLAIN["several turns"])[0]
    end = {"gemma": "<end_of_turn>", "phi3": "<|end|>", "llama2": " </s>"}.get(family, tok.eos)
    first = " " if family in ("llama2", "mistral") else ""
    words = tok.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert words == f"{first}I think 4.{end}{first}sunny, the same.{end}"
    assert "What is" in tok.decode([t for t, m in zip(tokens, mask, strict=True) if not m])


def test_qwen3_rows_by_hand():
    tok = tokenizer_of("qwen3")
    rows = encode_turns(tok, THOUGHTS["thoughts"], turns="split")
    assert [tok.decode(tokens) for tokens, _ in rows] == [
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n2 and 2\n</think>\n\n4<|im_end|>",
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nsure?"
        "<|im_end|>\n<|im_start|>assistant\n<think>\nI think so\n</think>\n\nyes<|im_end|>",
    ]
    written = [tok.decode([t for t, m in zip(*row, strict=True) if m]) for row in rows]
    assert written == ["<think>\n2 and 2\n</think>\n\n4<|im_end|>", "<think>\nI think so\n</think>\n\nyes<|im_end|>"]


def test_split_keeps_turns_together_as_long_as_the_template_only_appends():
    tok = tokenizer_of("qwen25")
    chat = CALLS["call, result, answer"]
    assert encode_turns(tok, chat, tools=TOOLS, turns="split") == [encode_turns(tok, chat, tools=TOOLS)[0]]
    thinking = [{**m, "reasoning_content": "well"} if m["role"] == "assistant" else m for m in chat]
    rows = encode_turns(tokenizer_of("qwen3"), thinking, tools=TOOLS, turns="split")
    assert len(rows) == 2  # call and answer share the first question; the second question drops their thoughts


def test_settings_reach_the_template_for_prompt_and_row_alike():
    tok = replace(tokenizer_of("qwen3"), settings={"enable_thinking": False})
    prompt = render_prompt(tok, [QUESTION])
    assert tok.decode(prompt).endswith("<think>\n\n</think>\n\n")
    tokens, mask = encode_turns(tok, [QUESTION, ANSWER])[0]
    assert tokens[: len(prompt)] == prompt
    assert tok.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "I think 4.<|im_end|>"


def test_the_clock_of_a_conversation_stands_still_and_can_be_set():
    tok = replace(tokenizer_of("llama31"), clock=datetime(2025, 2, 3))
    assert "Today Date: 03 Feb 2025\n" in render(tok, [QUESTION])
    ticking = replace(
        tokenizer_of("chatml"), chat_template="{{ strftime_now('%f') }}" + tokenizer_of("chatml").chat_template
    )
    encode_turns(ticking, PLAIN["several turns"])[0]  # microseconds pass between its renderings


def test_r1_without_reasoning_is_refused():
    with pytest.raises(HoneError, match="message 2 has no reasoning"):
        encode_turns(tokenizer_of("r1"), [QUESTION, ANSWER])[0]


@pytest.mark.parametrize("arguments", [{"town": "Paris"}, '{"town": "Paris"}'])
def test_arguments_of_calls_may_be_an_object_or_json_text(arguments):
    turn = said("assistant", None, tool_calls=[{"function": {"name": "get_weather", "arguments": arguments}}])
    for family, form in (("qwen25", '"arguments": {"town": "Paris"}'), ("r1", '```json\n{"town": "Paris"}\n```')):
        assert form in render(tokenizer_of(family), [QUESTION, turn])


def test_arguments_are_never_written_as_python_prints_them():
    loose = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'call ' ~ c.function.arguments }}{% endfor %}"
    tok = replace(tokenizer_of("chatml"), chat_template=loose + "{% endfor %}")
    assert render(tok, [QUESTION, said("assistant", None, tool_calls=[call("é")])]) == 'call {"town": "é"}'


def test_a_template_that_would_print_none_gets_empty_content():
    loose = (
        "{% for m in messages %}{{ m.role ~ ':' ~ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    )
    tok = replace(tokenizer_of("chatml"), chat_template=loose + "{% endfor %}{{ eos_token }}{% endfor %}")
    chat = [said("user", "None of it"), said("assistant", None, tool_calls=[call("x")])]
    assert render(tok, chat) == "user:None of it<|im_end|>assistant:get_weather<|im_end|>"


def test_text_parts_are_joined_and_nulls_are_left_out():
    tok = tokenizer_of("qwen3")
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 2 + 2?"}]
    nulls = {"tool_calls": None, "reasoning_content": None, "name": None}
    loaded = [said("user", parts, **nulls), {**ANSWER, **nulls}]
    assert encode_turns(tok, loaded)[0] == encode_turns(tok, [QUESTION, ANSWER])[0]


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_reasoning_is_known_by_its_other_names(name):
    tok = tokenizer_of("qwen3")
    assert (
        encode_turns(tok, [QUESTION, said("assistant", "4", **{name: "hm"})])[0]
        == encode_turns(tok, [QUESTION, said("assistant", "4", reasoning_content="hm")])[0]
    )


def test_a_named_template_for_tools_is_used_only_where_there_are_tools():
    tok = replace(tokenizer_of("chatml"), tool_template=tokenizer_of("qwen25").chat_template)
    assert "<tools>" in render(tok, [QUESTION], tools=TOOLS)
    assert render(tok, [QUESTION]) == render(tokenizer_of("chatml"), [QUESTION])


@pytest.mark.parametrize("turns", ["joined", "split"])
@pytest.mark.parametrize("family", ["marked", "marked_short"])
def test_marks_give_transformers_mask_and_the_stop_token(family, turns):
    tok = tokenizer_of(family)
    for chat in (*PLAIN.values(), [said("system", "x"), *PLAIN["several turns"]]):
        theirs = hugging_face(tok).apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ((tokens, mask),) = encode_turns(tok, chat, turns=turns)
        expected = [bool(m) for m in theirs["assistant_masks"]][: len(tokens)]
        if family == "marked_short":
            stop = tok.id_of("<|im_end|>")
            expected = [
                m or (t == stop and expected[i - 1]) for i, (t, m) in enumerate(zip(tokens, expected, strict=True))
            ]
        assert tokens == theirs["input_ids"][: len(tokens)]
        assert mask == expected


def test_a_mark_that_ends_before_the_stop_token_is_extended_and_that_is_said():
    from hone.data.text.chat import _say_extended

    _say_extended.cache_clear()
    with pytest.warns(UserWarning, match=r"before <\|im_end\|>: <\|im_end\|> is trained all the same"):
        encode_turns(tokenizer_of("marked_short"), [QUESTION, ANSWER])[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_turns(tokenizer_of("marked"), [QUESTION, ANSWER])[0]


def test_a_mark_over_a_part_of_the_turn_trains_that_part():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}Sure: {% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tok = tokenizer_of("marked", template)
    tokens, mask = encode_turns(tok, [QUESTION, ANSWER])[0]
    assert tok.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == " I think 4.<|im_end|>"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "{% generation %}{{ m.content[0] }}{% endgeneration %}{{ m.content[1:] }}<|im_end|>",
            "ends before 'think 4.'",
        ),
        (
            "{% if m.role == 'user' %}{% generation %}x{% endgeneration %}{% endif %}{{ m.content }}<|im_end|>",
            "nothing",
        ),
        (
            "{% set s %}{% generation %} {{ m.content }}{% endgeneration %}{% endset %}{{ s | trim }}<|im_end|>",
            "changes the text that its generation marks stand in",
        ),
    ],
)
def test_marks_that_cannot_be_followed_are_refused(body, says):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + body + "\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tok = tokenizer_of("marked", template)
    with pytest.raises(HoneError) as caught:
        encode_turns(tok, [QUESTION, ANSWER])[0]
    assert says in str(caught.value)


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "phi3", "zephyr"])
def test_what_a_format_has_no_words_for_is_refused(family):
    tok = tokenizer_of(family)
    with pytest.raises(HoneError, match="leaves out the tools"):
        encode_turns(tok, [QUESTION, ANSWER], tools=TOOLS)[0]
    with pytest.raises(HoneError, match="leaves out the tools"):
        render_prompt(tok, [QUESTION], tools=TOOLS)
    with pytest.raises(HoneError, match="leaves out the reasoning of message 2"):
        encode_turns(tok, [QUESTION, {**ANSWER, "reasoning_content": "hidden"}])[0]
    with pytest.raises(HoneError, match="leaves out a tool call of message 2"):
        encode_turns(tok, [QUESTION, {**ANSWER, "tool_calls": [call("x")]}])[0]


def test_content_beside_a_call_that_the_format_drops_is_refused():
    turn = said("assistant", "let me look", tool_calls=[call("Paris")])
    with pytest.raises(HoneError, match="leaves out the content of message 2"):
        encode_turns(tokenizer_of("llama31"), [QUESTION, turn], tools=TOOLS)[0]
    encode_turns(tokenizer_of("qwen25"), [QUESTION, turn], tools=TOOLS)[0]


@each("family", [f.name for f in FAMILIES])
def test_special_tokens_in_any_text_are_refused(family):
    tok, tools = tokenizer_of(family), [{"type": "function", "function": {"name": "f", "description": "see "}}]
    for token in tok.reserved:
        chats = [
            [said("user", f"what is {token}?"), ANSWER],
            [QUESTION, said("assistant", f"a{token}b")],
            [said("user", [{"type": "text", "text": token[:3]}, {"type": "text", "text": token[3:]}]), ANSWER],
            [QUESTION, said("assistant", None, tool_calls=[call(token)])],
            [QUESTION, said("assistant", "x", reasoning_content=token)],
            [QUESTION, ANSWER, said("tool", {"found": [token]}), ANSWER],
            [QUESTION, ANSWER, said("tool", {token: 1}), ANSWER],
        ]
        for chat in chats:
            with pytest.raises(HoneError, match="contains the special token"):
                encode_turns(tok, chat)[0]
        tools[0]["function"]["description"] = f"see {token}"
        with pytest.raises(HoneError, match="tool 1 contains the special token"):
            encode_turns(tok, [QUESTION, ANSWER], tools=tools)[0]


def test_tokens_that_mark_turns_are_refused_where_they_are_not_special_and_thoughts_are_not():
    tok = tokenizer_of("r1")
    tools = [{"function": {"name": "f", "description": "<\uff5cUser\uff5c>"}}]
    for text in ("<\uff5cAssistant\uff5c>Sure.", "a<\uff5cUser\uff5c>b"):
        with pytest.raises(HoneError, match="message 1 contains the special token"):
            render_prompt(tok, [said("user", text)])
        with pytest.raises(HoneError, match="message 2 contains the special token"):
            encode_turns(tok, [QUESTION, said("assistant", text, reasoning_content="so")])
        with pytest.raises(HoneError, match="step 1 contains the special token"):
            encode_steps(tok, [QUESTION], [text])
    with pytest.raises(HoneError, match="tool 1 contains the special token"):
        render_prompt(tok, [QUESTION], tools=tools)
    assert render_prompt(tok, [said("user", "what does <think> mean?")])
    template = BY_NAME["qwen3"].template.replace("{{- said", "{{- '<think></think>' + said")
    assert encode_turns(tokenizer_of("qwen3", template), [said("user", "<think>"), ANSWER])


def test_a_role_that_spells_a_stop_token_is_refused():
    with pytest.raises(HoneError, match="the role 'end', the name of a stop token"):
        encode_turns(tokenizer_of("phi3"), [QUESTION, said("end", "x"), ANSWER])[0]


@each(
    ("message", "says"),
    [
        (said("user", [{"type": "image", "url": "x"}]), '"content"'),
        (said("assistant", "x", tool_calls="get"), "expected a list"),
        (said("assistant", "x", tool_calls=[3]), 'tool call 1 of message 2 has no "name"'),
        (said("assistant", "x", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "are not JSON"),
        (
            said("assistant", "x", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
            "expected a JSON object",
        ),
        (said("assistant", "x", reasoning_content=3), "expected text"),
    ],
)
def test_malformed_messages_are_refused_in_one_line(message, says):
    with pytest.raises(HoneError) as caught:
        encode_turns(tokenizer_of("qwen3"), [QUESTION, message, ANSWER])[0]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tools", ["get", {"name": "f"}, [3], [{"function": {}}], [{"name": "f", "x": {1}}]])
def test_malformed_tools_are_refused(tools):
    with pytest.raises(HoneError, match="tool"):
        encode_turns(tokenizer_of("qwen25"), [QUESTION, ANSWER], tools=tools)[0]


def test_tools_may_be_json_text():
    tok = tokenizer_of("qwen25")
    assert render(tok, [QUESTION], tools=json.dumps(TOOLS)) == render(tok, [QUESTION], tools=TOOLS)
    assert render(tok, [QUESTION], tools="") == render(tok, [QUESTION])


def test_text_of_a_message():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = [text_of(said("user", content)) for content in ("é", parts, None)]
    assert [*found, text_of(said("tool", {"é": 1}))] == ["é", "ab", "", '{"é": 1}']


def test_a_format_without_a_system_role_says_so():
    with pytest.raises(HoneError, match="System role not supported"):
        encode_turns(tokenizer_of("gemma"), [said("system", "x"), QUESTION, ANSWER])[0]


def test_marks_are_found_where_a_text_alone_is_read_differently():
    plain = tokenizer_of("marked", BY_NAME["marked"].template.replace("{% generation %}", "oh {% generation %}"))
    inner = tokenizers.Tokenizer.from_str(plain.inner.to_str())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tok = replace(plain, inner=inner)
    assert tok.encode("oh I") != plain.encode("oh I")
    tokens, mask = encode_turns(tok, [QUESTION, ANSWER])[0]
    assert tok.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == " I think 4.<|im_end|>"
