"""Dataset files: every format gives the same rows, from any place on, and what cannot be read is named."""

import gzip
import json

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest

from hone.data.feed import columnar
from hone.data.feed.files import START, File
from hone.data.feed.row_store import Hub
from hone.data.rows import parse
from hone.errors import HoneError

ROWS = [{"prompt": f"q{i}\nline é", "completion": f'a "{i}", b', "label": i % 2 == 0} for i in range(23)]


def write_csv(path, rows, mark=","):
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerow(rows[0])
        writer.writerows(row.values() for row in rows)


def make(folder, form: str):
    path, lines = folder / f"rows{form}", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    table = pa.Table.from_pylist(ROWS)
    if form in (".csv", ".tsv"):
        write_csv(path, ROWS, "," if form == ".csv" else "\t")
    elif form == ".parquet":
        parquet.write_table(table, path, row_group_size=5)
    elif form == ".feather":
        feather.write_feather(table, path, chunksize=4)
    elif form == ".arrow":  # the stream format, as `datasets` writes it
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=6)
    elif form == ".json":
        path.write_text(json.dumps(ROWS))
    elif form.endswith(".gz"):
        path.write_bytes(gzip.compress((json.dumps(ROWS) if ".json." in form else lines).encode()))
    else:
        path.write_text(lines, encoding="utf-8")
    return File(path=path)


FORMS = [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".csv", ".tsv", ".parquet", ".feather", ".arrow"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_rows(tmp_path, form):
    assert [read.row for read in make(tmp_path, form).read()] == ROWS


@pytest.mark.parametrize("form", FORMS)
def test_reading_goes_on_from_every_place(tmp_path, form):
    file = make(tmp_path, form)
    whole = list(file.read())
    for n, read in enumerate([None, *whole]):
        start = START if read is None else tuple(json.loads(json.dumps(read.after)))
        assert list(file.read(start)) == whole[n:]


def test_a_batch_of_a_column_store_may_be_larger_than_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(columnar, "AT_ONCE", 3)
    for form in (".parquet", ".arrow", ".feather"):
        file = make(tmp_path, form)
        assert [[r.number for r in file.read((k, k))] for k in (0, 4, 22, 23)] == [
            list(range(k + 1, 24)) for k in (0, 4, 22, 23)
        ]
        assert file.count() == 23


def test_keys_that_only_some_messages_have_are_not_null_in_the_others(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "x"}]
    parquet.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "m.parquet")
    (read,) = File(path=tmp_path / "m.parquet").read()
    assert read.row == {"messages": messages}


def problems(path, data: bytes):
    path.write_bytes(data)
    return [(r.number, r.problem.split(":")[0]) for r in File(path=path).read() if r.problem]


def test_tools_and_calls_of_a_table_hold_no_key_of_another(tmp_path):
    def call(name, **arguments):
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("f", town="Paris"), call("g", size=3, more={"deep": [{"a": 1}, {"b": 2}]})]
    row = {"messages": [{"role": "assistant", "tool_calls": calls}], "tools": calls}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert [read.row for read in File(path=tmp_path / "a.parquet").read()] == [row]
    assert [read.row for read in Hub(path=str(tmp_path)).read()] == [row]


def test_a_bad_line_is_reported_and_the_rest_is_read(tmp_path):
    lines = [b'{"a": 1}', b'{"a": ', b"", b'{"a": "\xff"}', b"[1]", b'{"a": 2}']
    path = tmp_path / "a.jsonl"
    found = problems(path, b"\n".join(lines))
    assert [n for n, _ in found] == [2, 4, 5]
    assert [said.split("(")[0].strip() for _, said in found] == [
        "is not valid JSON",
        "is not UTF-8",
        "is a list, not an object",
    ]
    assert [r.row for r in File(path=path).read() if not r.problem] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "head", "row"),
    [("a.jsonl", b"", b'{"text": "%s"}'), ("a.csv", b"text\n", b'"%s"'), ("a.txt", b"", b"%s\n")],
)
def test_a_row_of_ten_megabytes_is_refused_and_the_next_is_read(tmp_path, name, head, row):
    path = tmp_path / name
    path.write_bytes(head + row % (b"x" * 10_000_000) + b"\n" + row % b"short" + b"\n")
    long, short = File(path=path).read()
    assert "is longer than 8 MiB" in long.problem
    assert short.row == {"text": "short"}
    assert list(File(path=path).read(long.after)) == [short]


