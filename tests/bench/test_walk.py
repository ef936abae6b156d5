"""The walk finds what it traces: the loops, and what saves a checkpoint."""

from pathlib import Path

import pytest

from benchmarks.walk import GOALS, model_folder, run_walks


def test_a_supervised_step_is_walked_within_its_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_BACKENDS", "plain")
    model_folder(tmp_path)
    (step,) = run_walks(tmp_path, online=False).values()
    files, _ = GOALS["SFT step"]
    assert next(iter(step.files)) == "loop.py"
    assert 5 < len(step.files) <= files
