"""A chat template is a program from elsewhere, compiled in jinja2's sandbox.

Nothing here limits its time or its memory. `hone.data.text.worker` does: every template of a model runs in its process.
That process imports this module, which therefore imports little.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # of processor time, for one rendering
MEMORY = 512 << 20  # bytes
CHARACTERS = 50_000_000  # of one rendering
POWER = 100_000  # bits of a power
UNBOUNDED_FILTERS = ("batch", "center", "slice")  # their size is an argument, and no chat needs them
OPEN, CLOSE, NOW = "hone_open", "hone_close", "strftime_now"

# The template of models that Hone makes itself.
DEFAULT_TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role ' ~ m.role) -}}{%- endif -%}"
    "{{- '<|' ~ m.role ~ '|>' ~ m.content -}}"
    "{%- if m.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """The text, and where `{% generation %}` says the assistant's words are; None: the template has no marks."""

    text: str
    marks: tuple[Span, ...] | None = None


class _Generation(Extension):
    """`{% generation %}` puts a sign before and after its body, both empty unless the marks are asked for."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        signs = [nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line) for name in (OPEN, CLOSE)]
        return nodes.Scope([signs[0], *body, signs[1]], lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Powers are refused before they are computed: the process would be busy until its time is up."""
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > POWER:
            raise SecurityError(f"a power would have more than {POWER} bits")
        return super().call_binop(context, operator, left, right)


def _format_time(now: str, form: str) -> str:
    return (datetime.fromisoformat(now) if now else datetime.now()).strftime(form)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)  # jinja2's own escapes for HTML


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    env.filters["tojson"] = _to_json
    for name in UNBOUNDED_FILTERS:
        del env.filters[name]
    del env.globals["lipsum"]
    env.globals["raise_exception"] = _raise_exception
    return env.from_string(template)


def run_template(template: str, names: Mapping[str, Any], *, now: str = "") -> Rendered:
    """The template's text with these variables; `now` is what strftime_now tells, in ISO's form ("": the clock)."""
    names = {NOW: partial(_format_time, now), OPEN: "", CLOSE: "", **names}
    text = _compile(template).render(names)
    if not _has_marks(template):
        return Rendered(text)
    number = next(n for n in range(len(text) + 1) if f"\x00{n}" not in text)
    signs = f"\x00{number}(\x00", f"\x00{number})\x00"
    signed = _compile(template).render({**names, OPEN: signs[0], CLOSE: signs[1]})
    pieces = re.split(f"({re.escape(signs[0])}|{re.escape(signs[1])})", signed)
    if "".join(pieces[::2]) != text:
        raise TemplateError("it changes the text that its generation marks stand in: put them where it is written")
    return Rendered(text, tuple(_spans(pieces, signs[0])))


def _has_marks(template: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\b", template) is not None


def _spans(pieces: list[str], opens: str) -> Iterable[Span]:
    """The outermost marked stretches; pieces are text, sign, text, sign, ..., text."""
    at, depth, start = 0, 0, 0
    for text, sign in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        at += len(text)
        if sign == opens:
            start = start if depth else at
            depth += 1
        elif sign:
            depth -= 1
            if not depth:
                yield start, at


# --- chats: templates disagree on two forms; of each, the one that is not written out as Python would print it ---

Messages = Sequence[dict[str, Any]]


def render_chat(template: str, names: Mapping[str, Any], messages: Messages, *, now: str) -> Rendered:
    """The messages under the template, the arguments of tool calls as objects or, where it wants that, as text."""
    arguments = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls", ())]
    try:
        rendered = _without_none(template, names, messages, now)
        if not any(a and str(a) in rendered.text for a in arguments):
            return rendered
    except TypeError:  # a template that adds the arguments to text wants them as text
        if not arguments:
            raise
    return _without_none(template, names, _with_written_arguments(messages), now)


def _without_none(template: str, names: Mapping[str, Any], messages: Messages, now: str) -> Rendered:
    rendered = run_template(template, {**names, "messages": messages}, now=now)
    if "None" not in rendered.text or all(m["content"] is not None for m in messages):
        return rendered
    filled = [{**m, "content": "" if m["content"] is None else m["content"]} for m in messages]
    empty = run_template(template, {**names, "messages": filled}, now=now)
    return empty if rendered.text.count("None") > empty.text.count("None") else rendered


def _with_written_arguments(messages: Messages) -> list[dict[str, Any]]:
    """The arguments of tool calls as JSON text: some templates write them as they are."""

    def written(call: Any) -> dict[str, Any]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    calls = [[written(call) for call in m["tool_calls"]] if "tool_calls" in m else None for m in messages]
    return [
        {**m, "tool_calls": found} if found is not None else dict(m) for m, found in zip(messages, calls, strict=True)
    ]
