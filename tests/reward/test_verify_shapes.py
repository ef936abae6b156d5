"""Tests of programs in other shapes than one assert: runners, objects, coroutines, exceptions."""

import pytest

from benchmarks.trials import shape_cases as shapes
from benchmarks.trials.programs import fenced, reward

pytestmark = pytest.mark.usefixtures("needs_sandbox")


def misjudged(cases: tuple[tuple[str, str, float | None], ...]) -> list[tuple[str, str, str]]:
    """The cases whose verdict is another one, or stands without a reason."""
    found = [(code, test, wanted, reward(fenced(code), test_list=[test])) for code, test, wanted in cases]
    return [
        (code, test, f"{outcome.value} instead of {wanted}: {outcome.reason}")
        for code, test, wanted, outcome in found
        if outcome.value != wanted or (wanted != 1.0 and not outcome.reason)
    ]


def test_a_failed_run_of_unittest_fails_its_test_and_what_leaves_a_test_passes_none():
    assert misjudged(shapes.UNITTEST) == []


def test_tests_that_cannot_see_the_program_from_their_own_sandbox_are_invalid():
    assert misjudged(shapes.BLIND) == []


def test_objects_of_classes_that_tests_name_do_what_they_do_in_one_process():
    assert misjudged(shapes.OBJECTS) == []


def test_coroutines_of_a_program_can_be_awaited():
    assert misjudged(shapes.COROUTINES) == []


def test_an_exception_keeps_its_attributes_and_its_bases():
    assert misjudged(shapes.RAISED) == []
