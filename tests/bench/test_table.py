"""The tables of the pages say what the stored results say."""

import json
from pathlib import Path

import pytest

from benchmarks.table import (
    CREDIT,
    CREDIT_MARKS,
    MARKS,
    MATHS,
    MATHS_MARKS,
    PAGE,
    PROCESS,
    RESULTS,
    SPEED,
    VERIFIERS,
    gain_tables,
    maths_tables,
    table,
    written,
)  # fmt: skip


def test_the_page_of_speed_holds_the_stored_results():
    text = SPEED.read_text()
    assert written(text, table(RESULTS)) == text, "run `make table`"


@pytest.mark.parametrize(("path", "marks"), [(PROCESS, MARKS), (CREDIT, CREDIT_MARKS)], ids=["process", "credit"])
def test_the_page_of_process_models_holds_the_stored_results(path: Path, marks: tuple[str, str]):
    text = PAGE.read_text()
    assert written(text, gain_tables(path), marks=marks) == text, "run `make table`"


def test_the_page_of_verifiers_holds_the_stored_result():
    text, made = VERIFIERS.read_text(), maths_tables(json.loads(MATHS.read_text()))
    assert written(text, made, marks=MATHS_MARKS) == text, "run `make table`"


def test_shares_of_gold_answers_are_told_as_counts_beside_the_library():
    def row(name: str, ours: float, peer: float | None = None) -> dict:
        return {"name": name, "ours": ours, "peer": peer, "unit": "share", "goal": None}

    kinds = [row(f"set, {kind}: accepted of 2000", 0.5, 0.25) for kind in ("gold", "equivalent", "perturbed")]
    other = row("set, gold: same verdict as the library", 1.0)
    rows = [*kinds, other, row("set, equivalent: rate", 1234.0, 56.0), row("hostile: accepted", 0.0)]
    text = maths_tables({"rows": rows, "machine": {"cpu": "a processor", "cores": 2, "date": "2026-01-01"}})
    assert (
        "| `set` | 1,000 of 2,000 (25.0 %) | 1,000 of 2,000 (25.0 %) | 1,000 of 2,000 (25.0 %) | 1,234 (56) |" in text
    )
    assert "| hostile: accepted | 0 % |  |" in text
    assert "same verdict" not in text


def test_gains_and_values_are_told_seed_by_seed(tmp_path: Path):
    gain = {"name": "a", "ours": 2.0, "seeds": [1.0, 3.0], "goal": "> 0", "ok": False, "standard_error": 1.0}
    found = {
        "rows": [gain, {"name": "b", "ours": 50.0, "seeds": [49.0, 51.0], "goal": None}, {"name": "c", "goal": None}]
    }
    stored = tmp_path / "gains.json"
    stored.write_text(json.dumps(found | {"machine": {"cpu": "a processor", "date": "2026-01-01"}}))
    text = gain_tables(stored)
    assert "| a | +1.0, +3.0 | +2.0, 1.0 | **missed** |" in text
    assert "| b | 49.0, 51.0 | 50.0 |" in text
    assert "| c |" not in text


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


def test_a_result_without_goals_adds_neither_a_row_nor_a_machine(tmp_path: Path):
    machine = {"cpu": "a processor", "torch": "2.13", "date": "2026-01-01"}
    (tmp_path / "hashes.json").write_text(json.dumps({"trajectories": {}, "machine": machine}))
    (tmp_path / "free.json").write_text(json.dumps({"rows": [{"name": "free", "goal": None}], "machine": machine}))
    assert "free" not in table(tmp_path)
    assert "a processor" not in table(tmp_path)


def test_a_page_without_marks_is_refused():
    with pytest.raises(SystemExit, match="marks"):
        written("no marks", "table")
