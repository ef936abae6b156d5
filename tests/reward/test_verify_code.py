"""Programs as rewards: right ones pass, spoofed ones do not, and no test's answer is where the program is."""

import itertools
import json
import os
import threading
import time
from threading import Thread
from typing import Any

import pytest
from each import each
from patience import patience

from benchmarks.hostile import PROGRAMS
from hone.errors import HoneError
from hone.reward.sandbox.sandbox import Call, Finished, Sandbox, SandboxError, SandboxLimits
from hone.reward.verify.code.checker import Checker
from hone.reward.verify.code.extract import extract
from hone.reward.verify.code.tests import Asserts, Cases, NoTests, Scripts, read_tests
from hone.reward.verify.code.verdict import code_reward, run_tests
from hone.types import Task

CHECK = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate([1, 2, 3], 2) == [2, 4, 6]
    assert candidate([], k=5) == [], "empty"
    assert candidate([-1], 3) == [-3]
    assert True, "done"
"""
PROMPT = (
    'from typing import List\n\ndef one() -> int:\n    return 1\n\ndef scale(xs: List[int], k: int):\n    """x k"""\n'
)
HUMAN_EVAL = Task(prompt=PROMPT, extra={"test": CHECK, "entry_point": "scale"})
MBPP = Task(
    prompt="add", extra={"test_list": ["assert add(1, 2) == 3", "assert add(-4, 4) == 0", "assert add(2, 2) == 4"]}
)
STDIN = Task(prompt="sum", extra={"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]})
LOOP = """
import math
def check(candidate):
    for x in range(5):
        assert math.isclose(candidate(x), x ** 0.5)
    try:
        candidate(-1)
    except Exception:
        return
    assert False, "no error"
"""
LOOPED = Task(prompt="root", extra={"test": LOOP, "entry_point": "root"})
pytestmark = pytest.mark.usefixtures("needs_sandbox")


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


def value(code, task, **how):
    return code_reward(fenced(code), task, **how).value


def test_tests_are_read_without_running_them():
    cases = read_tests(HUMAN_EVAL)
    assert isinstance(cases, Cases)
    assert [c.call for c in cases.cases][:2] == [Call("scale", [[1, 2, 3], 2]), Call("scale", [[]], {"k": 5})]
    assert [c.condition([2, 4, 6]) for c in cases.cases] == [True, False, False]
    assert isinstance(read_tests(MBPP), Cases)
    assert read_tests(STDIN) == Scripts([("1 2\n", "3\n"), ("5 5\n", "10")])
    looped = read_tests(LOOPED)
    assert isinstance(looped, Asserts)
    assert looped.wanted == ("root",)


@each(
    ("text", "right", "wrong"),
    [
        ("assert f(1)", [1, "x", True], [0, "", None, []]),
        ("assert not f(1)", [0, None, []], [1, "no"]),
        ("assert f(1) is True", [True], [1, "True", None]),
        ("assert f(1) is None", [None], [0, False]),
        ("assert abs(f(1) - 2.5) < 0.1", [2.5, 2.45], [2.7, "2.5", None, float("nan")]),
        ("assert f(1) == (1, 2)", [(1, 2)], [[1, 2], (1, 2, 3)]),
        ("assert f(1) == {'a': [1]}", [{"a": [1]}], [{}, {"a": [1, 2]}]),
    ],
)
def test_each_form_of_assert_is_judged_as_python_would(text, right, wrong):
    tests = read_tests(Task(prompt="", extra={"test_list": [text]}))
    assert isinstance(tests, Cases)
    assert all(tests.cases[0].condition(v) for v in right)
    assert not any(tests.cases[0].condition(v) for v in wrong)


def test_a_right_program_scores_one_and_a_wrong_one_zero():
    assert value("def scale(xs, k): return [x * k for x in xs]", HUMAN_EVAL) == 1
    assert value("def scale(xs, k): return xs", HUMAN_EVAL) == 0
    assert code_reward("    return [x * k * one() for x in xs]\n", HUMAN_EVAL).value == 1  # it goes on from the prompt
    assert value("def scale(xs: List[int], k): return [x * k * one() for x in xs]", HUMAN_EVAL) == 1
    assert value("a, b = map(int, input().split())\nprint(a + b, ' ')", STDIN) == 1
    assert value("print(3)", STDIN) == 0
    assert value("import os\nprint(3, flush=True); os._exit(0)", STDIN, mode="fraction") == 0  # not to its end


def test_the_fraction_counts_tests():
    half = "def add(a, b):\n    if a < 0: raise ValueError\n    return a + b"
    assert value(half, MBPP) == 0
    assert value(half, MBPP, mode="fraction") == pytest.approx(2 / 3)
    assert value("print(3)", STDIN, mode="fraction") == 0.5
    hang = "def add(a, b):\n    while a == 2: pass\n    return a + b"
    assert run_tests(hang, read_tests(MBPP), limits=SandboxLimits(seconds=0.5))[0] == [True, True, False]


def test_tests_that_are_more_than_comparisons_ask_from_a_sandbox_of_their_own():
    good = "def root(x):\n    if x < 0: raise ValueError\n    return x ** 0.5"
    assert value(good, LOOPED) == 1
    assert value("def root(x): return abs(x) ** 0.5", LOOPED) == 0  # no error for -1
    assert value("def root(x): return x", LOOPED) == 0
    spoof = "class A:\n    def __eq__(s, o): return True\n    def __float__(s): return 1.0\ndef root(x): return A()"
    assert value(spoof, LOOPED) == 0
    patched = "import math\nmath.isclose = lambda *a: True\ndef root(x):\n    if x < 0: raise ValueError\n    return 0"
    assert value(patched, LOOPED) == 0
    texts = ["assert set(pair(1)) == set([1, 2])", "assert sorted(pair(2))[0] == 2", "assert pair(3) == 'no'"]
    mbpp = Task(prompt="", extra={"test_list": texts, "test_setup_code": "import math"})
    assert isinstance(read_tests(mbpp), Asserts)
    assert value("def pair(x): return [x, x + 1]", mbpp, mode="fraction") == pytest.approx(2 / 3)


def test_helpers_of_the_prompt_are_there_for_the_tests_too():
    test = "def check(candidate):\n    for x in range(3):\n        assert candidate(double(x)) == x"
    prompt = "def double(x):\n    return 2 * x\n\ndef half(x):\n"
    task = Task(prompt=prompt, extra={"test": test, "entry_point": "half"})
    assert code_reward("    return double(x) // 4\n", task).value == 1
    assert value("def half(x): return x", task) == 0


@pytest.mark.parametrize(
    "code", ["import os\nos._exit(0)", "1/0", "def root(x):\n    import os\n    os._exit(0)", "x = ("]
)
def test_a_program_that_ends_early_fails_every_test_that_asks_it(code):
    assert value(code, LOOPED) == 0


def test_expected_values_are_not_where_the_program_is():
    nosy = """
