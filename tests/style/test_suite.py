"""What the suite does on machines that lack something."""

import os
import re
import subprocess
import sys
from collections import Counter

from tree import ROOT


def test_gpu_tests_skip_without_a_gpu():
    words = [sys.executable, "-m", "pytest", "tests/model/test_recording.py", "-p", "no:cacheprovider"]
    found = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout
    assert "needs an NVIDIA GPU" in found.stdout


def test_no_two_files_of_the_tests_have_one_name():
    """pytest puts every folder of tests on the path: of two files with one name, one hides the other."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    twice = [name for name, number in Counter(path.name for path in files).items() if number > 1]
    assert twice == []


HANGS = """
import time
import pytest

@pytest.mark.timeout(1)
def test_that_waits_for_ever():
    time.sleep(600)

@pytest.mark.timeout(1)
def test_that_computes_for_ever():
    while True:
        pass

@pytest.mark.timeout(60)
def test_that_ends():
    time.sleep(2)
"""


def test_a_test_that_hangs_is_ended_and_the_others_go_on(tmp_path):
    (tmp_path / "test_hangs.py").write_text(HANGS)
    words = [sys.executable, "-m", "pytest", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    words += ["-p", "tests.watchdog", "-p", "no:cacheprovider", "-rA", str(tmp_path)]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    summary = found.stdout.partition("short test summary")[2]
    for name in ("waits", "computes"):
        assert re.search(rf"^FAILED .*::test_that_{name}_for_ever - Failed: Timeout", summary, re.M), found.stdout
    assert re.search(r"^PASSED .*::test_that_ends", summary, re.M), found.stdout
