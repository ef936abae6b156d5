"""The policies of docs/verifiers.md, both ways, on the trial's pairs and on Math-Verify's own test cases."""

import pytest

from benchmarks.trials import forms, math_verify
from hone.reward.verify.compare import numeric
from hone.reward.verify.math.verdict import math_reward
from hone.types import Outcome, Task

PERCENT = (
    "%",
    r"\%",
    " %",
    r"\ \%",
    " percent",
    " per cent",
    " pct",
    " pct.",
    " percentage",
    "\uff05",
    r"\text{ percent}",
)


def reward(answer: str, gold: str) -> float | None:
    return forms.judged(answer, gold).value


def test_what_is_equal_in_another_form_scores_1_and_what_only_looks_like_it_0():
    wrong = list[str]()
    for kind, both in forms.pairs().items():
        assert all(both.values()), kind
        wrong += [f"{a} for {g}: not 1" for a, g in both["right"] if reward(a, g) != 1.0]
        wrong += [f"{a} for {g}: not 0" for a, g in both["wrong"] if reward(a, g) != 0.0]
    assert wrong == []


def test_every_gold_answer_of_the_pairs_is_right_as_itself():
    golds = {gold for both in forms.pairs().values() for side in both.values() for _, gold in side}
    assert [gold for gold in golds if reward(gold, gold) != 1.0] == []


def test_every_fraction_and_raised_digit_of_unicode_is_read():
    assert [(a, g) for a, g, wanted in forms.unicode_pairs() if reward(a, g) != wanted] == []


def test_the_percent_sign_has_one_meaning_in_every_spelling_and_only_an_answer_may_leave_it_out():
    for sign in PERCENT:
        assert reward(f"5{sign}", "5") == 0.0, sign
        assert reward(f"5{sign}", "0.05") == 1.0, sign
        for other in PERCENT:
            assert reward(f"5{sign}", f"5{other}") == 1.0, (sign, other)
            assert reward(f"6{sign}", f"5{other}") == 0.0, (sign, other)
        assert reward("5", f"5{sign}") == reward("0.05", f"5{sign}") == 1.0, sign
        assert reward("0.5", f"5{sign}") == reward("500", f"5{sign}") == 0.0, sign


def test_numeric_follows_the_rule_of_the_percent_sign():
    def near(answer: str, gold: str) -> float | None:
        return numeric("1%")(f"<answer>{answer}</answer>", Task(prompt="q", answer=gold)).value

    assert near("50.1%", "50%") == near("50.1", "50%") == near("0.501", "50%") == 1.0
    assert near("50%", "50") == near("5000%", "50%") == 0.0


def test_a_comma_is_decimal_only_where_it_separates_neither_thousands_nor_entries():
    assert reward("3,5", "3.5") == reward("1.234,5", "1234.5") == reward("12,5 cm", "12.5") == 1.0
    assert reward("1,234", "1234") == reward("3,5", "3, 5") == reward("(3,5)", "(3, 5)") == 1.0
    assert reward("1,234", "1.234") == reward("3.5", "3,5") == reward("(3,5)", "3.5") == reward("3, 5", "3.5") == 0.0


def test_several_boxes_are_one_list_where_a_list_is_asked_for_and_no_way_to_guess_a_number():
    def boxed(text: str, gold: str) -> float | None:
        return math_reward(text, Task(prompt="q", answer=gold)).value

    assert boxed(r"\boxed{1} and \boxed{2}", "1, 2") == boxed(r"\boxed{2}, \boxed{1}", r"\{1,2\}") == 1.0
    assert boxed(r"\boxed{1} and \boxed{3}", "1, 2") == boxed(r"\boxed{1} and \boxed{2}", "2") == 0.0
    assert boxed(r"\boxed{1,2}", r"the roots are $\boxed{1}$ and $\boxed{2}$") == 1.0
    assert boxed(r"\boxed{1}", r"the roots are $\boxed{1}$ and $\boxed{2}$") == 0.0


def test_a_gold_answer_that_cannot_be_read_is_invalid_and_says_so():
    for gold in forms.UNREADABLE:
        found = forms.judged("5", gold)
        assert found.value is None, gold
        assert found.reason.startswith("the gold answer"), gold


def test_no_answer_of_the_policys_makes_the_gold_answer_look_unreadable():
    strange = (
        *forms.UNREADABLE,
        "5 = ",
        "= =",
        r"\approx",
        r"\approx \approx 5",
        "x:y:z:w:v",
        r"\ne",
        "<",
        ";;",
        r"\pm\pm",
    )
    found = {
        (answer, gold): forms.judged(answer, gold) for answer in strange for gold in ("5", "x+1", "(1,2)", "x>3", "3:4")
    }
    assert [pair for pair, outcome in found.items() if outcome != Outcome(value=0.0)] == []


@pytest.fixture(scope="module")
def differing() -> dict[str, float | None]:
    return {pair.name: math_verify.verdict(pair) for pair in math_verify.disagreements()}


def test_hone_differs_from_math_verify_on_the_cases_that_are_explained_and_on_no_other(differing):
    assert len(math_verify.pairs()) == 269
    assert differing.keys() == math_verify.DISAGREEMENTS.keys()


def test_where_math_verify_is_right_hone_says_that_it_cannot_tell_and_never_0(differing):
    assert {who for who, _ in math_verify.DISAGREEMENTS.values()} == {"Hone", "Math-Verify", "policy"}
    theirs = [name for name, (who, _) in math_verify.DISAGREEMENTS.items() if who == "Math-Verify"]
    assert [name for name in theirs if differing[name] is not None] == []


def test_a_difference_by_policy_names_the_policy():
    reasons = [why for who, why in math_verify.DISAGREEMENTS.values() if who == "policy"]
    assert [why for why in reasons if not any(word in why for word in ("policy", "Hone takes", "Hone says"))] == []


def test_a_letter_that_another_follows_is_no_answer():
    for text in ("The answer is A. B.", "The answer is (A). (B).", "The answer is A.\nB", "The answer is **A**; C."):
        assert math_reward(text, Task(prompt="", answer="A")).value == 0, text
    for text in ("The answer is A.", "The answer is A. B is wrong.", "The answer is A. I checked it."):
        assert math_reward(text, Task(prompt="", answer="A")).value == 1, text
    assert math_reward("The answer is 5 g.", Task(prompt="", answer="5")).value == 1, "a unit is no option"
