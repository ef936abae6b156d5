"""Datasets by name, on the real files: every row counted, every gold answer found, every mask exact."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from patience import patience

from hone.data.feed import assemble, registry
from hone.data.feed.locate import Reading, locate
from hone.data.rows.columns import RowKind
from hone.data.rows.convert import Grouper, RowCounts, Tasker
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE, render_prompt
from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError
from hone.reward.verify.math.verdict import math_reward
from hone.types import Rollout

DATA = Path(__file__).parents[2].parent / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason="the real datasets are not here: ../shared/data")
PLAIN = train_bpe(["the quick brown fox and two more of them\n"] * 5, vocab_size=300, specials=CHAT_SPECIALS)
CHAT = replace(PLAIN, chat_template=DEFAULT_TEMPLATE)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setenv(registry.FOLDER, str(DATA))


def rows_of(spec: str, *, chat: bool = False) -> tuple[list, RowCounts]:
    tally = RowCounts()
    (part,) = locate(spec, Reading(chat=chat))
    return [row for row, _ in assemble.plain_rows(part, Reading(chat=chat), tally)], tally


COUNTS = {
    "gsm8k:train": 7473, "gsm8k:test": 1319, "gsm8k": 7473, "math500": 500, "svamp": 1000, "humaneval": 164,
    "hh_harmless": 2312 - 4, "instruct_pref": 1100 - 6, "instruct_pref:answers": 1100, "sst2:train": 6920,
    "sst2:test": 1821, "seed_tasks": 175, "tinyshakespeare": 7222,
}  # fmt: skip


@real
@pytest.mark.parametrize("spec", COUNTS)
def test_every_row_of_a_dataset_is_read(spec, here):
    rows, tally = rows_of(spec)
    assert len(rows) == COUNTS[spec]
    left_out = {"hh_harmless": {"one reply is empty": 4}, "instruct_pref": {"both replies are the same": 6}}
    assert tally.left_out == left_out.get(spec, {})
    assert tally.skipped == 0


@real
@pytest.mark.parametrize("spec", ["gsm8k:train", "gsm8k:test", "math500", "svamp", "sst2:train", "sst2:test"])
def test_every_problem_has_its_gold_answer(spec, here):
    rows, _ = rows_of(spec)
    for row in rows:
        assert isinstance(row["answer"], str)
        assert row["answer"].strip() == row["answer"] != ""
    if spec.startswith("gsm8k"):
        raw = [json.loads(line) for line in (DATA / f"gsm8k/{spec[6:]}.jsonl").open()]
        assert [float(row["answer"]) for row in rows] == [
            float(re.sub(r"[^\d.-]", "", r["answer"].split("#### ")[1])) for r in raw
        ]
        assert not any("<<" in row["completion"] for row in rows)
    if spec == "svamp":
        raw = json.loads((DATA / "svamp/SVAMP.json").read_text())
        assert [float(row["answer"]) for row in rows] == [r["Answer"] for r in raw]
    if spec.startswith("sst2"):
        assert {row["answer"] for row in rows} == {"positive", "negative"}
        first = (DATA / f"sst2/stsa.binary.{spec[5:]}").read_text().split("\n")[0]
        assert (rows[0]["answer"] == "positive") == (first[0] == "1")
        assert rows[0]["sentence"] == first[2:].strip()


@real
def test_the_math_verifier_accepts_every_gold_answer(here):
    for spec in ("gsm8k:train", "gsm8k:test", "svamp"):
        rows, _ = rows_of(spec)
        tasks = [Tasker(tokenizer=PLAIN)(row, "x") for row in rows[:1500]]
        assert all(math_reward(f"\\boxed{{{t.answer}}}", t).value == 1.0 for t in tasks if t)
        if spec.startswith("gsm8k"):  # and the worked solution, which is what supervised learning teaches
            assert all(math_reward(t.extra["completion"], t).value == 1.0 for t in tasks if t)


def converted(spec, tokenizer):
    rows, _ = rows_of(spec, chat=tokenizer.chat_template is not None)
    convert = Grouper(tokenizer=tokenizer)
    groups = [convert(row, f"row {n}") for n, row in enumerate(rows[:400], start=1)]
    return rows[:400], groups, convert.kind


def trained(rollout: Rollout) -> str:
    return PLAIN.decode([t for t, m in zip(rollout.tokens, rollout.mask, strict=True) if m])


OFFLINE = [s for s in COUNTS if s != "gsm8k"]
PAIRS = [(s, t) for s in OFFLINE for t in ("plain", "chat")]


@real
@pytest.mark.parametrize(("spec", "kind"), PAIRS)
def test_what_is_trained_on_is_exactly_the_completion_and_its_stop_token(spec, kind, here):
    rows, groups, kind = converted(spec, PLAIN if kind == "plain" else CHAT)
    for row, group in zip(rows, groups, strict=True):
        if kind is RowKind.TEXT:
            assert trained(group[0]) == row["text"] + PLAIN.eos
            continue
        sides = ["chosen", "rejected"] if kind is RowKind.PREFERENCE else ["completion"]
        for side, rollout in zip(sides, group, strict=True):
            value = row[side] if isinstance(row[side], str) else row[side][-1]["content"]
            assert trained(rollout) == value + PLAIN.eos
    assert kind is {"hh_harmless": RowKind.PREFERENCE, "instruct_pref": RowKind.PREFERENCE}.get(
        spec, RowKind.TEXT if spec == "tinyshakespeare" else RowKind.COMPLETION
    )


@real
def test_one_row_serves_reinforcement_learning_too(here):
    for tokenizer in (PLAIN, CHAT):
        rows, _ = rows_of("gsm8k:test", chat=tokenizer.chat_template is not None)
        task = Tasker(tokenizer=tokenizer)(rows[0], "x")
        assert task is not None
        assert task.answer == "18"
        read = tokenizer.decode(render_prompt(tokenizer, task.prompt))
        assert "Janet" in read
        assert "18" not in read  # the model is not shown the solution
    tests, _ = rows_of("humaneval")
    task = Tasker(tokenizer=PLAIN)(tests[0], "x")
    assert task is not None
    assert task.extra["entry_point"] == "has_close_elements"
    assert "def check(candidate)" in task.extra["test"]
    assert task.id == "HumanEval/0"


@real
def test_humanevals_own_solution_follows_its_prompt_as_a_program(here):
    rows, _ = rows_of("humaneval", chat=True)
    for row in rows:
        compile(row["prompt"] + row["completion"] + row["test"], row["id"], "exec")


def test_the_answer_of_a_worked_solution():
    assert registry.answer_of_gsm8k("1 #### 2\n#### 1,234,567 ") == "1234567"
    for none in ("", "no mark", "1 ####", "#### \n"):
        with pytest.raises(HoneError, match="no answer after ####"):
            registry.answer_of_gsm8k(none)


def test_a_wrong_split_or_a_missing_folder_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv(registry.FOLDER, raising=False)
    with pytest.raises(HoneError, match="gsm8k has no split 'dev': use gsm8k:train or gsm8k:test"):
        registry.find("gsm8k:dev", chat=False)
    with pytest.raises(HoneError, match=r"set HONE_DATA to one that has seed_tasks/seed_tasks.jsonl"):
        registry.find("seed_tasks", chat=False)
    assert registry.find("gsm9k", chat=False) is None
    store = registry.find("gsm8k:test", chat=False)
    assert store is not None
    assert store.place.name == "hf:openai/gsm8k/main:test"


def test_without_a_network_the_error_is_quick_single_and_names_the_folder(monkeypatch, tmp_path, capfd):
    datasets = pytest.importorskip("datasets")
    constants = pytest.importorskip("huggingface_hub.constants")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", registry.FOLDER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody answers there
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path))
    offline, start = constants.HF_HUB_OFFLINE, time.monotonic()
    with pytest.raises(HoneError) as error:
        rows_of("gsm8k:test")
    assert time.monotonic() - start < patience(5)
    reason = "127.0.0.1 cannot be reached and the cache has none: check the network, or set HONE_DATA to a folder"
    assert str(error.value).startswith(f"cannot read hf:openai/gsm8k/main:test: {reason} that has gsm8k/test.jsonl")
    assert offline == constants.HF_HUB_OFFLINE
    assert "Retrying" not in capfd.readouterr().err


def test_a_row_that_is_not_the_datasets_is_named(monkeypatch, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n{"text": "c"}\n')
    monkeypatch.setenv(registry.FOLDER, str(tmp_path))
    with pytest.raises(HoneError, match=r"train.jsonl line 1: the solution has no answer after ####"):
        rows_of("gsm8k")
    tally = RowCounts()
    (part,) = locate("gsm8k", Reading(skip_bad=True))
    assert list(assemble.plain_rows(part, Reading(skip_bad=True), tally)) == []
    assert tally.skipped == 2
    assert "KeyError" in tally.reasons[1]
