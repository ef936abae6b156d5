"""Bytes and values that no row should have, through every reader and for every algorithm: only HoneError comes out."""

import csv
import datetime
import decimal
import gzip
import json
import os
import random
import socket
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from places import write_rows

from hone.algo import ALGORITHMS
from hone.config.overrides import Choice
from hone.config.recipe import ReadSpec, Recipe
from hone.data.feed import files
from hone.data.feed.source import read_rows
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError
from hone.launch import feeds

PLAIN = train_bpe([], vocab_size=258)
CHAT = replace(
    train_bpe([], vocab_size=258 + len(CHAT_SPECIALS), specials=CHAT_SPECIALS), chat_template=DEFAULT_TEMPLATE
)
USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
DEEP: Any = "x"
for _ in range(500):
    DEEP = [DEEP]
STRANGE: list[Any] = [
    None, True, 0, -1, 1.5, 10**400, "", " ", "\x00", "é" * 3, "\ud800", [], [[]], [None], [1], [""], {}, {"a": None},
    {"role": "user"}, [{"role": "user"}], [{"role": "user", "content": None}], [{"role": None, "content": "a"}],
    [{"role": "user", "content": 3}], [{"role": ["x"], "content": "a"}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image", "url": "x"}]}], [USER, None], [USER, "x"], [BOT], [USER, BOT, 7],
    [{"role": "assistant", "content": "a", "tool_calls": 3}],
    [{"role": "assistant", "content": "a", "tool_calls": [3]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "content": "a", "reasoning_content": [1]}], [{"from": "human", "value": None}],
    [{"from": {}}],
    [{"from": "human", "value": "x"}, {"from": "gpt", "value": ["y"]}], "\n\nHuman: a", "\n\nAssistant:", "Human:",
    [float("inf")], [1, None, "a"], ["one", 2], ["one", ""], [True, "x"], {"x": {"y": [1, {"z": 2}]}},
]  # fmt: skip
IN_MEMORY: list[Any] = [
    b"\xff",
    {1: 2},
    {1, 2},
    float("nan"),
    float("inf"),
    object(),
    DEEP,
    range(3),
    3j,
    DEEP[:0],
    print,
]
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "a b"},
    "completion": {"prompt": "a", "completion": "b", "tools": None},
    "messages": {"messages": [USER, BOT]},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.0},
    "dialogues": {"chosen": [USER, BOT], "rejected": [USER, {"role": "assistant", "content": "no"}]},
    "transcripts": {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    "labelled": {"prompt": "a", "completion": "b", "label": True, "score": 0.5},
    "steps": {"prompt": "a", "steps": ["b", "c"], "step_labels": [1, 0], "separator": "\n"},
    "completions": {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]},
    "problem": {"prompt": "a", "answer": "b", "id": "1", "extra": 1},
    "alpaca": {"instruction": "a", "input": "b", "output": "c", "system": "s"},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
}
NO_TEXT = (b"\x00\x00\x00\x00\x01\x00\x00\x00", b"\xff")  # where a text of one byte lies, and the byte
ALGOS = ("pretrain", "sft", "dpo", "kto", "reward_model", "pointwise_reward_model", "process_reward_model", "grpo")


def mutants(values: list[Any]) -> Iterator[dict[str, Any]]:
    """Each column of each row with each strange value, and without it."""
    for row in ROWS.values():
        for name in row:
            yield {key: value for key, value in row.items() if key != name}
            for value in values:
                yield {**row, name: value}
        yield {**row, "tools": [3]}
        yield {**row, "tools": "{"}


def fed(data: Any, algo: str, *, chat: bool = False, **read: Any) -> str:
    """Read all of the data for the algorithm; the kind of error that came out, "" for none or a HoneError."""
    recipe = Recipe(data=data, algo=Choice(algo), read=ReadSpec(**read))
    try:
        loaded = feeds.feed(recipe, ALGORITHMS[algo](), CHAT if chat else PLAIN, context=64)
        loaded.feed.state()
        loaded.feed.take(1)
    except HoneError as error:
        return "" if str(error).isprintable() else f"not one line: {str(error)[:60]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def worst(tried: Iterator[tuple[Any, str]]) -> list[str]:
    return [f"{what!r:.160} -> {why:.120}" for what, why in tried if why][:8]


