"""The README's table of speed says what the stored results say."""

import json
from pathlib import Path

import pytest

from benchmarks.table import README, RESULTS, table, written


def test_the_readme_holds_the_stored_results():
    text = README.read_text()
    assert written(text, table(RESULTS)) == text, "run `make table`"


def test_a_goal_that_is_missed_is_said_so(tmp_path: Path):
    row = {"name": "a step", "ours": 2.0, "peer": 1.0, "ratio": 2.0, "unit": "steps/s", "goal": ">= 3 x", "ok": False}
    memory = row | {
        "name": "memory",
        "ours": 5.0,
        "peer": 20.0,
        "ratio": 0.25,
        "unit": "GB",
        "goal": "<= 7",
        "ok": True,
    }
    machine = {"cpu": "a processor", "torch": "2.13", "date": "2026-01-01"}
    (tmp_path / "one.json").write_text(json.dumps({"rows": [row, memory, row | {"goal": None}], "machine": machine}))
    found = table(tmp_path)
    assert "| a step | 0.50 s | 1.00 s | 2 x | >= 3 x | **missed** |" in found
    assert "| memory | 5 GB | 20 GB | 4 x | <= 7 | met |" in found
    assert found.count("a step") == 1
    assert "a processor, torch 2.13, 2026-01-01" in found


def test_a_readme_without_marks_is_refused():
    with pytest.raises(SystemExit, match="marks"):
        written("no marks", "table")
