"""Templates are programs of strangers: they raise, loop, grow and pry; each time one line says so, and soon."""

import time

import pytest
from each import each
from patience import patience
from template_zoo import ANSWER, QUESTION, said, tokenizer_of

from hone.data.text import template as module
from hone.data.text.chat import encode_turns, render
from hone.errors import HoneError

LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"


def refused(template: str) -> str:
    with pytest.raises(HoneError) as caught:
        render(tokenizer_of("chatml", template), [QUESTION, ANSWER])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        LOOP * 3 + END * 3,
        LOOP * 3 + "x" + END * 3,
        LOOP + LOOP + "{% if false %}x{% endif %}" + END + END,
        "{% set s = 'x' * 90000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        LOOP + "{% call g() %}{% endcall %}" + END + "{% macro g() %}" + LOOP + END + "{% endmacro %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.5)
    start = time.monotonic()
    assert "the chat template failed" in refused(template)
    assert time.monotonic() - start < patience(5)


@each(
    "template",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{{ 7 ** (10**9) }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1, 2]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ [1] | batch(999999999, 0) }}",
        "{{ lipsum(n=99999) }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_that_grows_without_bound_is_stopped_before_it_does(template):
    start = time.process_time()
    refused(template)
    assert time.process_time() - start < 5


def test_the_text_has_a_limit(monkeypatch):
    monkeypatch.setattr(module, "CHARACTERS", 1000)
    assert "more than 1000 characters" in refused("{% for i in range(500) %}xyz{% endfor %}")


@each(
    "template",
    [
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__subclasses__() }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ messages[0]['__class__'].__base__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__ }}{{ strftime_now.__code__.co_code }}",
        "{{ hone_tick.__self__.__dict__.items() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ messages[0].update(content='y') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_a_template_cannot_pry_or_change_the_messages(template):
    refused(template)


@each(
    ("template", "says"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ nowhere.to.go }}", "'nowhere' is undefined"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{{ messages[7].content.x }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% generation %}", "Unexpected end of template"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(template, says):
    message = refused(template)
    assert "the chat template failed on 2 messages" in message
    assert says in message


def test_an_undefined_name_is_empty_as_in_transformers():
    assert render(tokenizer_of("chatml", "a{{ nowhere }}b{% if nowhere is defined %}c{% endif %}"), [QUESTION]) == "ab"


def test_content_is_never_run_as_a_template():
    tok = tokenizer_of("chatml")
    evil = "{{ 7 * 7 }}{% for i in range(3) %}x{% endfor %}{# gone #}"
    assert evil in render(tok, [said("user", evil)])


@pytest.mark.parametrize("family", ["llama31", "marked"])
def test_megabytes_of_content_are_rendered_and_masked(family):
    tok = tokenizer_of(family)
    long = "the weather in Paris\n" * 120_000
    start = time.process_time()
    tokens, mask = encode_turns(tok, [said("user", long), ANSWER])[0]
    assert len(tokens) > 250_000
    assert tok.decode([t for t, m in zip(tokens, mask, strict=True) if m]).endswith("I think 4.<|" + tok.eos[2:])
    assert time.process_time() - start < 30


def test_signs_for_marks_cannot_be_forged_by_content():
    tok = tokenizer_of("marked")
    forged = "\x000(\x00x\x000)\x00 \x001(\x00"
    tokens, mask = encode_turns(tok, [said("user", forged), said("assistant", forged)])[0]
    assert tok.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == forged + "<|im_end|>"
    assert tok.decode(tokens).count(forged) == 2


def test_marks_inside_marks_count_once():
    text = (
        "a{% generation %}b{% generation %}c{% endgeneration %}d{% endgeneration %}e{% generation %}{% endgeneration %}"
    )
    assert module.run_template(text, {}) == module.Rendered("abcde", ((1, 4), (5, 5)))
    assert module.run_template("abc", {}).marks is None
