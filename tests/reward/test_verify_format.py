"""Formats, letters and exact text: the form must be strict enough that it cannot be gamed."""

import time

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st

from hone.config import recipe
from hone.errors import HoneError
from hone.reward.score import Reward
from hone.reward.verify import MAKERS, VERIFIERS
from hone.reward.verify.answers import boxes
from hone.reward.verify.choice import choice_reward, exact_reward, final_choice
from hone.reward.verify.structure import format_reward, regex
from hone.types import Rollout, Task

GOOD = "<think>a</think><answer>b</answer>"


def test_every_verifier_is_a_reward_and_accepts_its_gold_answer():
    assert set(VERIFIERS) == set(recipe.VERIFIERS)
    assert set(MAKERS) == set(recipe.WITH_SETTING)
    for name, verifier in VERIFIERS.items():
        if name in ("code", "gym"):
            continue  # they have more than a gold answer: test_verify_code, test_verify_gym
        gold = "C" if name == "choice" else "42"
        text = f"<think>hm</think><answer>{gold}</answer>"
        row = Rollout(tokens=[1], mask=[True], text=text, task=Task(prompt="q", answer=gold))
        assert Reward(verifier)([row])[0].value == 1.0


def test_a_prompt_may_have_opened_the_thought():
    opened = Task(prompt="Question. Assistant: Let me think.\n<think>\n")
    assert format_reward("a</think>\n<answer>b</answer>", opened) == 1.0
    assert format_reward("<think>a</think><answer>b</answer>", opened) == 1.0  # it writes the tag again
    assert format_reward("a<answer>b</answer>", opened) == format_reward("a</think>b", opened) == 0.0
    assert format_reward("a</think><answer>b</answer>", Task(prompt="<think>?")) == 0.0
    row = Rollout(tokens=[1], mask=[True], text="a</think><answer>b</answer>", task=opened)
    assert Reward(format_reward)([row])[0].value == 1.0


def test_lines_and_blanks_around_the_tags_are_no_matter_nor_is_an_empty_thought():
    assert format_reward("\n<think> a\nb </think>\n\n<answer> c </answer>\n ") == 1.0
    assert format_reward("<think></think><answer>b</answer>") == 1.0


@each(
    "text",
    [
        "",
        "b",
        "<think>a</think>b",
        "<answer>b</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a<answer>b</answer></think>",
        "<think>a</think><answer>b",
        "<think>a<answer>b</answer>",
        "a</think><answer>b</answer>",
        "<think>a</think></answer>b<answer>",
        "<think>a</think><answer> </answer>",
        GOOD + "x",
        GOOD + GOOD,
        "x" + GOOD,
        "<think>a</think>x<answer>b</answer>",
        "<think><think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer></answer>",
        "<think>a</think><answer><answer>b</answer>",
        "<Think>a</Think><answer>b</answer>",
        "<think >a</think><answer>b</answer>",
    ],
)
def test_anything_else_is_not_the_format(text):
    assert format_reward(text) == 0.0
    assert format_reward(GOOD) == 1.0


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " "]), max_size=9))
def test_the_format_is_exactly_one_regular_expression(pieces):
    import re

    text = "".join(pieces)
    inner = r"(?:(?!</?think>|</?answer>).)*?"
    pattern = rf"\s*<think>{inner}</think>\s*<answer>(?=.*\S.*</answer>)(?!\s*</answer>){inner}</answer>\s*"
    assert (format_reward(text) == 1.0) == (re.fullmatch(pattern, text, re.DOTALL) is not None)


def test_a_pattern_must_match_the_whole_completion():
    reward = regex(r"[0-9]+\.[0-9]{2}")
    assert [reward(t) for t in ("1.25", "1.255", "x1.25", "1.25\n", "")] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert regex("a.b")("a\nb") == 1.0
    assert Reward(reward)([Rollout(tokens=[1], mask=[True], text="1.25")])[0].value == 1.0
    with pytest.raises(HoneError, match="not a regular expression"):
        regex("(")


def test_boxes_match_their_braces():
    text = r"\boxed{a{b}c} \boxed{\{d} } \boxed{e"
    assert [text[inside] for _, _, inside in boxes(text)] == ["a{b}c", r"\{d"]
    assert boxes("}}{{") == []


