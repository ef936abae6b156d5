"""Dataset files and the order of rows: every row once an epoch, resumable exactly, broken files named by line."""

import json
from collections import Counter

import numpy as np
import pytest
from each import each

from hone.data.feed.source import Source, read_rows
from hone.errors import HoneError
from hone.types import Rollout, Task


def write(folder, name: str, data: bytes):
    path = folder / name
    path.write_bytes(data)
    return path


def test_jsonl_and_json_give_the_same_rows(tmp_path):
    rows = [{"text": "é\u2028x"}, {"text": "b", "n": [1, None]}]
    lines = "\r\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    assert read_rows(write(tmp_path, "a.jsonl", lines.encode())) == rows
    assert read_rows(write(tmp_path, "b.jsonl", b"\xef\xbb\xbf" + lines.encode() + b"\n\n")) == rows
    assert read_rows(str(write(tmp_path, "a.json", json.dumps(rows, indent=1).encode()))) == rows


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": }', "line 3 is not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": NaN}', "line 2 is not valid JSON (NaN"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', "line 2 is not UTF-8"),
        ("a.jsonl", b"[1]", "line 1 is a list, not an object"),
        ("a.jsonl", b"null", "line 1 is null"),
        ("a.jsonl", b'{"a": 1}{"a": 2}', "line 1 is not valid JSON"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "line 1 holds a whole number of thousands of digits"),
        ("a.jsonl", b"[" * 200_000, "line 1 holds lists and objects in more than 64 levels"),
        ("a.json", b'{"a": 1}', "holds an object, not a list"),
        ("a.json", b'[{"a": 1}, 3]', "item 2 is a number"),
        ("a.json", b"", "is not valid JSON"),
        ("a.parquet", b"PAR1", "is not a whole parquet file"),
        ("a.xlsx", b"PK", "is not a kind of file Hone reads (.jsonl, "),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, data, says):
    path = write(tmp_path, name, data)
    with pytest.raises(HoneError) as caught:
        read_rows(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    for name, says in (("none.jsonl", "cannot read"), ("d.jsonl", "is a folder: name its files")):
        with pytest.raises(HoneError, match=says):
            read_rows(tmp_path / name)


@pytest.mark.parametrize("batch", [1, 3, 7, 10, 23])
def test_every_epoch_has_every_row_once_whatever_the_batch(batch):
    source = Source(range(10), seed=1)
    taken = []
    while len(taken) < 230:
        taken += source.take(batch)
    epochs = [taken[i : i + 10] for i in range(0, 230, 10)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) > 20  # a fresh order each time
    assert taken[:230] == Source(range(10), seed=1).take(230)


def test_the_seed_sets_the_order_and_no_seed_and_epoch_share_one():
    orders = [tuple(Source(range(50), seed=s).take(50)) for s in range(20)]
    orders += [tuple(Source(range(50), seed=0).take(100)[50:])]
    assert len(set(orders)) == 21


def test_the_order_is_pinned_for_ever():
    # the order a run was saved under must not change with a version of numpy or of Hone
    bits = np.random.PCG64(np.random.SeedSequence((7, 0))).random_raw(6).tolist()
    assert Source(range(6), seed=7).take(6) == sorted(range(6), key=bits.__getitem__) == [3, 4, 0, 2, 5, 1]


def test_all_orders_of_three_rows_are_equally_likely():
    counts = Counter(tuple(Source(range(3), seed=s).take(3)) for s in range(3000))
    assert len(counts) == 6
    assert sum((c - 500) ** 2 / 500 for c in counts.values()) < 20.5  # chi-square, 5 degrees, p = 0.001


@each("before", [0, 1, 9, 10, 11, 35])
def test_resuming_goes_on_exactly(before):
    whole = Source(range(10), seed=3).take(before + 40)
    first = Source(range(10), seed=3)
    first.take(before)
    state = json.loads(json.dumps(first.state()))
    again = Source(range(10), seed=3)
    again.take(17)  # wherever it stood
    again.load(state)
    assert again.take(40) == whole[before:]
    assert first.take(40) == whole[before:]


def test_a_state_of_another_dataset_or_seed_is_refused():
    state = Source(["a", "b", "c"], seed=1).state()
    others = [
        (Source(["a", "b", "d"], seed=1), "fingerprint"),
        (Source(["a", "c", "b"], seed=1), "fingerprint"),
        (Source(["a", "b"], seed=1), "rows"),
        (Source(["a", "b", "c"], seed=2), "seed"),
    ]
    for source, name in others:
        with pytest.raises(HoneError, match=f"cannot resume: the data's {name}"):
            source.load(state)
        source.take(1)  # still usable, still at the start of its first epoch
        assert source.epoch == 1 / len(source)


def test_a_damaged_state_is_refused():
    source = Source(["a", "b"], seed=1)
    good = source.state()
    for change in (
        {"position": 3},
        {"position": -1},
        {"epoch": 1.5},
        {"epoch": None},
        {"position": True},
        {"seed": True},
    ):
        with pytest.raises(HoneError, match="cannot resume"):
            source.load({**good, **change})
    with pytest.raises(HoneError, match="cannot resume"):
        source.load({})


def test_the_fingerprint_sees_tasks_tokens_and_where_one_row_ends():
    def mark(rows):
        return Source(rows, seed=0).fingerprint

    assert mark([Task(prompt="a", answer="1")]) != mark([Task(prompt="a", answer="2")])
    long = list(range(5000))
    assert mark([Rollout(tokens=long, mask=[True] * 5000)]) != mark(
        [Rollout(tokens=[*long[:-1], 0], mask=[True] * 5000)]
    )
    assert mark(["a", "b"]) != mark(["a', 'b"])
    assert mark(["\ud800"]) == mark(["\ud800"])


def test_empty_data_and_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        Source([], seed=0)
    with pytest.raises(ValueError, match="cannot take"):
        Source([1], seed=0).take(-1)
    assert Source([1], seed=0).take(0) == []
