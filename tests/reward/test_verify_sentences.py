"""What a completion states: closing forms of published prompts, what takes an answer back, what nobody sees."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from each import each

from benchmarks.trials import loopholes, sentences
from benchmarks.trials.case import Case, outcome
from benchmarks.trials.closings import PUBLISHED, VARIANTS
from hone.reward.verify.answers import boxes, is_denied, spoken_text, visible_text, without_fences
from hone.reward.verify.choice import choice_reward
from hone.reward.verify.math.extract import places
from hone.reward.verify.math.verdict import math_reward
from hone.reward.verify.structure import visible
from hone.types import Task

DOCS = Path(__file__).parents[2] / "docs" / "verifiers.md"
FORMS = [form for _, form, _ in PUBLISHED] + list(VARIANTS)
real = pytest.mark.skipif(not sentences.DATA.is_dir(), reason="the real datasets are not here: ../shared/data")


def failures(cases: Iterator[Case]) -> list[str]:
    return [f"{case.group}: {case.name}: {why}" for case in cases if (why := outcome(case))]


def every(answers: Sequence[str], step: int) -> list[str]:
    return list(answers)[::step]


def test_closing_forms_accept_right_answers():
    assert {form: why for form in FORMS if (why := sentences.right(form, sentences.OWN))} == {}


def test_closing_forms_refuse_wrong_answers():
    assert {form: why for form in FORMS if (why := sentences.wrong(form, sentences.OWN))} == {}


@real
def test_closing_forms_accept_gold_answers_of_real_problems():
    answers = [gold for golds in sentences.golds().values() for gold in every(golds, 60)]
    assert {form: why for form in FORMS if (why := sentences.right(form, answers))} == {}


@real
@pytest.mark.slow
def test_closing_forms_are_right_on_all_of_math_500_and_gsm8k():
    assert failures(sentences.cases(quick=False)) == []


def test_every_published_form_is_in_the_documents():
    text = DOCS.read_text(encoding="utf-8")
    shown_forms = {name: form.replace("\n", "↵").replace("@", "5") for name, form, _ in PUBLISHED}
    assert [name for name, form in shown_forms.items() if form not in text] == []


def test_what_is_denied_hidden_thought_or_one_of_several_is_no_answer():
    assert failures(loopholes.maths()) == []


def test_a_choice_is_one_option():
    assert failures(loopholes.choices()) == []


def test_an_answer_in_the_right_format_can_be_seen():
    assert [ascii(text) for text in loopholes.INVISIBLE if visible(text)] == []
    assert all(visible(text) for text in ("5", ".", "e\u0301", "\u200b5", "$x$", "<b>", "{5}", "**5**"))


@each("piece", ["\\boxed{", "<answer>", "<think>", "\\boxed{5} or ", "answer: 5\n", "<!--", "~~5", '{"answer": 5, '])
def test_a_million_characters_are_read_in_time(piece: str):
    assert loopholes.ends_soon(piece) is None


@each(
    ("completion", "wanted"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a<think>b", "a"),
        ("<think>a</think>b<think>c", "b"),
        ("a</think>b", "b"),
        ("<Thinking>a</Thinking>b", "b"),
        ("<think>a", ""),
        ("<thinker>a", "<thinker>a"),
    ],
)
def test_what_is_said_is_outside_of_thoughts(completion: str, wanted: str):
    assert spoken_text(completion) == wanted


def test_a_prompt_that_opens_the_thought_is_heeded():
    opened = Task(prompt="What is 2 + 3? <think>\n", answer="5")
    assert math_reward(r"\boxed{5}", opened).value == 0.0
    assert math_reward(r"hm</think>\boxed{5}", opened).value == 1.0
    assert choice_reward("The answer is B", Task(prompt="A or B? <think>", answer="B")).value == 0.0


def test_what_a_reader_does_not_see_is_cut():
    text = "a <!-- b --> c ~~d~~ e <del>f</del> g\n% \\boxed{h}\n50% \\boxed{i} x~~=~~5 <!-- j"
    assert visible_text(text) == "a  c  e  g\n\n50% \\boxed{i} x~~=~~5 "


def test_fenced_blocks_are_told_from_text():
    assert without_fences("a\n```\nb\n```\nc") == "a\n\n\nc"
    assert without_fences("a\n```\nb") == "a\n```\nb"


def test_a_box_in_a_hiding_command_is_not_there():
    text = r"\boxed{a} \cancel{x \boxed{b}} \phantom{\boxed{c}} \text{\boxed{d}} \boxed 42 \fbox{e} \boxed{\cancel{f}}"
    assert [text[inside] for _, _, inside in boxes(text)] == ["a", "d", "42", "e", r"\cancel{f}"]


def test_a_denial_stands_directly_at_the_answer():
    for text in (
        "it is not @",
        "@ is wrong",
        "x \\neq @",
        "@. That is wrong.",
        "rather than $@$",
        "@, which is not true",
    ):
        assert is_denied(text, text.index("@"), text.index("@") + 1), text
    for text in (
        "it is not 4, so @",
        "@ is right",
        "@. That is not hard.",
        "not 4 but @",
        "@ is not prime",
        "@. No more.",
    ):
        assert not is_denied(text, text.index("@"), text.index("@") + 1), text


@each(
    ("text", "wanted"),
    [
        (r"\boxed{5} cm", ["5 cm"]),
        (r"\boxed{5}\text{ m}", ["5 m"]),
        (r"\boxed{5} in total", ["5"]),
        (r"\boxed{5}\%", ["5"]),
        (r"3! \cdot 2!=\boxed{12}", ["12"]),
        (r"\boxed{5} or 6", ["5", "6"]),
        ("The answer is $5$ miles.", ["5 miles"]),
        ("Answer: Mary counts $5$ ways.", ["5 ways"]),
        (r"within \boxed{}. So \boxed{5}", ["5"]),
        (r"\boxed{5} \boxed{}", ["5", ""]),
        ("<answer>6<answer>5</answer></answer>", ["6<answer>5</answer>"]),
        ("#### 5\n#### Note: done", [" 5"]),
        ("The answer is an integer. The answer is 5.", ["5"]),
    ],
)
def test_places_are_read_as_a_reader_reads_them(text: str, wanted: list[str]):
    assert places(text) == wanted


def test_a_unit_beside_the_box_is_part_of_the_answer():
    for text in (r"\boxed{5} cm", r"\boxed{5}\text{ cm}", "The answer is $5$ cm.", "<answer>$5$ cm</answer>"):
        assert math_reward(text, Task(prompt="q", answer="5 m")).value == 0.0, text
        assert math_reward(text, Task(prompt="q", answer="0.05 m")).value == 1.0, text
        assert math_reward(text, Task(prompt="q", answer="5")).value == 1.0, text


def test_a_prompt_that_ends_with_any_mark_of_a_thought_has_opened_it():
    for mark in ("<think>", "<seed:think>\n", "\u25c1think\u25b7", "<|begin_of_thought|>", "[THINK]", "<reasoning>"):
        assert spoken_text(r"\boxed{5}", f"What is 2 + 3?{mark}") == "", mark
    for mark in ("</think>", "\u25c1/think\u25b7", "<|end_of_thought|>", "think", "[/THINK]"):
        assert spoken_text("5", f"What is 2 + 3?{mark}") == "5", mark