def test_strange_values_in_known_columns_of_rows_in_memory():
    rows = list(mutants(STRANGE + IN_MEMORY))
    some = ((row, ALGOS[(n + k) % len(ALGOS)], n % 2 == 0) for n, row in enumerate(rows) for k in (0, 3))
    assert worst((row, fed([row], algo, chat=chat)) for row, algo, chat in some) == []


def test_strange_values_are_skipped_and_counted_with_skip_bad():
    rows = list(mutants(STRANGE + IN_MEMORY))
    for algo in ALGOS:
        for chat in (False, True):
            assert fed(rows, algo, chat=chat, skip_bad=True, overlong="drop") == "", algo


def test_strange_values_in_jsonl_json_and_streams(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    for n, row in enumerate([*mutants(STRANGE)][::7]):
        algo, whole = ALGOS[n % len(ALGOS)], tmp_path / "rows.json"
        path.write_text(json.dumps(row) + "\n")
        whole.write_text(json.dumps([row]))
        for place, stream in ((path, "never"), (path, "always"), (whole, "never")):
            why = fed(str(place), algo, chat=n % 3 == 0, stream=stream)
            assert why == "", f"{algo} {stream} {row!r:.120}: {why}"


BYTES: dict[str, tuple[bytes, str]] = {  # what a line holds, and what is said of it
    "a key twice": (
        b'{"prompt": "a", "prompt": "b", "completion": "c"}',
        'line 1 has the key "prompt" twice: remove one',
    ),
    "a key twice inside": (b'{"messages": [{"role": "user", "role": "x"}]}', 'line 1 has the key "role" twice'),
    "NaN": (b'{"text": "a", "x": NaN}', "line 1 is not valid JSON (NaN"),
    "-Infinity": (b'{"text": "a", "x": -Infinity}', "line 1 is not valid JSON (-Infinity"),
    "1e999": (b'{"text": "a", "x": 1e999}', "line 1 is not valid JSON (1e999 is larger than any number)"),
    "half a pair": (b'{"text": "a", "x": "\\ud83d"}', "line 1 holds half of a surrogate pair"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "line 1 is not UTF-8"),
    "Latin-1": ('{"text": "é"}'.encode("latin-1"), "line 1 is not UTF-8"),
    "NUL bytes": (b"\x00" * 40, "line 1 is not valid JSON"),
    "a NUL in a text": (b'{"text": "a\x00b"}', "line 1 is not valid JSON"),
    "deep lists": (b'{"text": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}", "in more than 64 levels"),
    "very deep lists": (b"[" * 100_000, "in more than 64 levels"),
    "very deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "in more than 64 levels"),
    "a huge number": (b'{"text": "a", "x": ' + b"9" * 5000 + b"}", "thousands of digits: write it as text"),
    "a list": (b"[1, 2]", "line 1 is a list, not an object"),
    "text": (b'"a"', "line 1 is text, not an object"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "line 1 is not valid JSON (Extra data"),
    "half an object": (b'{"text": "a', "line 1 is not valid JSON (Invalid control"),
    "single quotes": (b"{'text': 'a'}", "line 1 is not valid JSON"),
}


def test_a_line_that_is_no_row_is_named_with_what_is_wrong(tmp_path: Path):
    for name, (line, says) in BYTES.items():
        (tmp_path / "rows.jsonl").write_bytes(line + b"\n")
        with pytest.raises(HoneError) as caught:
            read_rows(tmp_path / "rows.jsonl")
        assert says in str(caught.value), name


def test_such_lines_are_skipped_and_counted_with_skip_bad(tmp_path: Path):
    lines = [line for name, (line, _) in BYTES.items() if name != "UTF-16"]  # whose line break is two bytes
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "good"}']))
    recipe = Recipe(data=str(tmp_path / "rows.jsonl"), algo=Choice("pretrain"), read=ReadSpec(skip_bad=True))
    loaded = feeds.feed(recipe, ALGORITHMS["pretrain"](), PLAIN, context=64)
    assert len(loaded.feed) == 1
    assert f"{len(lines)} bad rows skipped" in " ".join(loaded.notes)


def test_a_key_that_stands_twice_in_a_json_file_is_named_with_its_item(tmp_path: Path):
    (tmp_path / "rows.json").write_text('[{"text": "a"}, {"text": "b", "text": "c"}]')
    with pytest.raises(HoneError, match='item 2 has the key "text" twice'):
        read_rows(tmp_path / "rows.json")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path):
    for name, content in (
        ("a.jsonl", '{"text": "a"}'),
        ("a.json", '[{"text": "a"}]'),
        ("a.csv", "text\na"),
        ("a.txt", "a"),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert read_rows(tmp_path / name) == [{"text": "a"}], name


def test_random_bytes_in_every_kind_of_file(tmp_path: Path):
    draw = random.Random(3)
    whole = Path(write_rows(tmp_path / "good.jsonl", list(ROWS.values()))).read_bytes()
    kinds = [kind for kind in files.READERS if kind.startswith(".")]
    for n in range(400):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 20)):
            data[draw.randrange(len(data))] = draw.choice(b'"{}[],:\\\n\x00\xff0e-' + bytes([draw.randrange(256)]))
        path = tmp_path / f"rows{draw.choice(kinds)}"
        path.write_bytes(data[draw.randrange(20) :])
        why = fed(str(path), ALGOS[n % len(ALGOS)], skip_bad=n % 2 == 0)
        assert why == "", f"{path.suffix} number {n}: {why}"


