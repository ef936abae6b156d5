"""Cutting a file into shards changes no document, and no record is too bad to be told about."""

import gzip
import json

import pytest

from hone.data.corpus import documents
from hone.data.corpus.documents import Document, Shard
from hone.errors import HoneError

TEXT = (
    b"\n  \nfirst line\nsecond line\n\n\n \t \nalone\n\r\nwith\r\nreturns\r\n\r\n"
    + "ü—é\n".encode()
    + b"\nlast, no newline"
)


def read(path, *, size=1 << 20, split="blank", limit=1 << 20, column="text") -> list[Document]:
    shards = documents.plan([str(path)], shard_bytes=size, split=split)
    return [d for s in shards for d in documents.read(s, column=column, split=split, limit=limit)]


@pytest.mark.parametrize("split", ["blank", "line"])
@pytest.mark.parametrize("size", range(1, len(TEXT) + 2))
def test_text_is_the_same_however_it_is_cut(tmp_path, split, size):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    assert read(path, size=size, split=split) == read(path, split=split)


def test_blank_lines_part_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    found = read(path, size=3)
    assert [d.text for d in found] == [
        "first line\nsecond line",
        "alone",
        "with\r\nreturns",
        "ü—é",
        "last, no newline",
    ]
    assert [TEXT[d.at : d.at + d.size].decode().strip("\r\n") for d in found] == [d.text for d in found]


def test_lines_and_whole_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\n")
    assert [d.text for d in read(path, split="line", size=2)] == ["one", "two"]
    assert [d.text for d in read(path, split="file", size=2)] == ["one\n\ntwo"]


@pytest.mark.parametrize("size", [1, 7, 20, 50, 1000])
def test_json_lines_are_the_same_however_they_are_cut(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x" * n + "\u2028ü"}, ensure_ascii=False) for n in range(30)))
    assert [d.text for d in read(path, size=size)] == ["x" * n + "\u2028ü" for n in range(30)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "\xff\xfe"}', "not_utf8"),
        (b'{"text": "a"', "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"[1]", "no_text"),
        (b'{"body": "a"}', "no_text"),
        (b'{"text": 3}', "no_text"),
        (b'{"text": null}', "no_text"),
        (b'{"text": " \\n"}', "empty"),
        (b'{"text": "\\ud800"}', "half_surrogate"),
    ],
)
def test_a_bad_record_says_why_and_the_next_is_read(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b'\n{"text": "good"}\n')
    bad, good = read(path)
    assert (bad.problem, bad.at, bad.size) == (problem, 0, len(line) + 1)
    assert (good.text, good.problem) == ("good", "")


def test_invalid_utf8_in_text_spoils_its_own_document_only(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nbad \xff\n\nalso good\n")
    assert [d.problem for d in read(path)] == ["", "not_utf8", ""]


@pytest.mark.parametrize("split", ["blank", "line", "file"])
def test_a_record_beyond_the_limit_is_counted_and_not_held(tmp_path, split):
    path = tmp_path / "a.txt"
    long = b"x" * 5000 + b"\n"
    path.write_bytes(long + b"\nshort\n" if split != "file" else long)
    found = read(path, split=split, limit=100)
    assert (found[0].problem, found[0].size, found[0].text) == ("too_long", 5001, "")
    assert [d.text for d in found[1:]] == ([] if split == "file" else ["short"])


def test_a_paragraph_of_many_lines_beyond_the_limit_is_one_record(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"12345678\n" * 20 + b"\nshort\n")
    for size in (7, 40, 1000):
        assert [(d.problem, d.size) for d in read(path, size=size, limit=100)] == [("too_long", 180), ("", 6)]


def test_a_line_of_ten_megabytes_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "long word " * 1_000_000
    path.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "next"}) + "\n")
    assert [d.text for d in read(path, size=1 << 20, limit=64 << 20)] == [text, "next"]


def test_an_empty_file_has_no_documents(tmp_path):
    for name in ("a.jsonl", "a.txt", "b.txt.gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
        assert read(path) == []


def test_compressed_files_and_byte_order_marks(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n'))
    assert [d.text for d in read(path, size=5)] == ["a", "b"]


@pytest.mark.parametrize("cut", [5, 20, -4])
def test_a_damaged_gzip_file_is_named(tmp_path, cut):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"some text\n" * 1000)[:cut])
    with pytest.raises(HoneError, match=r"a\.txt\.gz is a damaged gzip file"):
        read(path)


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.jsonl", "ignored.csv"):
        (tmp_path / name).write_text("x")
    shards = documents.plan([str(tmp_path)], shard_bytes=10, split="blank")
    assert [s.path.removeprefix(f"{tmp_path}/") for s in shards] == ["a.txt", "b.txt", "sub/c.jsonl"]
    assert shards[0] == Shard(str(tmp_path), str(tmp_path / "a.txt"), 0, 1)


def test_what_cannot_be_a_corpus_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    for sources, message in (
        (["nowhere"], "is not there: give the path"),
        ([str(tmp_path / "a.csv")], "JSON lines"),
        ([str(tmp_path), str(tmp_path / "a.txt")], "given twice"),
    ):
        with pytest.raises(HoneError, match=message):
            documents.plan(sources, shard_bytes=10, split="blank")
