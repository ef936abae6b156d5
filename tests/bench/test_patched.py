"""Tests on patched sources: green without a patch, red with one, and nothing hangs, leaks or passes by mistake."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.patched import Bench, bench

pytest.importorskip("hypothesis")
CODE = "hone/__init__.py"
SOURCE = "def twice(x):\n    return 2 * x\n"
TESTS = """
import subprocess
import sys

import hone


def test_fast():
    assert hone.twice(2) == 4


def test_in_a_process_of_its_own():
    out = subprocess.run([sys.executable, "-c", "import hone; print(hone.twice(3))"], capture_output=True, text=True)
    assert out.stdout == "6\\n"
"""


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("repository")
    for path, text in ((f"src/{CODE}", SOURCE), ("tests/test_it.py", TESTS), ("tests/test_none.py", "")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: x", "gpu: x"]\n')
    with bench(1, root=root) as made:
        (root / f"src/{CODE}").write_text("broken while the bench is at work")
        yield made


def test_green_without_a_patch_and_red_with_one(on: Bench) -> None:
    assert not on.verdict({}, ["tests/test_it.py"]).red
    found = on.verdict({CODE: SOURCE.replace("2 * x", "3 * x")}, ["tests/test_it.py"])
    assert (found.red, found.how, found.by) == (True, "red", "tests/test_it.py::test_fast")
    assert "6 == 4" in found.why
    assert not on.verdict({}, ["tests/test_it.py"]).red, "a patch leaves nothing behind"


def test_processes_that_a_test_starts_see_the_patch(on: Bench) -> None:
    test = "tests/test_it.py::test_in_a_process_of_its_own"
    assert not on.verdict({}, [test]).red
    assert on.verdict({CODE: SOURCE.replace("2 * x", "3 * x")}, [test]).red


def test_the_tests_asked_for_come_first(on: Bench) -> None:
    last = "tests/test_it.py::test_in_a_process_of_its_own"
    found = on.verdict({CODE: SOURCE.replace("2 * x", "3 * x")}, ["tests/test_it.py"], first=[last])
    assert found.by == last


@pytest.mark.parametrize(
    ("text", "how", "limit"),
    [
        ("while True:\n    pass\n", "timed out", 1),
        ("import os\nos._exit(3)\n", "died", 60),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "died", 60),
        ("import no_such_module\n", "does not import", 60),
        ("def twice(x:\n", "does not import", 60),
    ],
)
def test_what_cannot_run_is_caught(on: Bench, text: str, how: str, limit: float) -> None:
    found = on.verdict({CODE: text}, ["tests/test_it.py"], limit=limit)
    assert (found.red, found.how) == (True, how)


def test_no_tests_is_an_error_and_not_a_pass(on: Bench) -> None:
    with pytest.raises(RuntimeError, match="no test"):
        on.verdict({}, ["tests/test_none.py"])


def test_trees_are_removed_and_the_snapshot_is_kept(on: Bench) -> None:
    with on.tree({CODE: "x = 1\n"}) as place:
        assert (place / "src" / CODE).read_text() == "x = 1\n"
        assert on.source(CODE) == SOURCE
    assert not Path(place).exists()


def test_each_gives_every_item_with_its_result(on: Bench) -> None:
    assert sorted(on.each(lambda n: n * n, [1, 2, 3])) == [(1, 1), (2, 4), (3, 9)]
