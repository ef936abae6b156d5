"""What a judge's answer settles on: its own last word, with its sign, on the scale that was asked for."""

import time

import pytest

from benchmarks.trials.judges import MARKS, NONE, QUOTED, WINNERS
from hone.reward.learned.judge import mark, winner


@pytest.mark.parametrize("table", [MARKS, QUOTED], ids=["written", "quoted"])
def test_the_mark_is_the_judges_own(table: tuple):
    for answer, low, high, wanted in table:
        assert mark(answer, low=low, high=high) == wanted, answer


def test_an_answer_that_leaves_the_mark_open_has_none():
    for answer, low, high in NONE:
        assert mark(answer, low=low, high=high) is None, answer


def test_the_winner_is_named_once():
    for answer, wanted in WINNERS:
        found = winner(answer)
        assert {"a": 1.0, "b": 0.0, "tie": 0.5, None: None}[found] == wanted, answer


def test_long_answers_are_read_in_linear_time():
    begin = time.process_time()
    for piece in ("Score: ", "score ", "*", "```\n", "Score:\n", "#", "{", "> ", "Winner: A or "):
        text = piece * (100_000 // len(piece))
        mark(text, low=1, high=10)
        winner(text)
    assert time.process_time() - begin < 5  # CPU: a busy machine does not count
