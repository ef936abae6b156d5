"""The demo's world: its texts are right, and no held-out problem occurs in any training stage."""

import io
import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hone.demo import journey, world
from hone.demo.examine import Marks
from hone.demo.stages import FILES, FULL, ORDER, QUICK
from hone.demo.world import make_data
from hone.log.progress import duration
from hone.reward.verify.math.verdict import math_reward
from hone.reward.verify.structure import format_reward

torch.set_num_threads(1)
EXPRESSION = re.compile(rf"\d+(?:\+\d+){{{world.TERMS - 1},}}")


def keys_in(text: str) -> set[str]:
    """Every problem that a text states, whatever the order of its digits."""
    found = (match.group(0).split("+") for match in EXPRESSION.finditer(text))
    return {"+".join(sorted(digits, key=int)) for digits in found}


def strings_in(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for inner in value.values() for s in strings_in(inner)]
    return [s for inner in value for s in strings_in(inner)] if isinstance(value, list) else []


def test_working_is_right_by_hand() -> None:
    assert world.working(world.Sum((8, 3, 6, 2))) == "8+3=11 11+6=17 17+2=19"


def test_every_addition_in_the_corpus_is_true() -> None:
    for text in world.corpus(random.Random(3), 500):
        for left, right in re.findall(r"(\d+(?:\+\d+)+)=(\d+)", text):
            assert sum(map(int, left.split("+"))) == int(right), text


def test_the_split_does_not_depend_on_the_order_of_digits() -> None:
    for problem in world.distinct(world.problems(random.Random(0), evaluation=True), 50):
        shuffled = list(problem.digits)
        random.Random(1).shuffle(shuffled)
        assert world.held_out(world.Sum(tuple(shuffled)))


@pytest.mark.parametrize(
    ("writer", "right", "tidy"), [(world.careful, 1, 1), (world.quick, 1, 1), (world.untidy, 0, 0)]
)
def test_writers_are_judged_as_they_should_be(writer: world.Writer, right: int, tidy: int) -> None:
    problem = world.Sum((9, 8, 7, 6))
    assert math_reward(writer(problem), problem.answer).value == right
    assert format_reward(writer(problem)) == tidy


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_held_out_problem_is_in_the_data_that_is_made(tmp_path: Path, seed: int) -> None:
    make_data(tmp_path, FULL, seed=seed)
    texts = {name: (tmp_path / FILES[name]).read_text() for name in ("corpus", "answers", "problems", "held_out")}
    examined = keys_in(texts.pop("held_out"))
    assert len(examined) > 15
    for name, text in texts.items():
        assert keys_in(text), f"{name} states no problem at all, so this test would prove nothing"
        assert not keys_in(text) & examined, f"{name} gives held-out problems away"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journey of a few steps, with every file a real one leaves."""
    out = tmp_path_factory.mktemp("demo") / "run"
    journey.main(seed=0, out=out, quick=True)
    torch.set_num_threads(1)
    return out


def test_no_stage_trains_on_a_held_out_problem(finished: Path) -> None:
    examined = keys_in((finished / "data" / FILES["held_out"]).read_text())
    trained = [path for path in (finished / "data").glob("*.jsonl") if path.name != FILES["held_out"]]
    trained += finished.glob("*/samples.jsonl")  # what the online stages really sampled
    assert {path.parent.name for path in trained} >= {"data", "grpo", "ppo"}
    for path in trained:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        seen = set().union(*(keys_in(text) for row in rows for text in strings_in(row.get("prompt", row.get("text")))))
        assert seen, f"{path} states no problem at all"
        assert not seen & examined, f"{path} gives held-out problems away"


def test_each_stage_is_told_to_train_on_those_files_only(finished: Path) -> None:
    for stage in ("pretrain", "sft", "reward", "grpo", "ppo", "dpo"):
        recipe = json.loads((finished / stage / "config.json").read_text())["recipe"]
        assert Path(recipe["data"]).name != FILES["held_out"]
        assert recipe["eval_data"] == ""


def test_the_journey_ends_with_a_table_and_a_report(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads((finished / "table.json").read_text())
    assert [row["stage"] for row in table["rows"]] == list(journey.summary.NAMES.values())
    for row in table["rows"]:
        assert {"accuracy", "format", "length", "kl", "seconds"} <= row.keys()
    page = (finished / "report.html").read_text()
    assert "<svg" in page
    assert not re.findall(r'(?:src|href)="https?:', page)


def test_every_stage_is_in_the_table_and_in_the_time_of_the_report(finished: Path) -> None:
    rows = json.loads((finished / "table.json").read_text())["rows"]
    assert [row["stage"] for row in rows if row["accuracy"] is None] == ["reward model"]
    whole = re.escape(duration(sum(row["seconds"] for row in rows)))
    page = (finished / "report.html").read_text()
    assert f'<p class="lead">{len(ORDER)} stages, ' in page
    assert re.search(f"<span>time in all</span><b>{whole}</b><span>{len(ORDER)} stages</span>", page)


def test_the_table_on_the_terminal_has_a_line_for_every_stage(finished: Path) -> None:
    screen, names = io.StringIO(), [journey.summary.NAMES[stage] for stage in ORDER]
    console = Console(file=screen, width=79)
    journey.summary.show(json.loads((finished / "table.json").read_text())["rows"], console)
    printed = screen.getvalue()
    starts = [name for line in printed.splitlines() for name in names if line.startswith(f" {name} ")]
    assert starts == names
    assert re.search(r"reward model( +-){5} +\d+", printed)


def test_the_last_line_says_how_long_the_whole_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = Marks(accuracy=0.5, greedy=0.5, format=0.5, length=9.0, kl=None)
    done = {"sft": {"seconds": 60.0, "train_seconds": 50.0, "marks": asdict(marks)}}
    monkeypatch.setattr(journey, "begin", lambda out, sizes, seed: journey.Journey(out, sizes, seed, dict(done)))
    monkeypatch.setattr(journey, "run_stages", lambda made: None)
    monkeypatch.setattr(journey, "finish", lambda made, rows, machine: tmp_path / "report.html")
    clock = iter((1000.0, 1030.0))
    monkeypatch.setattr(journey.time, "perf_counter", lambda: next(clock))
    journey.main(out=tmp_path)
    torch.set_num_threads(1)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("The whole took 1:30: 0:50 in the stages above, "), "60 seconds were before"


def test_another_demo_is_not_overwritten_by_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(journey.HoneError, match="choose an empty folder"):
        journey.begin(tmp_path, QUICK, 0)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_unfinished_journey_goes_on_and_a_finished_one_starts_anew(tmp_path: Path) -> None:
    first = journey.begin(tmp_path / "d", QUICK, 0)
    first.step("tokenizer", lambda: {"vocabulary": 7})
    again = journey.begin(tmp_path / "d", QUICK, 0)
    assert again.done["tokenizer"]["vocabulary"] == 7
    assert journey.begin(tmp_path / "d", QUICK, 1).done == {}
