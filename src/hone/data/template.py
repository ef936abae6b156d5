"""A chat template is a program from elsewhere: compiled in a sandbox, run with a bound on its time and its text."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 20.0  # of one rendering
CHARACTERS = 50_000_000  # of one rendering, or of any text on the way to it
OPEN, CLOSE, TICK, JOIN, NOW = "hone_open", "hone_close", "hone_tick", "hone_join", "strftime_now"
HUGE_WIDTH = re.compile(r"\d{8}")  # in a format string: a field wider than any text may be
UNBOUNDED_FILTERS = ("batch", "center", "slice")  # their size is an argument, and no chat needs them

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


class _Bounds(NodeTransformer):
    """Every turn of a loop and every call of a macro looks at the clock; `~` is counted as `+` is."""

    def _tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _tick

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(JOIN, "load"), node.nodes, [], None, None).set_lineno(node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_size("%", value.__self__, ())
        return wrapped

    def call(self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        if any(isinstance(x, int) and x > CHARACTERS for x in (*args, *named.values())):
            raise SecurityError(f"a number above {CHARACTERS} is passed to a function")
        return super().call(__context, __obj, *args, **named)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result has more than CHARACTERS characters, items or bits, before it is made."""
    size = 0
    if operator == "+":
        size = _size(left) + _size(right)
    elif operator == "*":
        size = max(_size(a) * b for a, b in ((left, right), (right, left), ((), 0)) if isinstance(b, int))
    elif operator == "**":
        size = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    elif isinstance(left, str):
        wide = [x for x in (right if isinstance(right, tuple) else (right,)) if isinstance(x, int) and x > CHARACTERS]
        size = CHARACTERS + 1 if wide or HUGE_WIDTH.search(left) else 0
    if size > CHARACTERS:
        raise SecurityError(f"{operator} would make more than {CHARACTERS} characters")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)  # jinja2's own escapes for HTML


def _format(value: str, *args: Any) -> str:
    _check_size("%", value, args)
    return value % args


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    env.filters |= {"tojson": _to_json, "format": _format}
    for name in UNBOUNDED_FILTERS:
        del env.filters[name]
    del env.globals["lipsum"]
    env.globals["raise_exception"] = _raise_exception
    return env.from_string(template)


class _Meter:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + SECONDS

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it ran for more than {SECONDS:g} seconds")

    def join(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.grow(sum(map(len, texts)))
        return "".join(texts)

    def grow(self, size: int) -> None:
        if size > CHARACTERS:
            raise SecurityError(f"it wrote more than {CHARACTERS} characters")


def _run(template: str, names: Mapping[str, Any], signs: tuple[str, str]) -> str:
    meter, size, pieces = _Meter(), 0, list[str]()
    own = {OPEN: signs[0], CLOSE: signs[1], TICK: meter.tick, JOIN: meter.join}
    for piece in _compile(template).generate(**names, **own):
        meter.tick()
        size += len(piece)
        meter.grow(size)
        pieces.append(piece)
    return "".join(pieces)


def run_template(template: str, names: Mapping[str, Any], *, now: datetime | None = None) -> Rendered:
    """The template's text with these variables; `now` is what strftime_now tells (None: the clock)."""
    names = {NOW: lambda form: (now or datetime.now()).strftime(form), **names}
    text = _run(template, names, ("", ""))
    if not _has_marks(template):
        return Rendered(text)
    number = next(n for n in range(len(text) + 1) if f"\x00{n}" not in text)
    signs = f"\x00{number}(\x00", f"\x00{number})\x00"
    signed = _run(template, names, signs)
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