def test_a_column_store_row_and_a_list_item_of_ten_megabytes_are_refused_too(tmp_path):
    rows = [{"text": "x" * 10_000_000}, {"text": "short"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.parquet", "a.json"):
        long, short = File(path=tmp_path / name).read()
        assert "8 MiB" in long.problem
        assert not short.problem


def test_csv_rows_with_too_many_fields_bad_quotes_or_bad_bytes_are_named_by_their_first_line(tmp_path):
    data = b'prompt,completion\n"a\nb",c\nx,y,z\nonly\n\nq,\xff\nm,"n\n'
    assert problems(tmp_path / "a.csv", data) == [
        (4, "has 3 fields, the first line names 2"),
        (5, "has 1 fields, the first line names 2"),
        (7, "is not UTF-8"),
        (8, "is not valid CSV (unexpected end of data)"),
    ]
    with pytest.raises(HoneError, match="names a column twice"):
        problems(tmp_path / "b.csv", b"a,a\n1,2\n")


def test_csv_reads_numbers_and_lists_only_where_the_column_means_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,label,margin,completions,labels\n42,True,0.5,"[""a"", ""b""]","[1, 0]"\n7,,x,,\n')
    first, second = (r.row for r in File(path=path).read())
    assert first == {"prompt": "42", "label": True, "margin": 0.5, "completions": ["a", "b"], "labels": [1, 0]}
    assert second == {"prompt": "7", "label": None, "margin": "x", "completions": None, "labels": None}


TEXT = "one\ntwo\n\n\n  \nthree\r\nfour\r\n\r\nfive é"


def test_a_text_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    whole = list(File(path=path).read())
    assert [r.row["text"] for r in whole] == ["one\ntwo", "three\r\nfour", "five é"]
    assert [list(File(path=path).read(r.after)) for r in whole] == [whole[1:], whole[2:], []]


def test_a_text_is_cut_into_chunks_of_whole_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("aaaa\nbb\n\ncccc\n" + "d" * 20 + "\ne\n")
    file = File(path=path, chunk=9)
    whole = list(file.read())
    assert [r.row["text"] for r in whole] == ["aaaa\nbb", "cccc", "d" * 20, "e"]  # 5+3+1 = 9 characters fit
    assert "".join(r.row["text"] for r in whole).replace("\n", "") == path.read_text().replace("\n", "")
    assert [list(file.read(r.after)) for r in whole] == [whole[i:] for i in range(1, 5)]


def test_damaged_files_are_named(tmp_path):
    packed = gzip.compress(b'{"a": 1}\n' * 5000)
    for name, data in {
        "a.jsonl.gz": packed[:-30],
        "b.jsonl.gz": b"not gzip",
        "c.parquet": b"PAR1" * 9,
        "d.arrow": b"ARROW" * 9,
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(HoneError, match=name.replace(".", r"\.")):
            list(File(path=tmp_path / name).read())


def test_the_fingerprint_sees_content_and_not_dates(tmp_path):
    import os

    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 200_000)
    file, before = File(path=path), File(path=path).fingerprint
    os.utime(path, (1, 1))
    assert file.fingerprint == before
    for change in (b"y" + b"x" * 199_999, b"x" * 199_999 + b"y", b"x" * 200_001):
        path.write_bytes(change)
        assert file.fingerprint != before
    path.write_bytes(b"x" * 200_000)
    assert file.fingerprint == before
    assert File(path=path, chunk=5).fingerprint != before


def test_a_row_is_shown_on_one_short_line():
    text = parse.short_text(
        {"prompt": "a\n" * 1000, "messages": [{"role": "user", "content": "b" * 99}] * 5, "x": "\ud800"}
    )
    assert "\n" not in text
    assert len(text) < 200
    assert text.startswith('{"prompt": "a\\na')


@pytest.mark.parametrize(
    ("name", "header", "says"),
    [
        ("a.csv", "prompt;completion", "separated by a semicolon, a .csv file's are by a comma: save it with a comma"),
        ("a.csv", "prompt|completion", "separated by a bar"),
        ("a.csv", "prompt\tcompletion", "separated by a tab, a .csv file's are by a comma: rename the file to .tsv"),
        ("a.tsv", "prompt,completion", "separated by a comma, a .tsv file's are by a tab: rename the file to .csv"),
    ],
)
def test_a_table_with_another_separator_says_so(tmp_path, name, header, says):
    (tmp_path / name).write_text(header + "\n1;2\n")
    with pytest.raises(HoneError, match="has a single column") as caught:
        list(File(path=tmp_path / name).read())
    assert says in str(caught.value)
    assert repr(header) in str(caught.value)


def test_a_separator_in_one_name_of_several_or_in_a_text_is_no_complaint(tmp_path):
    (tmp_path / "a.csv").write_text("text,a;b\nx;y,z\n")
    assert [read.row for read in File(path=tmp_path / "a.csv").read()] == [{"text": "x;y", "a;b": "z"}]
    (tmp_path / "b.csv").write_text("text\nx;y\n")
    assert [read.row for read in File(path=tmp_path / "b.csv").read()] == [{"text": "x;y"}]