@each(
    "text",
    [
        "<answer>B</answer>",
        "<answer> (B) </answer>",
        "<answer>b</answer>",
        "<answer>B.</answer>",
        "<answer>B) Paris, and no other</answer>",
        "<answer>(B) Paris</answer>",
        "<answer>B. A cat</answer>",
        "<answer>**B**</answer>",
        "<answer>option B</answer>",
        r"<answer>\boxed{B}</answer>",
        "<answer>A</answer> no <answer>B</answer>",
        r"\boxed{B}",
        r"\boxed{\text{B}}",
        r"\boxed{B} and again \boxed{(B)}",
        "The answer is B",
        "The answer is (B).",
        "The answer is A. Wait, the answer is B.",
        "the answer is B because A is wrong",
        "the answer is B. Paris is the capital.",
        "**Answer:** B",
        "Answer: B\nThat is all about A.",
        "B",
        " (b) ",
        "B.",
        "B) Paris",
        "<think>The answer is A</think> B",
    ],
)
def test_the_chosen_letter_is_found(text):
    assert final_choice(text) == "B"


@each(
    "text",
    [
        "",
        "<answer>A or B</answer>",
        "<answer>A, B</answer>",
        "<answer>AB</answer>",
        "<answer>A/B</answer>",
        "<answer>(A) and (B)</answer>",
        "<answer>(A) (B)</answer>",
        "<answer>B) or A)</answer>",
        "<answer>B. or maybe A</answer>",
        "<answer>B. Paris (A) Rome</answer>",
        "<answer>A) B) C) D)</answer>",
        r"<answer>\boxed{A} \boxed{B}</answer>",
        r"\boxed{A} \boxed{B}",
        "The answer is A. The answer is B.",
        r"<answer>A \boxed{B}</answer>",
        "<answer>A cat</answer>",
        "<answer>not B</answer>",
        "<answer>Because</answer>",
        "<answer>K</answer>",
        "<answer>1</answer>",
        "<answer></answer> the answer is B",
        "The answer is a triangle",
        "The answer is I think B",
        "The answer is A or B",
        "The answer is either",
        "A cat sat on B",
        "I",
        "<think>B</think>",
        "B" * 1000,
        "<answer>B) " + "x" * 1000 + "</answer>",
    ],
)
def test_what_chooses_no_single_letter_is_no_choice(text):
    assert final_choice(text) in (None, "I")
    assert choice_reward(text, Task(prompt="q", answer="B")).value == 0.0
    assert choice_reward(text, Task(prompt="q", answer="A")).value == 0.0


def test_a_gold_letter_may_stand_in_brackets_or_before_a_stop():
    for answer in ("B", "b", "(B)", " B. "):
        assert choice_reward("B", Task(prompt="q", answer=answer)).value == 1.0


def test_exact_text_is_exact_up_to_outer_whitespace():
    task = Task(prompt="q", answer=" New York\n")
    right = ["New York", " New York ", "so <answer>New York</answer>!", "<think>Rome</think>New York"]
    wrong = [
        "",
        "new york",
        "New  York",
        "New York.",
        "New York, Rome",
        "<answer></answer>New York",
        "<think>New York</think>",
    ]
    assert [exact_reward(t, task).value for t in right] == [1.0] * len(right)
    assert [exact_reward(t, task).value for t in wrong] == [0.0] * len(wrong)


@given(st.text(max_size=200))
def test_any_text_gets_a_verdict(text):
    task = Task(prompt="q", answer="B")
    for wrapped in (text, f"<answer>{text}</answer>", f"the answer is {text}"):
        assert choice_reward(wrapped, task).value in (0.0, 1.0)
        assert exact_reward(wrapped, task).value in (0.0, 1.0)
        assert format_reward(wrapped) in (0.0, 1.0)


@each("piece", ["A ", "(A) ", "A or ", " ", "<think>", "</answer>", "<answer>", "\\boxed{", "answer is ", "A, "])
def test_no_repetition_makes_it_slow(piece):
    text = piece * (300_000 // len(piece))
    start = time.process_time()
    for wrapped in (text, f"<answer>{text}</answer>", f"the answer is {text}"):
        choice_reward(wrapped, Task(prompt="q", answer="J"))
        exact_reward(wrapped, Task(prompt="q", answer="J"))
        format_reward(wrapped)
    assert time.process_time() - start < 2.0
