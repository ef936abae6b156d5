"""Logs survive crashes and resumes: no torn line, no step twice, no NaN in JSON."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hone.errors import HoneError
from hone.log.sinks import JsonlSink, TensorBoardSink, append, read, truncate_after


def lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_one_object_a_step_is_on_disk_after_each_write(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.write(1, {"loss": 0.5, "tokens": 12})
    assert lines(sink.path) == [{"step": 1, "loss": 0.5, "tokens": 12}]
    sink.write(2, {"loss": 0.25})
    assert lines(sink.path)[1] == {"step": 2, "loss": 0.25}


def test_nan_and_infinity_become_null_and_are_named(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"loss": math.nan, "kl": 1.0, "grad_norm": math.inf, "x": -math.inf})
    assert lines(sink.path) == [
        {"step": 1, "loss": None, "kl": 1.0, "grad_norm": None, "x": None, "nonfinite": ["loss", "grad_norm", "x"]}
    ]


def test_truncating_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 6):
        sink.write(step, {"loss": 1.0 / step})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    sink.truncate_after(3)
    sink.write(4, {"loss": 9.0})
    assert [(row["step"], row["loss"]) for row in lines(path)] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"], "no temporary file is left"


@pytest.mark.parametrize("keep", range(1, 30))
def test_a_line_torn_anywhere_never_swallows_the_next(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.jsonl"
    JsonlSink(path).write(1, {"loss": 0.5})
    whole = b'{"step": 2, "loss": 0.123456}'
    with path.open("ab") as file:
        file.write(whole[:keep])
    JsonlSink(path).write(3, {"loss": 0.1})
    complete = [2] if keep == len(whole) else []
    assert [row["step"] for row in lines(path)] == [1, *complete, 3]


def test_truncating_to_nothing_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.truncate_after(0)
    assert not sink.path.exists()
    sink.write(1, {"loss": 1.0})
    sink.truncate_after(0)
    assert sink.path.read_bytes() == b""
    assert read(sink.path) == []


def test_a_broken_line_in_the_middle_is_reported_and_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(HoneError, match="line 2 is not JSON: repair or delete"):
        truncate_after(path, 5)
    assert path.read_text().count("\n") == 3


def test_text_of_any_kind_is_one_line_and_comes_back(tmp_path: Path) -> None:
    hard = 'a\nb\r\u2028\x85"\\ \ud800 \x00 é 数'
    append(tmp_path / "s.jsonl", {"step": 1, "completion": hard})
    append(tmp_path / "s.jsonl", {"step": 2, "completion": ""})
    assert [row["completion"] for row in read(tmp_path / "s.jsonl")] == [hard, ""]


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step"):
        JsonlSink(tmp_path / "m.jsonl").write(1, {"step": 3.0})


def test_without_tensorboard_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(HoneError, match=r"pip install hone\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore

    def write(sink: TensorBoardSink, rows: Mapping[int, float]) -> None:
        for step, loss in rows.items():
            sink.write(step, {"loss": loss})

    sink = TensorBoardSink(tmp_path)
    write(sink, {1: 1.0, 2: 0.5, 3: 7.0})
    sink.truncate_after(2)
    write(sink, {3: 0.25})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 0.25)]
