"""hone rewards test: gold answers score 1, others 0, what fails is listed and is the exit code."""

import json
from pathlib import Path

import pytest
import torch

from hone.check.rewards import prove
from hone.cli import main
from hone.reward.score import Reward
from hone.types import Task

torch.set_num_threads(1)


def rows(path: Path, *answers: object) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": a}) + "\n" for i, a in enumerate(answers)))
    return path


def proof_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main(["rewards", "test", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_dataset_that_holds_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = rows(tmp_path / "good.jsonl", "A", "B", "C", "A")
    code, found = proof_of(capsys, str(data), "--reward", "choice")
    assert (code, found["ok"], found["gold"], found["shuffled"], found["tried"]) == (0, True, 4, 4, 4)
    assert main(["rewards", "test", str(data), "--reward", "choice"]) == 0
    assert "4 of 4 right answers score 1\n4 of 4 answers of other rows score 0\n" in capsys.readouterr().out


def test_every_row_that_fails_is_listed_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = rows(tmp_path / "bad.jsonl", "A", "Paris", None, "B")
    code, found = proof_of(capsys, str(data), "--reward", "choice")
    assert (code, found["ok"]) == (2, False)
    assert [(m["row"], m["kind"]) for m in found["misses"]] == [(2, "invalid"), (3, "missing")]
    assert "not a letter A to J" in found["misses"][0]["reason"]
    assert 'column "answer" is null' in found["misses"][1]["reason"]
    assert main(["rewards", "test", str(data), "--reward", "choice"]) == 2
    said = capsys.readouterr()
    assert "  row 2: 'Paris' is invalid: choice: the gold answer" in said.out
    assert "(1 invalid, 1 missing)" in said.err


def test_a_gold_answer_that_maths_cannot_read_is_told_with_its_row_and_the_reason(tmp_path: Path, capsys):
    data = rows(tmp_path / "golds.jsonl", "4", r"\foo{5}", "2+2=5", "x^2/4+y^2/3=1", "$125$ miles")
    assert main(["rewards", "test", str(data)]) == 2
    said = capsys.readouterr()
    assert "  row 2: " in said.out
    assert "unusable: it has the command \\foo" in said.out
    assert "  row 3: " in said.out
    assert "unusable: its equation chain is not true" in said.out
    assert "(2 invalid)" in said.err


def test_a_function_that_prints_hangs_or_accepts_all_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = "import time\ndef lax(completion):\n    print('hello')\n    return 1\n"
    (tmp_path / "lax.py").write_text(code + "def slow(completion):\n    time.sleep(60)\n")
    data = str(rows(tmp_path / "data.jsonl", "1", "2"))
    exit_code, found = proof_of(capsys, data, "--reward", f"{tmp_path / 'lax.py'}:lax")
    assert exit_code == 2
    assert {m["kind"] for m in found["misses"]} == {"shuffled"}
    _, found = proof_of(capsys, data, "--reward", f"{tmp_path / 'lax.py'}:slow", "--timeout", "0.05")
    assert {m["kind"] for m in found["misses"]} == {"invalid"}
    assert "timed out" in found["misses"][0]["reason"]


def test_the_column_of_right_answers_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "other.jsonl"
    data.write_text('{"prompt": "q", "answer": "4", "reply": "<answer>4</answer>"}\n{"prompt": "q", "answer": "5"}\n')
    code, found = proof_of(capsys, str(data), "--reward", "exact", "--gold", "reply")
    assert (found["column"], found["gold"], [m["kind"] for m in found["misses"]]) == ("reply", 1, ["missing"])
    assert main(["rewards", "test", str(data), "--gold", "nothing"]) == 2
    assert "name their column with --gold COLUMN (there are: answer, reply)" in capsys.readouterr().err
    assert code == 2


def test_the_column_of_questions_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "raw.jsonl"
    data.write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "answer": "3"}\n')
    assert main(["rewards", "test", str(data)]) == 2
    assert "name that of the questions with --prompt COLUMN (of answer, problem)" in capsys.readouterr().err
    code, found = proof_of(capsys, str(data), "--prompt", "problem")
    assert (code, found["gold"], found["shuffled"]) == (0, 2, 2)


def test_no_rows_and_numbers_below_0_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = str(rows(tmp_path / "empty.jsonl"))
    for arguments, says in (
        ([], "has no rows"),
        (["--limit", "-1"], "give 0 or more"),
        (["--show", "-1"], "0 or more"),
    ):
        assert main(["rewards", "test", data, *arguments]) == 2
        assert says in capsys.readouterr().err


def test_alike_answers_leave_nothing_to_shuffle():
    always = Reward(lambda completion: 1.0)
    found = prove(always, [Task(prompt="q")] * 3, golds=["4", " 4", "4 "])
    assert (found.gold, found.tried, list(found.misses)) == (3, 0, [])