import gc
def add(a, b):
    texts = [o for o in gc.get_objects() if isinstance(o, (list, tuple, dict)) and len(o) < 50]
    wanted = int("31337")
    return wanted if any(wanted in (o.values() if isinstance(o, dict) else o) for o in texts) else None
"""
    hidden = Task(prompt="", extra={"test_list": ["assert add(1, 2) == 31337"]})
    assert value(nosy, hidden) == 0


def test_spoofed_verdicts_score_zero():
    spoofs = [p for p in PROGRAMS if p.kind == "V" and p.id != "V053" and "long" not in p.marks]
    spoofs = [*spoofs[::4], *(p for p in spoofs if p.id == "V066")]
    tests = read_tests(Task(prompt="", extra={"test_list": ["assert add(17, 25) == 42", "assert add(2, -9) == -7"]}))
    assert [p.id for p in spoofs if all(run_tests(p.code, tests)[0])] == []


def program_of(completion: str) -> str | None:
    found = extract(completion, wanted=read_tests(MBPP).wanted)
    return found.source if found else None


def test_the_last_program_of_a_completion_counts():
    text = fenced("def add(a, b): return 0") + "Wait.\n" + fenced("def add(a, b): return a + b") + "```text\nx\n```"
    assert code_reward(text, MBPP).value == 1
    assert code_reward("<think>" + fenced("def add(a, b): return a + b") + "</think>I give up.", MBPP).value == 0
    assert program_of("```\nx = 1\n") == "x = 1\n"  # cut off before the fence is closed
    assert program_of(" \n") is None


def test_a_program_is_found_as_other_machines_write_it():
    wanted = "if x:\n    y = 1\n"
    assert program_of("```python\r\nif x:\r\n    y = 1\r\n```\r\nDone.") == wanted
    assert program_of("1. Do\n   ```python\n   if x:\n       y = 1\n   ```\n") == wanted
    assert program_of("```python\n\ufeffif x:\n    y = 1\n```") == wanted


@each(
    "extra",
    [
        {},
        {"test_list": []},
        {"test_list": "assert f(1)"},
        {"test_list": [1]},
        {"test_list": ["assert f("]},
        {"test": "x = 1", "entry_point": "f"},
        {"test": CHECK, "entry_point": "no name"},
        {"test": CHECK},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"inputs": "1", "outputs": "2"},
        {"inputs": ["1", None], "outputs": ["1", "2"]},
        {"inputs": ["1"], "outputs": [None]},
        {"inputs": ["1"], "outputs": ["2"], "fn_name": "f"},
        {"input_output": "no json"},
        {"input_output": "[1]"},
        {"test_list": ["(" * 500 + ")" * 500]},
    ],
)
def test_a_task_without_tests_that_can_be_read_is_invalid_not_wrong(extra):
    outcome = code_reward(fenced("def f(): pass"), Task(prompt="", extra=extra))
    assert not outcome.valid
    assert outcome.reason
    with pytest.raises(NoTests):
        read_tests(Task(prompt="", extra=extra))


def test_functions_with_inputs_and_outputs_as_json():
    rows = {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "add"}
    task = Task(prompt="", extra={"input_output": json.dumps(rows)})
    assert value("def add(a, b): return a + b", task) == 1


def test_hostile_text_is_no_crash():
    for text in ("", "\0", "\ud800", "```python\n" * 1000, "```python\n\ud800 = 1\n```", "x = 'é" * 1000):
        assert code_reward(text, MBPP).value == 0


def test_many_examinations_at_once_do_not_wait_for_each_other():
    found = []
    good = "def root(x):\n    if x < 0: raise ValueError\n    return x ** 0.5"
    threads = [threading.Thread(target=lambda: found.append(value(good, LOOPED))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert found == [1.0] * 8


class Late(Sandbox):
    """The first program asks for its slot when others have asked for theirs."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.calls = itertools.count()

    def converse(self, *args: Any, **settings: Any) -> Finished:
        time.sleep(0.0 if next(self.calls) else 0.5)
        return super().converse(*args, **settings)


