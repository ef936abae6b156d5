"""Where an answer is found and numbers in it: exact equality, near-misses refused, nothing that hangs the verifier."""

import time
from fractions import Fraction

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.reward.score import Reward
from hone.reward.verify import VERIFIERS
from hone.reward.verify.math.amount import amount
from hone.reward.verify.math.extract import final_answer, places
from hone.reward.verify.math.verdict import math_reward
from hone.types import Rollout, Task


def number(text: str) -> Fraction | None:
    found = amount(text)
    return found and found[0]


def reward(completion: str, answer: str | None) -> float | None:
    return math_reward(completion, Task(prompt="q", answer=answer)).value


@each(
    ("text", "value"),
    [
        ("42", 42),
        (" +42. ", 42),
        ("007", 7),
        ("-42", -42),
        ("\u221242", -42),
        ("- 5", -5),
        ("3.0", 3),
        (".5", Fraction(1, 2)),
        ("1,234", 1234),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1{,}234", 1234),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", -5),
        ("$-5", -5),
        (r"\$5", 5),
        ("€ 5", 5),
        ("$42$", 42),
        (r"\(42\)", 42),
        ("**42**", 42),
        ("1/2", Fraction(1, 2)),
        ("-1/2", Fraction(-1, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"\frac12", Fraction(1, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        ("0.5/2", Fraction(1, 4)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"2.1\overline{6}", Fraction(13, 6)),
        (r"864 \mbox{ inches}^2", 864),
        ("60km/h", 60),
        ("50%", Fraction(1, 2)),
        (r"12.5\%", Fraction(1, 8)),
        ("50 percent", Fraction(1, 2)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        (r"3 \times 10^{2}", 300),
        ("3*10^-1", Fraction(3, 10)),
        ("2 million", 2_000_000),
        ("5 cm", 5),
        ("5cm", 5),
        ("5 cm^2", 5),
        ("60 km/h", 60),
        ("30°", 30),
        (r"30^\circ", 30),
        (r"7\text{ apples}", 7),
        ("42 green apples.", 42),
        ("x = 42", 42),
        ("The answer is 42", 42),
        ("a total of 42 dollars", 42),
    ],
)
def test_a_number_in_any_usual_dress_is_read_exactly(text, value):
    assert number(text) == value


@each(
    "text",
    [
        *("", " ", ".", "-", "$", "%", ",", "/", "1/", "/2", "e5", "--5", "+-5", "5-", "7-3", "5 - 3", "5 + 5", "5 +5"),
        *("42 or 43", "42 and 43", "42, 43", "42 43", "42\n42", "42/43/44", "{42, 43}", "[42]", "(42)", "42 (43)"),
        *("1,23", "12,34", "1,2345", "0,234", "1,234,56", ",234", "4.2.1", "1.000.000", "1 000", "1_000", "1'000"),
        *(
            "2x",
            "2ab",
            "5m",
            "3rd",
            "3i",
            "5e",
            "x^2",
            "5!",
            "10^2",
            "2^10",
            "9^9^9^9",
            r"2\pi",
            r"\sqrt{2}",
            r"\sqrt 4",
            r"\pi",
            "5²",
        ),
        *("1/0", r"\frac{1}{0}", "1 1/0", r"\frac{1}{2", r"\frac{x}{2}", r"\frac{1}{2}x", "nan", "inf", "infinity"),
        *("not 42", "42 not", "anything but 42", "anyone 42", "minus 42", "42 squared", "42 minus two", "half of 42"),
        *("42 dozens", "42 or", "about 42", "≈42", "~42", ">42", "<42", "42+", "±42", "42 is wrong", "forty-two"),
        *(
            "0x2a",
            "0b1",
            "1e1000",
            "1e99999999999",
            "\u0664\u0662",
            "\uff14\uff12",
            "42\u200b",
            "4\\text{2}",
            "42 x",
            "42 thousand million",
        ),
        *("__import__('os')", "1 if True else 2", "42; 43", "42=43", "x=y=42", "42 apples or so they say to me today"),
        *("1" * 101, "1/" + "9" * 101, "0." + "0" * 150 + "1", " " * 300 + "42"),
    ],
)
def test_what_states_no_single_number_is_no_number(text):
    assert number(text) is None


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back(value):
    assert number(str(value)) == value


@given(st.integers(-(10**30), 10**30))
def test_every_integer_is_read_back_with_separators_and_units(value):
    assert number(f"{value:,}") == number(f"${value} dollars") == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4))
def test_every_decimal_is_read_back(value):
    assert number(f"{value:f}") == Fraction(value)


@settings(deadline=None)
@given(st.text(max_size=250))
def test_any_text_gives_a_verdict(text):
    assert reward(text, "42") in (0.0, 1.0)
    assert reward(f"<answer>{text}</answer>", "42") in (0.0, 1.0)


@given(st.text(alphabet="0123456789.,/-+%$e^{}\\ fracx=", max_size=30))
def test_any_arithmetic_looking_text_gives_a_verdict(text):
    assert number(text) is None or isinstance(number(text), Fraction)


@each(
    ("completion", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("so <answer> 42 </answer> done", "42"),
        ("<answer>42</answer> that is, <answer>42.0</answer>", "42"),
        (r"\boxed{1} <answer>42</answer> \boxed{3} #### 4", "42"),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"<answer>The answer is $\boxed{42}$.</answer>", "42"),
        (r"it is \boxed{42}", "42"),
        (r"\boxed{84/2} then \boxed{42} #### 7, the answer is 8", "42"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{42} and \boxed{43", "42"),
        (r"\boxed {42}", "42"),
        ("steps\n#### 42", "42"),
        ("#### 42\nbye\n#### 42", "42"),
        ("#### Step 1: add\n6 * 7\n#### 42", "42"),
        ("The answer is 42.", "42"),
        ("The answer is hard to see. No: the final answer is: **42**", "42"),
        (r"The answer is $\frac{84}{2}$, as was to be shown.", "42"),
        ("Answer: $42", "42"),
        ("**Answer:**\n\n**42**", "42"),
        ("The answer is:\n$$\n42\n$$\nin 3 steps", "42"),
        ("The answer is\n\\[\n42\n\\]", "42"),
        ("The answer is $42\nand costs $7", "42"),
        ("The answer is `42`.", "42"),
        ("the answer is 42 because 6*7 = 42", "42"),
        ("the answer is 1,000 dollars, which is a lot", "1000"),
        ("<think>\\boxed{7} the answer is 8</think> The answer is 42", "42"),
        ("<answer>42</answer>", "Six times seven.\n#### 42"),
        ("<answer>1/2</answer>", r"so \boxed{\frac{1}{2}}"),
        ("<answer>0.50</answer>", "50%"),
        ("<answer>-0</answer>", "0"),
    ],
)
def test_a_right_answer_scores_one(completion, answer):
    assert reward(completion, answer) == 1.0


@each(
    "completion",
    [
        "",
        "42",  # no place that says it is the answer
        "I computed 42",
        "<answer>43</answer>",
        "<answer>42 or 43</answer>",
        "<answer>42, 43</answer>",
        "<answer>41 42 43</answer>",
        r"<answer>\boxed{42} \boxed{43}</answer>",
        r"<answer>\boxed{42} or 43</answer>",
        r"<answer>43 \boxed{42}</answer>",
        "<answer>42</answer><answer>43</answer>",
        "<answer>43</answer><answer>42</answer>",
        r"\boxed{43} \boxed{42}",
        r"\boxed{42} or maybe \boxed{43}",
        r"\boxed{41}\boxed{42}\boxed{43}\boxed{44}\boxed{45}",
        r"\boxed{41,42,43,44,45}",
        r"\boxed{41 \boxed{42}}",
        "#### 41\n#### 42",
        "#### 1\n#### 2\n#### 3\n#### 42",
        "The answer is 41. No, the answer is 42",
        "The answer is $42$ or $43$",
        "The answer is:\n$$42$$ or 43",
        "The answer is:\n43\n42",
        "Answer: 42\nAnswer:\n43",
        r"\boxed{6 \times 7}",
        r"\boxed{40+2}",
        "<answer></answer> the answer is 42",
        "<answer>42",
        "42</answer>",
        "</answer>42<answer>",
        r"\boxed{42} \boxed{43}",
        r"\boxed{42, 43}",
        r"\boxed{42",
        r"\boxed{42x}",
        r"\boxed{4}2",
        r"\boxed{420}",
        r"\boxed{-42}",
        r"\boxed{42%}",
        r"\boxed{42.0001}",
        r"\boxed{42 million}",
        r"boxed{42}",
        "#### 42 43",
        "#### 42\n#### 43",
        "The answer is 42 or 43",
        "The answer is 42, or maybe 43",
        "The answer is not 42",
        "The answer isn't 42",
        "The answer is 42. No, the answer is 43",
        "<think>the answer is 42</think>",
        r"<think>\boxed{42}</think> I do not know",
        "<answer>" + "0" * 500 + "42</answer>",
    ],
)
def test_a_near_miss_scores_zero(completion):
    assert reward(completion, "42") == 0.0


@each(
    "answer",
    [None, "", " ", "9^9^9^9", r"\frac{1}{2", r"\boxed{}", "2^{2^{99}}", "1" * 2000, "±", r"\foo", "see page 4"],
)
def test_a_gold_answer_that_cannot_be_read_is_invalid_not_wrong(answer):
    outcome = math_reward("<answer>42</answer>", Task(prompt="q", answer=answer))
    assert outcome.value is None
    assert "gold answer" in outcome.reason


def test_rounding_is_not_equality():
    assert reward("<answer>0.333</answer>", "1/3") == 0.0
    assert reward("<answer>0.1</answer>", "0.1000000000000000055511151231257827") == 0.0
    assert reward("<answer>9007199254740993</answer>", "9007199254740992") == 0.0


@each(
    "piece",
    [
        "9^",
        "\\boxed{",
        "\\boxed {",
        "{",
        "}",
        "<answer>",
        "</answer>",
        "####",
        "answer is ",
        "answer   ",
        "1,",
        "1/",
        " ",
        "9",
    ],
)
@each("form", ["{}", "<answer>{}</answer>", "\\boxed{{{}}}", "the answer is {}"])
def test_no_repetition_makes_it_slow(piece, form):
    text = form.format(piece * (300_000 // len(piece)))
    start = time.process_time()
    assert reward(text, "42") == 0.0
    assert time.process_time() - start < 1.0


def test_the_gold_answer_in_a_tag_scores_one_through_the_registry():
    for gold in ("42", "-1/2", "3.5", "1,000", "25%"):
        row = Rollout(tokens=[1], mask=[True], text=f"<answer>{gold}</answer>", task=Task(prompt="q", answer=gold))
        assert Reward(VERIFIERS["math"])([row])[0].value == 1.0


@pytest.mark.parametrize(
    ("text", "unit"), [("5 cm", "cm"), ("5 km/h", "km/h"), ("$5", "$"), ("42 green apples", "apples"), ("x = 5", "")]
)
def test_a_number_keeps_its_unit(text, unit):
    found = amount(text)
    assert found is not None
    assert found[1] == unit


def test_only_places_of_the_strongest_kind_are_read():
    text = r"#### 1 the answer is 2, \boxed{3} and \boxed{\boxed{\frac{4}{1}}} <answer>5</answer> <answer>6</answer>"
    assert places(text) == ["5", "6"]
    assert places(text.replace("answer>", "x>")) == ["3", r"\frac{4}{1}"]
    assert places("#### 1\nthe answer is 2") == [" 1"]


def test_final_answer_is_none_where_there_is_none():
    assert final_answer("I do not know") is None
