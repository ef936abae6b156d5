"""`hone check` as a user meets it: table, JSON, exit codes, and what `hone run` says before its first step."""

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from check_world import ROWS, World, job_of, recipe, write_rows
from rich.console import Console

import hone
from hone.check import suite
from hone.check.report import Finding, Report, Row, coloured, show
from hone.cli import main

RECIPE = '''"""A recipe for tests."""

import torch
from hone import Choice, ModelSpec, Recipe, SampleSpec, TrainSpec

torch.set_num_threads(1)


def recipe():
    return Recipe(
        name="small",
        out="never",
        model=ModelSpec(path="MODEL"),
        data="DATA",
        reward="rewards.py:chatty",
        algo=Choice("grpo"),
        sample=SampleSpec(group=4, max_tokens=6),
        train=TrainSpec(steps=2, prompts=4),
    )
'''
REWARDS = '''"""Rewards for tests."""


def chatty(completion, task):
    print("to stdout")
    return float(f"<answer>{task.answer}</answer>" in completion) + len(completion) / 10


def broken(completion):
    raise RuntimeError("no")
'''


@pytest.fixture
def here(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a recipe and its rewards, entered."""
    text = RECIPE.replace("MODEL", world / "plain").replace("DATA", world / "problems.jsonl")
    (tmp_path / "recipe.py").write_text(text)
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in {"recipe", "rewards"} & sys.modules.keys():
        del sys.modules[name]


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if "__pycache__" not in p.parts}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = main(["check", "recipe.py", "--json", *arguments])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_the_table_and_the_row(here: Path, capfd: pytest.CaptureFixture[str]):
    before, start = files(here), time.process_time()  # what others do on the machine is no part of it
    assert main(["check", "recipe.py"]) == 0
    assert time.process_time() - start < 20
    captured = capfd.readouterr()  # of descriptors: the reward runs in a process of its own
    assert all(name in captured.out for name in suite.ALL)
    assert "[[" in captured.out
    assert "0 fail" in captured.out
    assert "to stdout" not in captured.out
    assert "to stdout" in captured.err
    assert files(here) == before


def test_json_is_one_object_and_the_only_output(here: Path, capsys: pytest.CaptureFixture[str]):
    code, found, _ = run_json(capsys)
    assert code == 0
    assert found.keys() == {"recipe", "ok", "findings", "row"}
    assert (found["recipe"], found["ok"]) == ("small", True)
    assert [f["name"] for f in found["findings"]] == list(suite.ALL)
    assert all(f.keys() == {"name", "seen", "verdict", "remedy"} for f in found["findings"])
    assert [piece["trained"] for piece in found["row"]["pieces"]] == [False, True]
    assert found["row"]["pieces"][0]["text"].endswith("=\n")


def test_a_failing_check_is_exit_code_2_and_says_which(here: Path, capsys: pytest.CaptureFixture[str]):
    before = files(here)
    code, found, err = run_json(capsys, "reward=rewards.py:broken")
    assert code == 2
    assert not found["ok"]
    assert err.splitlines()[-1] == (
        f"hone: error: 2 of {len(suite.ALL)} checks failed (gold answers, reward values): do what each of them says"
    )
    assert main(["check", "recipe.py", "reward=rewards.py:broken"]) == 2
    assert "RuntimeError: no" in " ".join(capsys.readouterr().out.split())
    assert files(here) == before


def test_settings_come_from_a_file_and_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "more.yaml").write_text("name: other\nsample: {group: 2}\n")
    code, found, _ = run_json(capsys, "sample.group=3", "--config", "more.yaml")
    assert code == 0
    assert found["recipe"] == "other"
    assert "4 prompts x 3 samples = 12 rows" in found["findings"][0]["seen"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [("optim.lrr=1", "no setting 'optim.lrr'"), ("data=none.jsonl", "cannot read none.jsonl"), ("algo=gpo", "no algo")],
)
def test_a_recipe_that_cannot_be_built_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
):
    code, found, err = run_json(capsys, setting)
    assert code == 2
    assert not found["ok"]
    assert message in found["error"]
    assert message in err.splitlines()[-1]
    assert main(["check", "recipe.py", setting]) == 2
    assert capsys.readouterr().out == ""


def test_trained_text_is_coloured_or_bracketed():
    row = Row(pieces=[("1+1=\n", False), ("2<eos>", True)])
    assert coloured(row, colour=False).plain == "1+1=\u21b5\n[[2<eos>]]"
    text = coloured(row, colour=True)
    assert text.plain == "1+1=\u21b5\n2<eos>"
    assert [(span.start, span.end, span.style) for span in text.spans] == [(6, 12, "black on green")]
    long = coloured(Row(pieces=[("a" * 5000, False), ("b" * 5000, True)]), colour=True)
    assert len(long) < 1300
    assert " ... " in long.plain


@pytest.mark.parametrize("no_color", [False, True])
def test_where_colours_are_not_wanted_trained_text_is_in_brackets(no_color: bool):
    console = Console(width=60, file=io.StringIO(), force_terminal=True, color_system="standard", no_color=no_color)
    finding = Finding(name="mask", seen="all is well", verdict="pass")
    show(Report(recipe="x", findings=[finding], row=Row(note="a row", pieces=[("1+1=", False), ("2", True)])), console)
    out = cast(io.StringIO, console.file).getvalue()
    assert ("what is trained on is between [[ and ]]" in out) == ("1+1=[[2]]" in out) == no_color
    assert "remedy" not in out  # nothing to put right


def test_what_was_seen_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]):
    finding = Finding(name="mask", seen="[red]not markup[/red]", verdict="warn", remedy="do [this]")
    show(Report(recipe="x", findings=[finding]), Console(width=100))
    out = capsys.readouterr().out
    assert "[red]not markup[/red]" in out
    assert "do [this]" in out
    assert "0 pass, 1 warn, 0 fail, 0 skip" in out


def test_the_gravest_come_first_and_what_is_skipped_is_one_line(capsys: pytest.CaptureFixture[str]):
    verdicts = ("pass", "skip", "warn", "pass", "fail", "skip", "warn")
    findings = [Finding(name=f"check{i}", seen=f"seen{i}", verdict=v) for i, v in enumerate(verdicts)]
    show(Report(recipe="x", findings=findings), Console(width=100))
    first, *table, skipped, counts = capsys.readouterr().out.splitlines()
    assert first == "FAIL: do not run x yet: check4"
    assert re.findall(r"seen\d", "".join(table)) == ["seen4", "seen2", "seen6", "seen0", "seen3"]
    assert skipped == "skipped, as they do not apply here (--json says why): check1, check5"
    assert counts == "2 pass, 2 warn, 1 fail, 2 skip"
    show(Report(recipe="x", findings=findings[:1]), Console(width=100))
    out = capsys.readouterr().out
    assert out.startswith("PASS: x is ready to run")
    assert "skipped" not in out
    show(Report(recipe="x", findings=findings[:3]), Console(width=100))
    assert capsys.readouterr().out.startswith("WARN: x can run; look at check2")


def test_a_check_that_raises_is_a_failure_and_not_a_crash(world: World, monkeypatch: pytest.MonkeyPatch):
    def breaks(probe: Any) -> Finding:
        raise KeyError("lost")

    monkeypatch.setitem(suite.ALL, "mask", breaks)
    report = suite.check(recipe(world, "sft"))
    assert [(f.name, f.seen) for f in report.failures] == [("mask", "KeyError: 'lost'")]
    assert len(report.findings) == len(suite.ALL)


# --- before the first step of a run ---


def test_a_run_refuses_what_a_cheap_check_finds_and_leaves_nothing(world: World, tmp_path: Path):
    rows = write_rows(tmp_path / "rows.jsonl", [{**row, "answer": "how many?"} for row in ROWS["problems"]])
    bad = recipe(world, "grpo", f"out={tmp_path / 'run'}", data=rows, reward={"math": 1.0})
    with pytest.raises(
        hone.HoneError, match=r"gold answers: math does not accept 9 of 9 .*: correct the column answer"
    ):
        hone.run(bad)
    assert files(tmp_path) == {"rows.jsonl"}


def test_a_run_prints_warnings_and_goes_on(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = recipe(world, "grpo", f"out={tmp_path / 'run'}", "train.steps=1", "sample.max_tokens=44")
    hone.run(made)
    warnings = [line for line in capsys.readouterr().err.splitlines() if ": warn: " in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("small: warn: context: longest of 9 prompts 5 + 44 to write, context 48")
    hone.run(recipe(world, "grpo", f"out={tmp_path / 'run'}", "train.steps=2", "sample.max_tokens=44"), resume=True)
    assert ": warn: context" not in capsys.readouterr().err


def test_the_cheap_checks_call_no_function_of_the_users_and_sample_nothing(world: World):
    calls = list[str]()

    def counted(completion: str, task: Any) -> float:
        calls.append(completion)
        return 0.0

    job = job_of(world, "grpo", reward=counted)
    assert job.roller is not None
    job.roller.sampler = None  # pyright: ignore
    findings = suite.cheap(job)
    assert {f.verdict for f in findings} <= {"pass", "skip"}
    assert calls == []


def test_the_cheap_checks_are_cheap(world: World):
    rows = [{"prompt": f"{a}+{a}=\n", "answer": str(2 * a)} for a in range(20_000)]
    job = job_of(world, "grpo", data=rows, reward={"math": 1.0})
    start = time.process_time()
    assert all(f.verdict in ("pass", "skip") for f in suite.cheap(job))
    assert time.process_time() - start < 1