def test_programs_and_tests_that_take_the_last_slots_do_not_wait_for_each_other():
    tests = read_tests(LOOPED)
    assert isinstance(tests, Asserts)
    good = "def root(x):\n    if x < 0: raise ValueError\n    return x ** 0.5"
    found = []
    with Late() as programs, Sandbox(slots=1) as checkers:
        # the second program has the only slot before the first one asks, whose tests would have theirs
        exams = [Checker(good, tests, 5.0) for _ in range(2)]
        threads = [Thread(target=lambda e=e: found.append(e.run(programs, checkers)), daemon=True) for e in exams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(30))
        assert found == [[True], [True]]


def test_a_forked_process_judges_in_sandboxes_of_its_own():
    right = fenced("def add(a, b): return a + b")
    assert code_reward(right, MBPP).value == 1
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if code_reward(right, MBPP).value == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert code_reward(right, MBPP).value == 1


def test_a_sandbox_that_fails_under_a_program_is_no_verdict_on_it():
    tests = read_tests(Task(prompt="", extra={"test_list": ["for x in add(1, 2): assert x == 3"]}))
    assert isinstance(tests, Asserts)
    programs, checkers = Sandbox(slots=1), Sandbox(slots=1)
    programs.close()
    with checkers, pytest.raises(SandboxError, match="closed"):
        Checker("def add(a, b): return [a + b]", tests, 5.0).run(programs, checkers)


def test_an_unknown_mode_is_refused():
    with pytest.raises(HoneError, match="use all or fraction"):
        code_reward("", MBPP, mode="some")


def test_a_script_that_hangs_on_every_input_is_given_up():
    given = Task(prompt="q", extra={"inputs": ["1"] * 20, "outputs": ["1"] * 20})
    start = time.monotonic()
    assert value("import time; time.sleep(60)", given, limits=SandboxLimits(seconds=0.3)) == 0.0
    assert time.monotonic() - start < patience(10)


@pytest.mark.parametrize(
    ("extra", "code", "wanted"),
    [
        ({"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}, "def add(a, b): return a + b", 1.0),
        ({"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}, "def add(a, b): return [a - b]", 0.0),
        ({"inputs": [[1, 2]], "outputs": [3]}, "class Solution:\n    def add(self, a, b): return a + b", 1.0),
        ({"inputs": [[[1], 2]], "outputs": [[1, 2]]}, "def add(a, b): return a + [b]", 1.0),
        ({"inputs": [[[1], 2]], "outputs": [[1, 2]]}, "def add(a, b): return 1", 0.0),
    ],
)
def test_apps_boxes_its_outputs_and_asks_for_methods(extra: dict, code: str, wanted: float):
    assert value(code, Task(prompt="q", extra={**extra, "fn_name": "add"})) == wanted


def test_apps_writes_lines_as_lists():
    given = Task(prompt="q", extra={"inputs": [["1", "2"]], "outputs": [["3", "4"]]})
    assert value("print(int(input()) + int(input())); print(4)", given) == 1.0


@pytest.mark.parametrize(
    "extra",
    [
        {"test": "def check(candidate):\n    pass", "entry_point": "f"},
        {"test": "def check(candidate):\n    'nothing'\n    assert True", "entry_point": "f"},
        {"test_list": ["pass", "assert True"]},
    ],
)
def test_tests_that_test_nothing_are_none(extra: dict):
    outcome = code_reward(fenced("def f(): return 1"), Task(prompt="q", extra=extra))
    assert outcome.value is None
    assert "tests nothing" in outcome.reason


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("def add(x) return", "SyntaxError: expected ':'"),
        ("raise ValueError('\\x1b[2J\\nrow 3 passed')", "ValueError: [2J row 3 passed"),
        ("import sys; sys.stderr.write('\\n\\x00\\x9b31m' + 'y' * 10**5)", "KeyError"),
        ("while True: pass", "ended by the limit of its time"),
        ("def add(a, b): return a + b", ""),
    ],
)
def test_what_a_failed_program_says_is_one_short_line_and_moves_no_verdict(program: str, says: str):
    found = code_reward(fenced(program), MBPP, limits=SandboxLimits(seconds=0.5))
    assert found.value == float(not says)
    assert says in found.reason
    assert bool(says) == bool(found.reason)
    assert found.reason.isprintable()
    assert len(found.reason) <= 200
