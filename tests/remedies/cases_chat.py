"""Chats, their tools and their templates that are refused, and what each message asks for."""

from dataclasses import replace
from typing import Any

import tokenizers
from remedy_world import Case, World, call, given, tokenizer

from hone.data.text.chat import (
    CHAT_SPECIALS,
    DEFAULT_TEMPLATE,
    continue_chat,
    encode_completion,
    encode_steps,
    encode_turns,
    render_prompt,
)
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.data.text.worker import first_matches

USER, BOT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"function": {"name": "add", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}
END = "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
ANSWER = "{%- if m.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
TURN = "{{- '<|' ~ m.role ~ '|>' ~ m.content -}}"
EACH = "{%- for m in messages -%}"
CALLS = "{{- '<|' ~ m.role ~ '|>' ~ (m.content or '') ~ (m.tool_calls or '') -}}"
TOOLS = "{{- tools -}}"
FORGETS = (
    EACH
    + "{{- '<|' ~ m.role ~ '|>' -}}{%- if m.role == 'user' or loop.last -%}{{- m.content -}}{%- endif -%}"
    + ANSWER
    + END
)


def chat(world: World, messages: Any, *, tools: Any = None, template: str = DEFAULT_TEMPLATE, **more: Any) -> None:
    vocabulary = replace(tokenizer(world, "chat"), chat_template=template, **more)
    encode_turns(vocabulary, messages, tools=tools)[0]


def said(wrong: Any, right: Any, says: str, template: str = DEFAULT_TEMPLATE) -> Case:
    """Messages."""
    return given(lambda w, messages: chat(w, messages, template=template), wrong, right, says)


def with_tools(wrong: Any, right: Any, says: str) -> Case:
    return given(
        lambda w, tools: chat(w, [USER, BOT], tools=tools, template=TOOLS + DEFAULT_TEMPLATE), wrong, right, says
    )


def templates(wrong: str, right: str, says: str, messages: Any = (USER, BOT)) -> Case:
    return given(lambda w, template: chat(w, list(messages), template=template), wrong, right, says)


def _continued(world: World, tokens: Any, messages: Any, new: Any) -> None:
    vocabulary = replace(tokenizer(world, "chat"), chat_template=DEFAULT_TEMPLATE)
    ids = vocabulary.encode("<|user|>a<|assistant|>b<eos>", specials=True)[: tokens or None]
    continue_chat(vocabulary, ids, messages, new)


def _calling(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [CALL]}


def _metaspace(world: World, prompt: str) -> None:
    """A tokenizer of words, which joins the end of a prompt to what follows it."""
    words = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, "\n": 4, "?": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "isolated")
    encode_completion(Tokenizer(inner=inner, eos="<eos>"), prompt, "b")


def _stop(world: World, special: bool) -> None:
    """A stop token that a merge swallows, unless it is special."""
    vocabulary = train_bpe(["ax ax ax ax"], vocab_size=259 + len(CHAT_SPECIALS), specials=CHAT_SPECIALS)
    if special:
        vocabulary.inner.add_special_tokens(["x"])
    encode_turns(replace(vocabulary, eos="x", chat_template=DEFAULT_TEMPLATE), [USER, {**BOT, "content": "a"}])[0]