def test_strange_tables(tmp_path: Path):
    head = "prompt,completion,label,messages\n"
    for body in (
        "", "a", "a,b,c,d,e", '"a', 'a"b,c,d,e', '"a"b,c,d,e', "a,b,[,{", "a,b,NaN,1e999", "a,b,true," + "[" * 5000,
        'a,b,1,"[{""role"": 3}]"', "a,b,\udcff,x", "\x00,\x00,\x00,\x00", "a,b,9" + "9" * 5000 + ",x", ",,,", '"' * 7,
    ):  # fmt: skip
        for algo in ("sft", "kto", "grpo"):
            for suffix in (".csv", ".tsv"):
                path = tmp_path / f"rows{suffix}"
                path.write_bytes((head + body).encode("utf-8", "surrogateescape"))
                why = fed(str(path), algo)
                assert why == "", f"{suffix} {body[:40]!r}: {why}"
    with (tmp_path / "wide.csv").open("w") as file:
        csv.writer(file).writerows([["text", "text"], ["a", "b"]])
    with pytest.raises(HoneError, match="names a column twice"):
        read_rows(tmp_path / "wide.csv")


def test_columns_of_every_type_in_parquet_and_arrow(tmp_path: Path):
    columns = {
        "bytes": pyarrow.array([b"\xff\x00"]), "date": pyarrow.array([datetime.date(2020, 1, 1)]),
        "far": pyarrow.array([2**62], pyarrow.timestamp("us")), "exact": pyarrow.array([decimal.Decimal("1.5")]),
        "nan": pyarrow.array([float("nan")]), "null": pyarrow.array([None]), "list": pyarrow.array([[None, 1]]),
        "struct": pyarrow.array([{"role": "user", "content": None}]), "half": pyarrow.array([1.5], pyarrow.float16()),
        "chats": pyarrow.array([[{"role": "user", "content": "a"}, {"role": None, "content": "b"}]]),
        "map": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "no utf-8": pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, *map(pyarrow.py_buffer, NO_TEXT)]),
        "words": pyarrow.array(["a"]).dictionary_encode(),
    }  # fmt: skip
    for kind, column in columns.items():
        for name in ("text", "prompt", "completion", "chosen", "messages", "label", "steps"):
            table = pyarrow.table({name: column, **({"prompt": ["a"]} if name != "prompt" else {})})
            pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
            pyarrow.feather.write_feather(table, str(tmp_path / "rows.feather"))
            for suffix in (".parquet", ".feather"):
                for algo in ("pretrain", "sft", "dpo", "grpo"):
                    why = fed(str(tmp_path / f"rows{suffix}"), algo)
                    assert why == "", f"{kind} as {name} in {suffix} for {algo}: {why}"
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(HoneError, match='has the column "text" twice'):
        read_rows(tmp_path / "twice.parquet")


