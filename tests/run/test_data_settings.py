"""How a run reads its data: streamed, mixed and by tokens it trains, resumes to the bit, and says what it did."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import World, assert_same_run, metrics, recipe, write_rows

import hone as package
from hone.check import suite
from hone.config.overrides import override
from hone.config.recipe import plan
from hone.data.feed.stream import Stream
from hone.data.feed.token_batches import TokenBatches
from hone.errors import HoneError
from hone.launch.job import prepare

torch.set_num_threads(1)


def settings_of(world: World, kind: str, algo: str) -> list[str]:
    data = world.data({"sft": "answers", "dpo": "pairs", "grpo": "problems", "pretrain": "text"}[algo])
    return {
        "streamed": ["read.stream=always", "read.buffer=3"],
        "mixed": [f"data={data}*0.6+{data}*0.4"],
        "mixed streams": [f"data={data}*0.6+{data}*0.4", "read.stream=always", "read.buffer=2"],
        "by tokens": ["train.tokens=60"],
        "streamed by tokens": ["train.tokens=60", "read.stream=always", "read.buffer=4", "train.micro_tokens=30"],
        "few tokens in memory": ["train.micro_tokens=20"],
    }[kind]


CASES = [(kind, algo) for kind in ("streamed", "mixed", "mixed streams") for algo in ("sft", "grpo")]
CASES += [(kind, algo) for kind in ("by tokens", "streamed by tokens") for algo in ("sft", "dpo", "pretrain")]
CASES += [("few tokens in memory", "grpo")]


@pytest.mark.parametrize(("kind", "algo"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(kind: str, algo: str, world: World, tmp_path: Path):
    given = settings_of(world, kind, algo)
    package.run(recipe(world, algo, tmp_path / "whole", "train.steps=6", *given))
    made = recipe(world, algo, tmp_path / "parts", "train.steps=3", *given)
    package.run(made)
    package.run(override(made, ["train.steps=6"]), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", step=6)


def test_a_mix_logs_how_often_each_part_was_read(world: World, tmp_path: Path):
    data, other = world.data("answers"), write_rows(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}])
    package.run(recipe(world, "sft", tmp_path / "run", f"data={data}*0.5+{other}*0.5", "train.steps=4"))
    last = metrics(tmp_path / "run")[-1]
    assert last[f"epoch/{data}"] == pytest.approx(6 / 7)
    assert last[f"epoch/{other}"] == 6


def test_the_first_line_says_what_became_of_the_rows(world: World, tmp_path: Path, capsys):
    rows = [{"instruction": "a", "input": "", "output": "b"}, {"instruction": "a", "input": "", "output": "c" * 99}]
    path = write_rows(tmp_path / "a.jsonl", [*rows, {"instruction": "", "input": "", "output": "b"}])
    given = [f"data={path}", "read.skip_bad=true", "read.overlong=truncate", "train.steps=1"]
    package.run(recipe(world, "sft", tmp_path / "run", *given))
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("small: 3 rows; ")
    assert "2 rows converted from Alpaca, 1 row cut to 48 tokens, 1 bad row skipped: " in first
    assert 'a.jsonl line 3: column "instruction" is empty' in first


MISFITS = [{"prompt": "x"}, {"text": "x"}, {"prompt": "x", "steps": ["y"], "step_labels": [1]}, {"messages": None}]


@pytest.mark.parametrize("stream", ["always", "never"])
@pytest.mark.parametrize("misfit", MISFITS, ids=lambda row: "-".join(row))
def test_a_misfit_in_the_first_line_decides_nothing(misfit, stream: str, world: World, tmp_path: Path, capsys):
    good = [{"prompt": f"{i}", "completion": "b"} for i in range(40)]
    path = write_rows(tmp_path / "a.jsonl", [misfit, *good])
    made = recipe(world, "sft", tmp_path / "run", f"data={path}", f"eval_data={path}", f"read.stream={stream}")
    with pytest.raises(HoneError, match=r"a.jsonl line 1: .*the row: "):
        prepare(made)
    job = prepare(override(made, ["read.skip_bad=true"]))
    assert len({bytes(job.source.take(1)[0][0].tokens) for _ in range(40)}) == 40
    assert len(job.held_rows) == 40
    package.run(override(made, ["read.skip_bad=true", "train.steps=20"]))
    assert f"1 bad row skipped: {path} line 1: " in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["always", "never"])
def test_mapped_columns_train_as_if_they_had_our_names(stream: str, world: World, tmp_path: Path):
    ours = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(7)]
    theirs = [{"question": row["prompt"], "answer": row["completion"], "prompt": "no"} for row in ours]
    mapping = ["read.columns.prompt=question", "read.columns.completion=answer"]
    for name, rows, given in (("ours", ours, []), ("theirs", theirs, mapping)):
        path = write_rows(tmp_path / f"{name}.jsonl", rows)
        made = recipe(world, "sft", tmp_path / name, f"data={path}", f"eval_data={path}", f"read.stream={stream}")
        package.run(override(made, ["train.steps=3", *given]))
    losses = [[row["loss"] for row in metrics(tmp_path / name) if "loss" in row] for name in ("ours", "theirs")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_a_stream_says_at_the_end_what_became_of_its_rows(world: World, tmp_path: Path, capsys):
    rows = [{"prompt": "a", "completion": "b" * (1 + 99 * (i == 2))} for i in range(4)]
    path = write_rows(tmp_path / "a.jsonl", [*rows, {"prompt": "a", "completion": None}])
    given = [f"data={path}", "read.stream=always", "read.skip_bad=true", "read.overlong=truncate", "train.steps=1"]
    package.run(recipe(world, "sft", tmp_path / "run", *given, "train.prompts=4"))
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "cut to" not in first
    assert f"small: {path}: 1 row cut to 48 tokens, 1 bad row skipped: {path} line 5: " in last


def test_a_stream_whose_file_changed_is_not_resumed(world: World, tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": f"{i}", "completion": "b"} for i in range(9)])
    made = recipe(world, "sft", tmp_path / "run", f"data={path}", "read.stream=always", "train.steps=2")
    package.run(made)
    Path(path).write_text(Path(path).read_text().replace('"8"', '"7"'))
    with pytest.raises(HoneError, match="cannot resume: the data's content has changed"):
        package.run(override(made, ["train.steps=4"]), resume=True)


def test_the_settings_reach_the_feed_and_the_learner(world: World, tmp_path: Path):
    made = recipe(world, "sft", tmp_path, "train.tokens=60", "read.stream=always", "read.buffer=5")
    job = prepare(made)
    assert isinstance(job.source, TokenBatches)
    assert isinstance(job.source._feed, Stream)
    assert (job.source._feed._buffer, job.learner.micro_tokens) == (5, 60)
    assert plan(made) == "at most 60 tokens = 1 update; micro-batches of at most 60 tokens"
    steps = [job.source.step() for _ in range(9)]
    assert max(sum(map(len, s)) * max(len(r.tokens) for g in s for r in g) for s in steps) <= 60


@pytest.mark.parametrize(
    ("algo", "setting", "says"),
    [
        ("grpo", "train.tokens=60", "grpo samples its own: set train.micro_tokens"),
        ("grpo", "read.overlong=truncate", "a prompt is never cut: set read.overlong=drop"),
        ("kto", "train.tokens=60", "a step needs two"),
        ("sft", "read.buffer=0", "read.buffer is 0: it must be at least 1"),
        ("sft", "train.tokens=3", r"tokens: raise train.tokens \(3\)"),
    ],
)
def test_what_does_not_fit_together_is_refused(algo: str, setting: str, says: str, world: World, tmp_path: Path):
    made = recipe(world, algo, tmp_path, setting)
    with pytest.raises(HoneError, match=says):
        package.run(made)


def test_an_iterator_is_data_too(world: World, tmp_path: Path):
    rows = ({"prompt": f"{i}", "completion": "b"} for i in range(4))
    job = prepare(replace(recipe(world, "sft", tmp_path), data=rows))
    assert len(job.source) == 4


def test_check_passes_on_a_stream_and_on_truncated_rows(world: World, tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": f"{i}", "completion": "b" * (9 * i + 1)} for i in range(9)])
    for given in (["read.overlong=truncate"], ["read.overlong=truncate", "read.stream=always"]):
        job = prepare(recipe(world, "sft", tmp_path, f"data={path}", *given))
        before = json.dumps(job.source.state())
        findings = suite.cheap(job)
        assert [f for f in findings if f.verdict == "fail"] == []
        assert json.dumps(job.source.state()) == before
