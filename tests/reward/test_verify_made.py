"""Verifiers with a setting behind their name: what they accept, what they refuse, and that nothing keeps them busy."""

import json
import time
from pathlib import Path

import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st
from patience import patience

from hone.config.recipe import Recipe
from hone.errors import HoneError
from hone.launch.rewards import scorer, start_reward_processes
from hone.reward.score import Reward
from hone.reward.verify import make_verifier
from hone.reward.verify.choice import exact_reward
from hone.reward.verify.compare import f1_reward, number, numeric
from hone.reward.verify.structure import repetition_units
from hone.types import Rollout, Task

torch.set_num_threads(1)


def value(name: str, text: str, *, answer: str | None = "yes", tokens: int = 1, limit: int = 0) -> float | None:
    row = Rollout(
        tokens=[1] * tokens, mask=[True] * tokens, text=text, limit=limit, task=Task(prompt="q", answer=answer)
    )
    return Reward(make_verifier(name)[0])([row])[0].value


@each(
    ("text", "right"),
    [
        ("<a>x</a><b>y</b>", 1.0),
        (" \n<a></a>\n <b>\n</b> ", 1.0),
        ("<a>x</a>", 0.0),
        ("<b>y</b><a>x</a>", 0.0),
        ("<a>x<b>y</b></a>", 0.0),
        ("<a>x</a>and<b>y</b>", 0.0),
        ("so <a>x</a><b>y</b>", 0.0),
        ("<a>x</a><b>y</b>.", 0.0),
        ("<a>x</a><a>x</a><b>y</b>", 0.0),
        ("</a>x<a><b>y</b>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_in_order(text: str, right: float):
    assert value("tags:a,b", text) == right


def test_tags_are_the_format_where_they_are_its_own():
    for text in ("<think>a</think><answer>b</answer>", "<think>a</think>", "<answer>b</answer><think>a</think>"):
        assert value("tags:think,answer", text) == value("format", text)


def test_length_in_tokens_and_the_last_ones_before_the_limit():
    assert [value("length:10-20", "", tokens=n) for n in (5, 10, 15, 20, 40)] == [0.5, 1.0, 1.0, 1.0, 0.5]
    assert [value("overlong:20", "", tokens=n, limit=100) for n in (1, 80, 90, 100)] == [0.0, 0.0, -0.5, -1.0]
    assert value("overlong:20", "", tokens=500) == 0.0  # where there was no limit


def test_language_by_what_is_said():
    english = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep for the whole night."
    german = "Der schnelle braune Fuchs springt über den faulen Hund und geht danach nach Hause, um zu schlafen."
    assert (value("language:en", english) or 0) > 0.9
    assert value("language:en", german) == 0.0
    assert (value("language:en", f"<think>{german}</think>{english}") or 0) > 0.9
    assert value("language:en", "") == value("language:en", " \x00") == 0.0


def test_repetition_counts_runs_of_words():
    assert value("repetition:2", "a b c d") == 1.0
    assert value("repetition:2", "a b a b") == pytest.approx(2 / 3)  # ab, ba, ab: one of three came before
    assert (value("repetition:4", "word " * 1000) or 0) < 0.01
    assert value("repetition:4", "") == 1.0


CHINESE = "因为三角形的内角和等于一百八十度。所以第三个角是七十度。接着用余弦定理求出对边的长度。再把两条边相加。"
JAPANESE = "このもんだいでは、まず左辺を展開してから、両辺を二で割る。カタカナの変数もおなじように扱えばよい。"
THAI = "เราเริ่มจากการหาค่าของตัวแปรแรกก่อน แล้วจึงแทนค่าลงในสมการที่สอง"
LONG = "".join(f"{i * i:x}q" for i in range(300))  # one word of no period


@pytest.mark.parametrize("text", [CHINESE, JAPANESE, THAI, LONG])
def test_text_without_spaces_has_units_too(text: str):
    assert (value("repetition:4", text) or 0) > 0.9
    assert (value("repetition:4", text * 8) or 1) < 0.3


@each("text", ["哈" * 500, "ha" * 500, "!" * 500, "\u200b" * 500, "ですね。" * 200, "x。" * 300])
def test_what_says_one_thing_for_ever_is_not_varied(text: str):
    assert (value("repetition:4", text) or 0) < 0.05


def test_units_by_hand():
    # 你好 twice and a word: 你好 好你 你好 好ok -> one of four pairs came before
    assert value("repetition:2", "你好你好ok") == 0.75
    assert repetition_units("我用Python写code。好\u3000吧") == ["我", "用", "Python", "写", "code", "。", "好", "吧"]
    assert repetition_units("\\frac{1}{2} + x") == ["\\frac{1}{2}", "+", "x"]
    assert [len(repetition_units("x" * n)) for n in (60, 61, 65)] == [1, 13, 13]


def test_a_pattern_may_look_like_a_function_of_a_file():
    assert [value("regex:a.py:b", t) for t in ("a.py:b", "a.py:c")] == [1.0, 0.0]


# --- JSON and grammars ---


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formal")
    person = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
    (folder / "person.json").write_text(json.dumps({**person, "additionalProperties": False}))
    (folder / "slow.json").write_text(json.dumps({"type": "string", "pattern": "^(a+)+$"}))
    (folder / "remote.json").write_text(json.dumps({"$ref": "http://127.0.0.1:9/schema.json"}))
    (folder / "not.json").write_text('{"type": "nonsense"}')
    (folder / "sum.lark").write_text('start: NUMBER ("+" NUMBER)*\n%import common.NUMBER\n%ignore " "\n')
    (folder / "slow.lark").write_text("start: a*\na: /(x+x+)+y/ | /x/\n")
    (folder / "not.lark").write_text("start: nothing\n")
    return folder


@each(
    ("text", "right"),
    [
        ('{"age": 3}', 1.0),
        ('<think>{"age": -1}</think>{"age": 3}', 1.0),
        ('I think:\n```json\n{"age": 3}\n```\nDone.', 1.0),
        ('<answer>{"age": 3}</answer>', 1.0),
        ('<answer>\n```json\n{"age": 3}\n```\n</answer>', 1.0),
        ('```json\n{"age": 3}\n```\n<answer>{"age": -1}</answer>', 0.0),
        ('{"age": -1}', 0.0),
        ('{"age": 3, "x": 1}', 0.0),
        ('{"age": "3"}', 0.0),
        ('{"age": NaN}', 0.0),
        ('Here: {"age": 3}', 0.0),
        ("[" * 100_000, 0.0),
        ('{"age": ' + "1" * 200_000 + "}", 0.0),
        ("", 0.0),
    ],
)
def test_json_by_its_schema(files: Path, text: str, right: float):
    assert value(f"schema:{files}/person.json", text) == right


def test_a_schema_fetches_nothing(files: Path):
    row = Rollout(tokens=[1], mask=[True], text="{}", task=Task(prompt="q"))
    outcome = Reward(make_verifier(f"schema:{files}/remote.json")[0])([row])[0]
    assert outcome.value is None
    assert "Unresolvable" in outcome.reason


def test_text_by_a_grammar(files: Path):
    name = f"grammar:{files}/sum.lark"
    assert [value(name, t) for t in ("1 + 2", "<answer>3</answer>", "1 +", "1 + x", "", "+" * 1000)] == [
        1,
        1,
        0,
        0,
        0,
        0,
    ]


HOSTILE = {"regex:(x+x+)+y": "x" * 60, "schema:{}/slow.json": f'"{"a" * 60}!"', "grammar:{}/slow.lark": "x" * 60}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_never_ends_is_invalid_in_its_time_and_the_rest_is_judged(name: str, files: Path):
    name, text = name.format(files), HOSTILE[name]
    recipe = Recipe(data="x", reward={name: 1.0})
    made_apart = scorer(recipe.reward, separate=start_reward_processes(_timed(recipe, name)))
    rows = [Rollout(tokens=[1], mask=[True], text=t, task=Task(prompt="q")) for t in (text, "z", text)]
    start = time.monotonic()
    first, second, third = made_apart(rows)
    assert (first.value, second.value, third.value) == (None, 0.0, None)
    assert "timed out" in first.reason
    assert time.monotonic() - start < patience(5)


def _timed(recipe: Recipe, name: str) -> Recipe:
    from dataclasses import replace

    return replace(recipe, parts=replace(recipe.parts, timeout={name: 0.5}))


# --- numbers and words ---


@each(
    ("text", "right"),
    [
        ("3.14", 1.0),
        ("3.15", 1.0),
        ("3.16", 0.0),
        ("The answer is 3.149.", 1.0),
        (r"so \boxed{3.14}", 1.0),
        ("<answer>314e-2</answer>", 1.0),
        ("<answer>3.14 or 2</answer>", 0.0),
        ("<answer>-3.14</answer>", 0.0),
        ("<answer>nan</answer>", 0.0),
        ("<answer>1e999999999</answer>", 0.0),
        ("9" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_a_number_within_its_tolerance(text: str, right: float):
    assert value("numeric:0.01", text, answer="3.14") == right


def test_a_sentence_may_go_on_after_its_number_but_not_take_it_back():
    right = ("3.14. This follows from 22/7.", "**3.14**.", "3.14, because 6.28 / 2 = 3.14.", "3.14, so we are done.")
    wrong = ("3.14. No, that is wrong.", "3.14 or 2.", "3.14. 2.", "not 3.14. It is 2.", "2. It is not 3.14.")
    for rest in right:
        assert value("numeric:0.01", f"The answer is {rest}", answer="3.14") == 1.0, rest
    for rest in wrong:
        assert value("numeric:0.01", f"The answer is {rest}", answer="3.14") == 0.0, rest
    assert value("numeric:0.01", "I doubt that the answer is 3.14. It may be 4.", answer="3.14") == 0.0


def test_a_thought_that_the_prompt_has_opened_is_not_the_answer():
    open_thought = Task(prompt="1+1? Assistant: <think>\n", answer="2")
    for verifier in (exact_reward, f1_reward, numeric("0")):
        assert verifier("2", open_thought).value == 0.0, verifier
        assert verifier("one and one</think>2", open_thought).value == 1.0, verifier
        assert verifier("2", "2").value == 1.0, verifier


def test_tolerances_are_exact_and_may_be_a_share():
    assert [value("numeric:1%", t, answer="200") for t in ("198", "202", "197.99")] == [1.0, 1.0, 0.0]
    assert value("numeric:0.1", "0.3", answer="0.2") == 1.0  # which in floats is further than 0.1
    assert value("numeric:0", "1/3", answer="2/6") == 1.0
    assert [float((number(t) or (0, ""))[0]) for t in ("1,234.5", "$2", "50%", "\u22123", "1/0", "1,23")] == [
        1234.5,
        2,
        0.5,
        -3,
        0,
        0,
    ]
    for gold in (None, "", "many", "1 2"):
        assert value("numeric:1", "1", answer=gold) is None


def test_f1_by_hand():
    # gold: eiffel tower; answer: tower paris -> 1 shared of 2 and 2 -> 2 x 1 / (2 + 2)
    assert value("f1", "<answer>the tower in Paris</answer>", answer="The Eiffel Tower") == pytest.approx(2 / 5)
    assert value("f1", "Tower, Paris", answer="The Eiffel Tower") == 0.5
    assert value("f1", "eiffel tower!", answer="The Eiffel Tower") == 1.0
    assert value("f1", "tower tower tower tower", answer="The Eiffel Tower") == pytest.approx(2 / 6)  # said often
    assert value("f1", "", answer="Rome") == 0.0
    assert value("f1", "Rome", answer="the ...") is None


@given(st.text(max_size=80), st.text(max_size=20))
def test_any_text_gets_a_verdict(text: str, gold: str):
    task = Task(prompt="q", answer=gold)
    for verifier in (f1_reward, numeric("1%")):
        found = verifier(text, task).value
        assert found is None or 0.0 <= found <= 1.0


@each(
    "name",
    [
        "regex:(", "tags:a,a", "tags:a b", "tags:,", "schema:nowhere.json", "schema:{}/not.json", "grammar:{}/not.lark",
        "grammar:nowhere", "length:9", "length:9-3", "length:x-y", "length:0-0", "overlong:0", "overlong:-1",
        "language:xx", "repetition:0", "repetition:x", "numeric:x", "numeric:-1", "regex:", "regex",
        "nonsense", "nonsense:1",
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused_at_once(name: str, files: Path):
    with pytest.raises(HoneError) as error:
        make_verifier(name.format(files))
    assert ":" in str(error.value)
    assert "\n" not in str(error.value)
