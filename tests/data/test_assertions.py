"""Tests that no program can fail are refused when their row is read; tests that assert are not."""

import pytest

from benchmarks.trials.programs import DATA, rows
from benchmarks.trials.vacuous_tests import NOTHING, SOMETHING
from hone.data.rows.code_names import names_of
from hone.data.rows.record import task_row
from hone.errors import HoneError


def read(**columns: object) -> object:
    return task_row({"prompt": "Write f.", **columns})


def test_a_list_that_asserts_nothing_is_refused_with_the_remedy():
    for text in NOTHING:
        with pytest.raises(HoneError, match=r'column "test_list" asserts nothing.*write asserts') as error:
            read(test_list=[text])
        assert "\n" not in str(error.value), text
    with pytest.raises(HoneError, match="asserts nothing"):
        read(test_list=[])


def test_a_check_that_asserts_nothing_is_refused():
    for body in ("pass", "assert True", "'''doc'''", "assert (candidate(1) == 2, 'x')", "candidate(1)"):
        with pytest.raises(HoneError, match='column "test" asserts nothing'):
            read(test=f"def check(candidate):\n    {body}\n", entry_point="f")


def test_one_assert_is_enough():
    for text in SOMETHING:
        read(test_list=[text])
        read(test_list=["assert True", text])


def test_what_is_no_list_of_tests_is_none_of_this():
    for columns in ({"test_list": "x"}, {"test_list": [1]}, {"test_list": None}, {"test": "a plain text"}):
        read(**columns)
    read(test_list=[], inputs=["1"], outputs=["1"])
    read(test_list=["assert f("])  # not Python: told where it is judged


@pytest.mark.skipif(not DATA.is_dir(), reason="the real datasets are not here: ../shared/data")
def test_every_row_of_mbpp_and_humaneval_is_read():
    for name, number in (("mbpp/sanitized-mbpp.json", 427), ("humaneval/HumanEval.jsonl.gz", 164)):
        assert len([read(**row) for row in rows(name)]) == number


def test_names_are_told_apart_by_how_they_are_used():
    source = "import re\nassert f(1) == MAX and list(map(g, [1])) == [math.pi]\ntry:\n    f(2)\nexcept E:\n    pass"
    found = names_of(source)
    assert (found.called, found.used, found.raised) == (["f"], ["MAX", "g"], ["E"])
    assert found.lacking == {"math": "import math"}


def test_a_name_that_the_task_asks_for_is_not_taken_from_a_module():
    source = "assert Counter([1]) == 1 and f(1) == 2"
    assert names_of(source).lacking == {"Counter": "from collections import Counter"}
    assert names_of(source, prompt="Write f and Counter.").called == ["Counter", "f"]
    assert names_of("assert deque(1) == 2").called == ["deque"]
