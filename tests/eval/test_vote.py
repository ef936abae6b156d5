"""Majority voting: answers that the verifier holds for equal vote together."""

from dataclasses import replace

import pytest

from hone.eval.sample_metrics import majority_at, vote
from hone.launch.rewards import scorer
from hone.reward.score import score
from hone.types import Group, Outcome, Rollout, Task


def group(*texts: str, gold: str, reward: str = "math") -> Group:
    task = Task(prompt="?", answer=gold)
    rows = [Rollout(tokens=[0], mask=[True], task=task, text=text) for text in texts]
    return score([rows], scorer(reward))[0]


def test_the_commonest_answer_wins_though_it_is_written_in_several_ways():
    rows = group(
        "<answer>3</answer>", "<answer>1/2</answer>", r"\boxed{0.5}", r"The answer is \frac{1}{2}.", gold="0.5"
    )
    elected = vote(rows, "math")
    assert elected is rows[1]
    assert majority_at([rows]) == {"maj@4": 1.0}


def test_a_wrong_majority_is_wrong_where_pass_at_1_is_not_0():
    rows = group("<answer>7</answer>", "<answer>8</answer>", "<answer>8</answer>", gold="7")
    assert majority_at([rows]) == {"maj@3": 0.0}


def test_the_first_wins_among_equals_and_what_has_no_answer_does_not_vote():
    assert majority_at([group("<answer>7</answer>", "<answer>8</answer>", gold="7")]) == {"maj@2": 1.0}
    assert majority_at([group("<answer>8</answer>", "<answer>7</answer>", gold="7")]) == {"maj@2": 0.0}
    assert majority_at([group("hm", "hm", "hm", "<answer>7</answer>", gold="7")]) == {"maj@4": 1.0}
    assert majority_at([group("hm", "hm", gold="7")]) == {"maj@2": 0.0}


def test_over_problems_it_is_the_share_that_is_right():
    right = group("<answer>7</answer>", "<answer>7</answer>", "<answer>1</answer>", gold="7")
    wrong = group("<answer>7</answer>", "<answer>1</answer>", "<answer>1</answer>", gold="7")
    assert majority_at([right, wrong, right, wrong]) == {"maj@3": 0.5}
    assert majority_at([right, wrong, right]) == {"maj@3": pytest.approx(2 / 3)}


def test_letters_and_texts_vote_too():
    assert majority_at([group("The answer is B.", "(b)", "<answer>C</answer>", gold="B", reward="choice")]) == {
        "maj@3": 1.0
    }
    texts = ("<answer>red</answer>", "<answer>red</answer>", "<answer>blue</answer>")
    assert majority_at([group(*texts, gold="red", reward="exact")]) == {"maj@3": 1.0}


def test_one_sample_or_a_reward_without_answers_has_no_vote():
    assert majority_at([group("<answer>7</answer>", gold="7")]) == {}
    assert majority_at([]) == {}
    rows = [Rollout(tokens=[0], mask=[True], text="x", outcome=Outcome(value=1.0)) for _ in range(4)]
    assert majority_at([rows]) == {}


def test_a_first_completion_without_a_reward_takes_no_vote_from_the_others():
    first, *others = group("hm", "<answer>7</answer>", "<answer>7</answer>", gold="7")
    invalid = replace(first, outcome=Outcome(value=None, reason="crashed"))
    assert majority_at([[invalid, *others]]) == {"maj@3": 1.0}