def test_damaged_parquet_and_arrow_files(tmp_path: Path):
    table, draw = pyarrow.table({"text": [f"row {i}" for i in range(50)]}), random.Random(1)
    pyarrow.parquet.write_table(table, tmp_path / "good.parquet")
    pyarrow.feather.write_feather(table, str(tmp_path / "good.feather"), compression="uncompressed")
    for n in range(150):
        suffix = (".parquet", ".feather", ".arrow")[n % 3]
        data = bytearray((tmp_path / f"good{'.parquet' if n % 3 == 0 else '.feather'}").read_bytes())
        if n % 2:
            data = data[: draw.randrange(len(data))]
        else:
            for _ in range(3):
                data[draw.randrange(len(data))] = draw.randrange(256)
        path = tmp_path / f"rows{suffix}"
        path.write_bytes(data)
        for given in (str(path), f"{path}[:5]"):
            why = fed(given, "pretrain")
            assert why == "", f"number {n}: {why}"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path, monkeypatch):
    for suffix in (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow", ".jsonl.gz"):
        pipe, folder, device, lost = (tmp_path / f"{name}{suffix}" for name in ("pipe", "folder", "device", "lost"))
        os.mkfifo(pipe)
        folder.mkdir()
        device.symlink_to("/dev/zero")
        lost.symlink_to(tmp_path / "nowhere")
        for path, says in (
            (pipe, "is a pipe: save the rows in a file"),
            (folder, "is a folder: name its files"),
            (device, "is a device: save the rows in a file"),
            (lost, "cannot read"),
        ):
            for data in (str(path), f"{path}[:3]"):
                with pytest.raises(HoneError, match=says):
                    feeds.groups(data, PLAIN, context=64)
    plug = tmp_path / "plug.jsonl"
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("plug.jsonl")  # a path that is longer than a hundred characters cannot be bound
        with pytest.raises(HoneError, match="is a socket"):
            read_rows(plug)
    for name in ("/dev/zero", "/dev/random", "/dev/stdin"):
        with pytest.raises(HoneError):
            feeds.groups(name, PLAIN, context=64)


def test_a_line_without_an_end_is_given_up(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 2**22)
    for suffix in (".jsonl", ".csv", ".txt"):
        path = tmp_path / f"sparse{suffix}"
        with path.open("wb") as file:
            file.truncate(2**40)
        with pytest.raises(HoneError, match="does not end within 4 MiB: give a file of text lines"):
            read_rows(path)


def test_a_json_file_too_large_to_be_read_whole_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 2**20)
    path = tmp_path / "sparse.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(HoneError, match=r"would be read whole: write it as \.jsonl"):
        read_rows(path)


def test_a_text_without_blank_lines_is_not_held_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "LIMIT", 2**16)
    path = tmp_path / "long.txt"
    path.write_text("a line of some words\n" * 20_000)
    with pytest.raises(HoneError, match=r"put one between documents, or set read\.chunk=2000"):
        read_rows(path)
    assert len([*files.File(path=path, chunk=2000).read()]) > 200


def test_a_file_that_unpacks_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path):
    path = tmp_path / "bomb.jsonl.gz"
    row = b'{"text": "a"}\n'
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(60):
            file.write(row * 80_000)
    tracemalloc.start()
    try:
        for data in (str(path), f"{path}[:3]"):
            with pytest.raises(HoneError, match="unpacks to more than 200 times its size"):
                feeds.groups(data, PLAIN, context=64)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()