MESSAGES = [
    given(lambda w, m: render_prompt(tokenizer(w, "chat"), m), [], [USER], "a list with at least one {role, content}"),
    said([USER, {"role": "assistant", "content": 3}], [USER, BOT], 'has no text as its "content"'),
    said([USER, {"role": "eos", "content": "b"}, BOT], [USER, BOT], "use another role", EACH + TURN + ANSWER + END),
    said([USER, {**BOT, "reasoning_content": 3}], [USER, {**BOT, "reasoning_content": "b"}], "expected text"),
    said([USER, {**BOT, "tool_calls": 3}], [USER, {**BOT, "tool_calls": []}], "expected a list"),
    said([USER, {**BOT, "tool_calls": [{}]}], [USER, _calling("b")], '{"name": ...', EACH + CALLS + ANSWER + END),
    said(
        [USER, {**BOT, "tool_calls": [{"name": "add", "arguments": "{"}]}],
        [USER, {**BOT, "tool_calls": [{"name": "add", "arguments": "{}"}]}],
        "write a JSON object",
        EACH + CALLS + ANSWER + END,
    ),
    said(
        [USER, {**BOT, "tool_calls": [{"name": "add", "arguments": 3}]}],
        [USER, {**BOT, "tool_calls": [{"name": "add", "arguments": {"x": 3}}]}],
        "expected a JSON object",
        EACH + CALLS + ANSWER + END,
    ),
    said([{**USER, "content": "<|user|>"}, BOT], [USER, BOT], "remove it from the text"),
    with_tools("{", "[]", "write a list of JSON schemas"),
    with_tools({"a": 3}, [TOOL], "expected a list of JSON schemas"),
    with_tools([{}], [TOOL], 'write {"type": "function"'),
    with_tools([{**TOOL, "x": {3}}], [{**TOOL, "x": [3]}], "use text, numbers, lists and objects"),
    given(
        lambda w, step: encode_steps(tokenizer(w, "chat"), [USER], [step]),
        "<eos>",
        "one",
        "step 1 contains the special token",
    ),
    given(lambda w, role: chat(w, [{**USER, "role": role}, BOT]), "alien", "user", "correct the messages"),
]
TEMPLATES = [
    templates("{{ raise_exception('no') }}", DEFAULT_TEMPLATE, "or the template"),
    templates(EACH + TURN + END, EACH + TURN + ANSWER + END, "write eos_token after the content"),
    call(
        lambda w: chat(w, [USER, BOT], template=EACH + TURN + "{{- '<|tool|>' -}}" + END),
        lambda w: chat(w, [USER, BOT], template=EACH + TURN + "{{- '<|tool|>' -}}" + END, stops=("<|tool|>",)),
        "or add the end marker to stop_tokens",
    ),
    templates(EACH + TURN + ANSWER + "x" + END, EACH + TURN + "x" + ANSWER + END, "move it before"),
    templates(
        DEFAULT_TEMPLATE.replace("'<|assistant|>'", "'<|assistant|>: '"),
        DEFAULT_TEMPLATE,
        "use one whose generation prompt is how it begins an assistant turn",
    ),
    templates(
        EACH + TURN + ANSWER + "{% generation %}{% endgeneration %}" + END,
        EACH + TURN + ANSWER + END,
        "or remove the marks",
    ),
    templates(
        EACH
        + "{{- '<|' ~ m.role ~ '|>' -}}{% generation %}{{- m.content -}}{% endgeneration %}{{- 'x' -}}"
        + ANSWER
        + END,
        EACH
        + "{{- '<|' ~ m.role ~ '|>' -}}{% generation %}{{- m.content -}}{{- 'x' -}}"
        + ANSWER
        + "{% endgeneration %}"
        + END,
        "put {% endgeneration %} after it",
    ),
    said([USER, {**BOT, "reasoning_content": "why"}], [USER, {**BOT, "content": "why b"}], "write it into the content"),
    said([USER, {**BOT, "reasoning_content": "why"}], [USER, BOT], "or remove reasoning_content"),
    templates(DEFAULT_TEMPLATE, EACH + CALLS + ANSWER + END, "use one that writes it", [USER, _calling("b")]),
    said(
        [USER, _calling("b")],
        [USER, _calling("")],
        "remove the content",
        EACH + "{{- '<|' ~ m.role ~ '|>' ~ (m.tool_calls or m.content) -}}" + ANSWER + END,
    ),
    given(
        lambda w, template: chat(w, [USER, BOT], tools=[TOOL], template=template),
        DEFAULT_TEMPLATE,
        TOOLS + DEFAULT_TEMPLATE,
        "use one that writes them",
    ),
    given(lambda w, tools: chat(w, [USER, BOT], tools=tools), [TOOL], None, "or remove them"),
    said(
        [USER, BOT],
        [USER, {**BOT, "reasoning_content": "why"}],
        "add reasoning_content",
        EACH + TURN + ANSWER + END.replace("'<|assistant|>'", "'<|assistant|><think>'"),
    ),
    given(
        lambda w, how: encode_turns(
            replace(tokenizer(w, "chat"), chat_template=FORGETS), [USER, BOT, USER, BOT], turns=how
        ),
        "joined",
        "split",
        "set read.turns=split",
    ),
    given(_stop, False, True, "mark the stop tokens as special in tokenizer.json"),
    given(_metaspace, "a", "a\n", "end the prompt with a special token or a line break"),
    given(lambda w, n: _continued(w, n, [USER, BOT], [USER]), 3, 0, "raise max_tokens"),
    given(lambda w, m: _continued(w, 0, m, [USER]), [USER], [USER, BOT], "append it"),
    given(lambda w, new: _continued(w, 0, [USER, BOT], new), [], [USER], "give at least one"),
    given(
        lambda w, said: _continued(w, 0, [USER, {**BOT, "content": said}], [USER]),
        "c",
        BOT["content"],
        "render the whole chat anew",
    ),
    given(
        lambda w, pattern: first_matches([pattern], ["a" * 40 + "!"], where="adapter_config.json"),
        "(a|a)*b",
        "a*!",
        "write simpler ones",
    ),
]
CHAT: list[Case] = [*MESSAGES, *TEMPLATES]
