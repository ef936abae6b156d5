"""Planted overlap is found exactly: neither a run too short nor one that no text holds."""

import json
import random

import numpy as np
import pytest
from prose import prose, write

from hone.data.corpus import overlap
from hone.data.corpus.compare import compare
from hone.data.corpus.overlap import build, read_items, texts_of
from hone.data.corpus.settings import CorpusSettings
from hone.data.corpus.words import normal_words
from hone.errors import HoneError

ITEM = "A train leaves the station at noon and travels sixty miles each hour towards the coast"  # 16 words


def held(index, *texts) -> dict[int, set[int]]:
    return {which: {run for run, _ in runs} for which, runs in index.find(texts).items()}


def test_thirteen_words_are_found_and_twelve_are_not():
    index = build({"e": [[ITEM]]}, n=13, short=8)
    words = ITEM.split()
    assert index.size == 4  # 16 - 13 + 1
    assert held(index, f"He said: {' '.join(words[1:14])}, and left.") == {0: {index.find([ITEM])[0][1][0]}}
    assert held(index, " ".join(words[:12])) == {}
    assert held(index, " ".join([*words[:12], "x", *words[12:]])) == {}
    assert len(held(index, ITEM)[0]) == 4


def test_case_punctuation_and_width_do_not_hide_a_run():
    index = build({"e": [[ITEM]]}, n=13, short=8)
    assert len(held(index, ITEM.upper().replace(" ", ", -\n"))[0]) == 4
    wide = "".join(chr(ord(c) + 0xFEE0) if c.isalpha() else c for c in ITEM)
    assert len(held(index, wide)[0]) == 4


def test_a_run_does_not_reach_from_one_document_into_the_next():
    index = build({"e": [[ITEM]]}, n=13, short=8)
    words = ITEM.split()
    assert held(index, " ".join(words[:8]), " ".join(words[8:])) == {}
    assert held(index, "nothing here", ITEM).keys() == {1}


def test_a_run_does_not_reach_from_one_text_of_an_item_into_the_next():
    words = ITEM.split()
    index = build({"e": [[" ".join(words[:8]), " ".join(words[8:])]]}, n=13, short=20)
    assert index.size == 0
    assert held(index, ITEM) == {}


def test_short_items_are_looked_for_whole_and_shorter_ones_counted():
    index = build({"e": [["one two three four five six seven eight"], ["one two three"], [""]]}, n=13, short=8)
    assert held(index, "zero one two three four five six seven eight nine").keys() == {0}
    assert held(index, "one two three four five six seven nine") == {}
    (row,) = overlap.summary(index, {"s": np.ones(index.size, dtype=bool)})
    assert (row["items"], row["tested"], row["overlap"], row["share"]) == (3, 1, 1, 1.0)


def test_found_runs_equal_those_of_a_slow_search():
    for seed in range(30):
        draw = random.Random(seed)
        made = [" ".join(draw.choices("abcd", k=draw.randrange(0, 40))) for _ in range(12)]
        items, texts = made[:6], made[6:]
        n = draw.choice((3, 5, 8))
        index = build({"e": [[item] for item in items]}, n=n, short=1)
        slow = {}
        for which, text in enumerate(texts):
            words = text.split()
            runs = {
                tuple(item.split()[i : i + min(n, len(item.split()))])
                for item in items
                if item
                for i in range(len(item.split()) - min(n, len(item.split())) + 1)
            }
            there = {r for r in runs if any(tuple(words[i : i + len(r)]) == r for i in range(len(words)))}
            if there:
                slow[which] = there
        found = {w: {tuple(words.split()) for _, words in runs} for w, runs in index.find(texts).items()}
        assert found == slow


def test_a_hash_that_lies_is_caught_by_the_words(monkeypatch):
    index = build({"e": [[ITEM]]}, n=13, short=8)
    _ = [runs.table for runs in index.lengths]
    monkeypatch.setattr(overlap, "run_hashes", lambda numbers, n, seed: np.full(len(numbers) - n + 1, 0, np.uint64))
    for runs in index.lengths:
        runs.__dict__["table"] = (np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64))
    assert index.find([prose(0)]) == {}
    assert len(index.find([ITEM])[0]) == 1


