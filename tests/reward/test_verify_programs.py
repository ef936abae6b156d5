"""Programs, their tests and the completions that hold them: each gets the verdict it deserves, and every 0 says why."""

import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.trials import completion_cases as completions
from benchmarks.trials import program_cases as programs
from benchmarks.trials.programs import DATA, rows
from hone.cli import main
from hone.errors import HoneError
from hone.reward.sandbox.sandbox import SandboxLimits
from hone.reward.verify.code.extract import extract
from hone.reward.verify.code.settings import CodeSettings, reward_arguments
from hone.reward.verify.code.tests import Cases, read_tests
from hone.reward.verify.code.verdict import code_reward
from hone.types import Outcome, Task

pytestmark = pytest.mark.usefixtures("needs_sandbox")
HEADS = "\n".join(programs.IMPORTS)
real = pytest.mark.skipif(not DATA.is_dir(), reason="the real datasets are not here: ../shared/data")
ADD = {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7"]}


def reward(completion: str, *, prompt: str = "", mode: str = "all", **extra: object) -> Outcome:
    return code_reward(completion, Task(prompt=prompt, extra=extra), mode=mode)


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def listed(code: str, *tests: str, **extra: object) -> Outcome:
    return reward(fenced(code), test_list=list(tests), **extra)


def test_what_is_equal_in_python_is_equal():
    for made, test in programs.FORMS:
        found = listed(f"{HEADS}\ndef f(): return {made}", f"assert {test}", test_imports=programs.IMPORTS)
        assert found.value == 1, (made, test, found.reason)


def test_what_python_tells_apart_is_0_with_a_reason():
    for made, test in programs.UNEQUAL:
        found = listed(f"{HEADS}\ndef f(): return {made}", f"assert {test}", test_imports=programs.IMPORTS)
        assert found.value == 0, (made, test)
        assert found.reason, (made, test)


@pytest.mark.parametrize("made", ["A()", "Point()", "L()"])
def test_no_method_of_a_returned_object_decides_a_comparison_with_data(made: str):
    for test in programs.FORGED:
        found = listed(f"{programs.SLY}\ndef f(x): return {made}", f"assert {test}", test_imports=programs.IMPORTS)
        assert found.value == 0, (made, test)


def test_the_exception_that_a_test_expects_is_the_one_that_is_raised():
    for code, test, wanted in programs.RAISED:
        found = listed(code, test)
        assert found.value == wanted, (code, test, found.reason)
        assert bool(found.reason) == (wanted == 0), (code, test)


def test_arguments_changed_in_place_are_seen_by_the_test():
    for code, tests, wanted in programs.CHANGED:
        assert listed(code, *tests).value == wanted, (code, tests)


def test_functions_and_objects_are_used_by_tests_as_in_one_process():
    for code, test, wanted in programs.OBJECTS:
        assert listed(code, test).value == wanted, (code, test)


def test_nodes_of_the_tests_are_walked_by_the_program():
    node = "class Node:\n    def __init__(s, val, left=None): s.val = val; s.left = left"
    total = "def total(t): return t.val + (total(t.left) if t.left else 0)"
    assert listed(total, "assert total(Node(1, Node(2))) == 3", test_setup_code=node).value == 1


def test_tests_that_cannot_run_are_invalid_whatever_the_program_is():
    for test in programs.CANNOT_RUN[:7]:
        for code in ("def f(x): return x", "def f(x): raise SystemExit", "import os; os._exit(0)", "("):
            found = listed(code, test)
            assert found.value is None, (code, test, found)
            assert found.reason, test


def test_tests_that_cannot_run_are_invalid_for_a_right_program():
    for test in programs.CANNOT_RUN:
        assert listed("def f(x): return x", test).value is None, test


def test_what_only_the_completion_causes_is_0_with_a_reason():
    for code, test in programs.FAILS:
        found = listed(code, test)
        assert found.value == 0, (code, test, found.reason)
        assert found.reason, (code, test)


def test_a_module_that_only_the_program_imports_is_there_for_the_tests():
    test = "assert math.isclose(f(1.0), 1.0)"
    assert listed("import math\ndef f(x): return x", test).value == 1
    assert listed("import math\ndef f(x): return 2 * x", test).value == 0
    missing = listed("def f(x): return x", test)
    assert missing.value is None
    assert "add 'import math' to test_imports" in missing.reason


def test_pytest_is_there_where_its_folder_is_shown():
    task = Task(prompt="", extra={"test_list": ["import pytest\nwith pytest.raises(ValueError):\n    f(-1)"]})
    folders = [sysconfig.get_paths()["purelib"]]
    if folders[0].startswith("/tmp/"):
        pytest.skip("pytest lies in /tmp, which programs do not see")
    right, wrong = fenced("def f(x): raise ValueError"), fenced("def f(x): raise KeyError")
    assert [code_reward(text, task, folders=folders).value for text in (right, wrong)] == [1.0, 0.0]


def test_a_folder_that_programs_cannot_see_is_refused():
    task = Task(prompt="", extra={"test_list": ["assert f(1) == 1"]})
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.raises(HoneError, match="move it out of /tmp"):
        code_reward(fenced("def f(x): return x"), task, folders=[folder])


def test_a_test_that_asserts_nothing_is_no_share():
    tests = ["x = 3", "assert True", "assert list(f(x)) == [3]", "assert list(f(4)) == [5]"]
    assert reward(fenced("def f(x): return [x]"), mode="fraction", test_list=tests).value == 0.5


def test_scripts_run_to_the_end_of_all_that_they_started():
    for code, printed in programs.SCRIPTS:
        found = reward(fenced(code), inputs=[""], outputs=[printed])
        assert found.value == 1, (code, found.reason)


def test_a_script_that_ends_in_its_exit_handler_has_not_ended_by_itself():
    code = "import atexit, os\natexit.register(os._exit, 0)\nprint(1, flush=True)"
    assert reward(fenced(code), inputs=[""], outputs=["1"]).value == 0


@pytest.mark.parametrize(
    ("setting", "code", "extra"),
    [
        ("output", "print('x' * 300000)", {"inputs": [""], "outputs": ["x" * 300_000]}),
        ("input", "print(len(input()))", {"inputs": ["x" * (17 << 20)], "outputs": ["1"]}),
        ("input", "def f(x): return 1", {"inputs": [["x" * (17 << 20)]], "outputs": [1], "fn_name": "f"}),
        ("result", "def f(): return 'x' * 1200000", {"test_list": [f"assert f() == {'x' * 1200000!r}"]}),
    ],
)
def test_what_is_larger_than_a_setting_names_the_setting(setting: str, code: str, extra: dict):
    found = reward(fenced(code), **extra)
    assert found.value is None
    assert f"raise {setting} in a code:FILE.yaml" in found.reason


def test_larger_settings_take_larger_tests():
    how = reward_arguments(CodeSettings(output=1, result=4), "code.yaml")
    assert how["limits"] == SandboxLimits(output=1 << 20, result=4 << 20)
    printed = Task(prompt="", extra={"inputs": [""], "outputs": ["x" * 300_000]})
    assert code_reward(fenced("print('x' * 300000)"), printed, **how).value == 1
    returned = Task(prompt="", extra={"test_list": [f"assert f() == {'x' * 2_000_000!r}"]})
    assert code_reward(fenced("def f(): return 'x' * 2000000"), returned, **how).value == 1


def test_an_input_that_the_disk_cannot_hold_is_an_error_of_the_settings():
    with pytest.raises(HoneError, match=r"code.yaml: .* set disk to 64 MiB or more"):
        reward_arguments(CodeSettings(input=64), "code.yaml")


def test_a_program_is_found_however_a_completion_holds_it():
    for text, wanted in completions.FUNCTIONS:
        found = reward(text, **ADD)
        assert found.value == wanted, (text, found.reason)
    for text, wanted in completions.PROGRAMS:
        assert reward(text, **SUM).value == wanted, text
    checks = {"test": "def check(candidate):\n    assert candidate([1, 2], 2) == [2, 4]", "entry_point": "scale"}
    for text, wanted in completions.CONTINUED:
        assert reward(text, prompt=completions.PROMPT, **checks).value == wanted, text


def test_which_block_was_taken_is_said():
    right, wrong = fenced(completions.ADD), fenced(completions.WRONG)
    assert reward(f"{right}\n```\n3\n```", **ADD).reason == "took block 1 of 2"
    assert reward(f"{right}\n{wrong}", **ADD).reason.startswith("took block 2 of 2: test 1 of 2 failed")
    assert (
        reward(f"{fenced(completions.HELPED)}\n{fenced(completions.CALLS)}", **ADD).reason == "took block 1 and 2 of 2"
    )
    assert reward(right, **ADD).reason == ""


def test_hostile_completions_are_searched_in_bounded_time():
    for count, line in ((2000, "{0} = 1"), (600, "{0} = []\n{0}.append(1)")):
        names = [f"n{i}" for i in range(count)]
        uses = "def add(a, b): return a + b\ndef z(): return [" + ", ".join(names) + "]"
        defines = "\n".join(line.format(name) for name in names)
        start = time.process_time()
        found = extract(fenced(defines) + "\n" + fenced(uses), wanted=["add"])
        assert time.process_time() - start < 3  # 14 where all of a block is walked for each name
        assert found is not None
        assert found.source == f"{defines}\n{uses}\n"
    for text in ("```python\n" * 8000, "```" * 30000, "```python\n'''\n```\n" * 5000, "~~~\n" * 20000, "(" * 90000,
                 "def add(\n" * 10000, "-" * 90000, " " * 90000 + "x```python\n", "a=" * 20000 + "1"):  # fmt: skip
        extract(text, wanted=["add"])  # that it returns is the fact: each was quadratic, or too deep, for some rule


def test_leetcode_asks_for_a_method_by_its_call():
    task = {"test": "def check(candidate):\n    assert candidate(a = 1, b = 2) == 3", "entry_point": "Solution().add"}
    assert isinstance(read_tests(Task(prompt="", extra=task)), Cases)
    assert reward(fenced("class Solution:\n    def add(self, a, b): return a + b"), **task).value == 1


def test_json_has_no_tuples():
    task = {"inputs": [[1]], "outputs": [[1, [2, {"3": 4}]]], "fn_name": "f"}
    assert reward(fenced("def f(x): return (x, (2, {3: 4}))"), **task).value == 1
    assert reward(fenced("def f(x): return (x, (2, {3: 5}))"), **task).value == 0


@real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gold"), [("mbpp/sanitized-mbpp.json", "code"), ("humaneval/HumanEval.jsonl.gz", "canonical_solution")]
)
def test_every_reference_solution_passes_by_the_command_and_the_function(name: str, gold: str):
    assert main(["rewards", "test", str(DATA / name), "--reward", "code", "--gold", gold]) == 0
    wrong = [r["task_id"] for r in rows(name) if reward(r[gold] if "test" in r else fenced(r[gold]), **r).value != 1]
    assert wrong == []


@real
def test_reference_solutions_that_need_an_import_or_are_named_like_a_builtin_pass():
    wanted = {82, 126, 137, 596}
    found = {
        r["task_id"]: reward(fenced(r["code"]), **r) for r in rows("mbpp/sanitized-mbpp.json") if r["task_id"] in wanted
    }
    assert {number: outcome.value for number, outcome in found.items()} == dict.fromkeys(wanted, 1.0)


def test_the_command_names_the_row_whose_tests_assert_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "code": "x", "test_list": ["assert 1 == 1"]}\n')
    assert main(["rewards", "test", str(tmp_path / "rows.jsonl"), "--reward", "code", "--gold", "code"]) == 2
    assert 'rows.jsonl row 1: column "test_list" asserts nothing (assert 1 == 1)' in capsys.readouterr().err
