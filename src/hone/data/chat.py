"""Prompts, completions and chats to tokens, with a mask of exactly what the policy writes, stop token included."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Message

CHAT_SPECIALS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
DEFAULT_TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role ' ~ m.role) -}}{%- endif -%}"
    "{{- '<|' ~ m.role ~ '|>' ~ m.content -}}"
    "{%- if m.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

Encoded = tuple[list[int], list[bool]]  # tokens, and True where the token is trained on


class _Generation(Extension):
    """`{% generation %}` marks assistant text in some published templates; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes for HTML


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(template)


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, generation: bool = False) -> str:
    """The text of a chat; with `generation`, followed by what opens the assistant's turn."""
    if tokenizer.chat_template is None:
        raise HoneError(
            "the tokenizer has no chat template: add chat_template.jinja to its folder (hone.data.chat has a default)"
        )
    names = {"bos_token": tokenizer.bos or "", "eos_token": tokenizer.eos, "pad_token": tokenizer.pad or ""}
    try:
        return _compile(tokenizer.chat_template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=generation, tools=None, **names
        )
    except Exception as error:  # a template is the user's program: it can raise anything
        reason = " ".join(str(error).split())
        raise HoneError(f"the chat template failed on {len(messages)} messages: {reason}") from error


def check_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    """Refuse what a template would render to something other than the messages say."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise HoneError("messages must be a list with at least one {role, content}")
    for n, m in enumerate(messages, start=1):
        for key in ("role", "content"):
            if not hasattr(m, "get") or not isinstance(m.get(key), str):
                raise HoneError(f'message {n} has no text as its "{key}": every message needs role and content')
        if m["role"] == "assistant" and not m["content"]:
            raise HoneError(f"message {n} is an empty assistant turn: remove it or fill it")
        for value in m.values():
            forged = isinstance(value, str) and _special_in(tokenizer, value)
            if forged:
                raise HoneError(f"message {n} contains the special token {forged}: remove it from the text")


def _special_in(tokenizer: Tokenizer, text: str) -> str | None:
    return next((s for s in sorted(tokenizer.special_tokens) if s in text), None)


def _continue(tokenizer: Tokenizer, tokens: list[int], texts: tuple[str, str], *, specials: bool) -> list[int]:
    """The ids that lead from the `tokens` of the text before to the text after, leaving `tokens` as they are.

    A sampler has already committed to the prompt's tokens, so a merge across the boundary is not allowed.
    """
    before, after = texts
    whole = tokenizer.encode(after, specials=specials)
    if whole[: len(tokens)] == tokens:
        return whole[len(tokens) :]
    rest = tokenizer.encode(after[len(before) :], specials=specials)
    if tokenizer.decode(tokens + rest) != after:
        raise HoneError(
            f"the tokens of the text up to {before[-20:]!r} change when {after[len(before) :][:20]!r} follows: "
            "end the prompt with a special token or a line break"
        )
    return rest


def encode_messages(tokenizer: Tokenizer, messages: Sequence[Message], *, start: int = 0) -> Encoded:
    """Tokens up to the last assistant turn's stop token; True on every assistant turn from message `start` on.

    Each rendering must be a prefix of the next: otherwise the model would be trained on a text it never sees.
    """
    check_messages(tokenizer, messages)
    text, tokens, mask = "", list[int](), list[bool]()
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < start:
            continue
        before = render(tokenizer, messages[:i], generation=True)
        after = render(tokenizer, messages[: i + 1])
        for shorter, longer in ((text, before), (before, after)):
            if not longer.startswith(shorter):
                raise HoneError(_not_a_prefix(shorter, longer, turn=i + 1))
        tokens += _continue(tokenizer, tokens, (text, before), specials=True)
        turn = _continue(tokenizer, tokens, (before, after), specials=True)
        written = _written(tokenizer, turn)
        mask += [False] * (len(tokens) - len(mask)) + [True] * written
        tokens += turn
        text = after
    if True not in mask:
        raise HoneError("there is no assistant message to train on: add one with the role assistant")
    return tokens[: len(mask)], mask


def _not_a_prefix(shorter: str, longer: str, *, turn: int) -> str:
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    return (
        f"the chat template rewrites earlier text at message {turn}: {shorter[same:][:30]!r} becomes "
        f"{longer[same:][:30]!r}; use a template that only appends"
    )


def _written(tokenizer: Tokenizer, turn: list[int]) -> int:
    """How many of the turn's tokens the policy writes: up to the first stop token, after which it is stopped."""
    stops = " ".join(sorted((tokenizer.eos, *tokenizer.stops)))
    end = next((i for i, token in enumerate(turn) if token in tokenizer.stop_ids), None)
    if end is None:
        raise HoneError(
            f"the chat template ends an assistant turn with {tokenizer.decode(turn)[-20:]!r}, not with a stop token "
            f"({stops}): write eos_token after the content, or add its end marker to the tokenizer's stop tokens"
        )
    trailing = tokenizer.decode(turn[end + 1 :])
    if trailing.strip():
        raise HoneError(
            f"the chat template writes {trailing[:30]!r} after the stop token of an assistant turn: move it before"
        )
    return end + 1


def render_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> list[int]:
    """What the policy reads: plain text as it is (after bos where the tokenizer has one), or an opened chat."""
    if isinstance(prompt, str):
        return tokenizer.start_ids + tokenizer.encode(prompt)
    check_messages(tokenizer, prompt)
    if prompt[-1]["role"] == "assistant":
        raise HoneError("the prompt ends with an assistant message: end it with the message to be answered")
    return tokenizer.encode(render(tokenizer, prompt, generation=True), specials=True)


def encode_completion(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], completion: str | Sequence[Message]
) -> Encoded:
    """`render_prompt(prompt)` untrained, then the completion and its stop token trained."""
    if not isinstance(prompt, str):
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        check_messages(tokenizer, completion)
        return encode_messages(tokenizer, [*prompt, *completion], start=len(prompt))
    if not isinstance(completion, str):
        raise HoneError("the prompt is text but the completion is messages: give both in the same form")
    head = tokenizer.encode(prompt)
    tail = [*_continue(tokenizer, head, (prompt, prompt + completion), specials=False), tokenizer.eos_id]
    head = tokenizer.start_ids + head
    return head + tail, [False] * len(head) + [True] * len(tail)


def encode_steps(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], steps: Sequence[str]
) -> tuple[Encoded, list[int]]:
    """Prompt, then the steps as one completion without a stop token; also the index of each step's last token."""
    chat = not isinstance(prompt, str)
    start = [] if chat else tokenizer.start_ids
    text = render(tokenizer, prompt, generation=True) if chat else prompt
    tokens = render_prompt(tokenizer, prompt)[len(start) :]
    written, ends = len(start) + len(tokens), list[int]()
    for n, step in enumerate(steps, start=1):
        forged = chat and _special_in(tokenizer, step)
        if forged:
            raise HoneError(f"step {n} contains the special token {forged}: remove it from the text")
        tokens += _continue(tokenizer, tokens, (text, text + step), specials=chat)
        text += step
        ends.append(len(start) + len(tokens) - 1)
    tokens = start + tokens
    return (tokens, [i >= written for i in range(len(tokens))]), ends