def test_texts_of_a_row_are_found_however_deep():
    row = {"q": "a", "n": 3, "m": [{"role": "user", "content": "b"}, None], "x": {"y": ["c"]}}
    assert list(texts_of(row)) == ["a", "user", "b", "c"]


def test_evaluation_files(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    assert read_items(str(path)) == [["q", "a"]]
    assert read_items(str(path), ["question"]) == [["q"]]
    with pytest.raises(HoneError, match='row 1 has no column "prompt"'):
        read_items(str(path), ["prompt"])
    text = tmp_path / "e.txt"
    text.write_text("one\n\ntwo\n")
    assert read_items(str(text)) == [["one"], ["two"]]
    text.write_bytes(b"\xff")
    with pytest.raises(HoneError, match="not UTF-8"):
        read_items(str(text))
    with pytest.raises(HoneError, match="no evaluation"):
        read_items(str(tmp_path / "none.jsonl"))


def planted(tmp_path, name: str, items: list[str], *, every: int) -> str:
    """A source of 60 documents; item k is hidden in document `every` k."""
    texts = [prose(100 * len(name) + k) for k in range(60)]
    for k, item in enumerate(items):
        texts[every * k] += f"\n{item.upper()}!\n{prose(5000 + k)}"
    return write(tmp_path / f"{name}.jsonl", texts)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_source_is_compared_with_every_evaluation_set(tmp_path, workers):
    questions = [prose(9000 + k, 24).replace("\n", " ") for k in range(20)]
    evals = [write(tmp_path / "e1.jsonl", questions[:12]), write(tmp_path / "e2.jsonl", questions[12:])]
    first = planted(tmp_path, "first", questions[:5], every=7)
    second = planted(tmp_path, "second", questions[12:15] + questions[:1], every=3)
    settings = CorpusSettings(evals=tuple(evals), shard_bytes=10_000)
    found = compare([first, second], settings, workers=workers)
    counts = [(p["source"], p["eval"], p["items"], p["overlap"], p["mostly"]) for p in found["pairs"]]
    assert counts == [
        (first, evals[0], 12, 5, 5),
        (first, evals[1], 8, 0, 0),
        (second, evals[0], 12, 1, 1),
        (second, evals[1], 8, 3, 3),
    ]
    assert found["documents"] == 9
    assert found["pairs"][0]["share"] == 5 / 12
    assert [e["row"] for e in found["examples"][evals[0]]] == [1, 2, 3]
    example = found["examples"][evals[1]][0]
    assert example["words"] == " ".join(normal_words(questions[12])[:13])


def test_evaluation_sets_have_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HONE_DATA", str(tmp_path))
    for split, items in (("train", [prose(1)]), ("test", [prose(2), prose(3)])):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        rows = [json.dumps({"question": item, "answer": "#### 3"}) + "\n" for item in items]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(rows))
    assert read_items("gsm8k", ["question"]) == [[prose(2)], [prose(3)]]
    assert read_items("gsm8k:train") == [[prose(1), "#### 3"]]
    source = write(tmp_path / "a.jsonl", [prose(3), prose(4)])
    (pair,) = compare([source], CorpusSettings(evals=("gsm8k",)))["pairs"]
    assert (pair["items"], pair["overlap"]) == (2, 1)
    with pytest.raises(HoneError, match="no split"):
        read_items("gsm8k:dev")


def test_nothing_to_compare_is_an_error(tmp_path):
    source = write(tmp_path / "a.jsonl", [prose(0)])
    with pytest.raises(HoneError, match="--eval"):
        compare([source], CorpusSettings())
    with pytest.raises(HoneError, match="--column"):
        compare([source], CorpusSettings(column="body", evals=(source,)))
