"""Files of rows, and feeds of them, that are refused; what each message asks for."""

import gzip
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import tokenizers
from remedy_world import Case, World, call, given, lacks, prepared, rows, tokenizer

from hone.data.collate import mismatched_pairs
from hone.data.feed import files
from hone.data.feed.assemble import Mixture
from hone.data.feed.locate import Reading, locate
from hone.data.feed.registry import FOLDER, answer_of_gsm8k
from hone.data.feed.row_store import RowStore
from hone.data.feed.source import Source, read_rows
from hone.data.feed.stream import Stream
from hone.data.feed.token_batches import TokenBatches
from hone.data.rows.pairs import transcript
from hone.data.text.json_object import read_object
from hone.data.text.tokenizer import Tokenizer
from hone.launch import feeds

ROW = '{"prompt": "a", "completion": "b"}'
USER, BOT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
GOOD = {"conversations": [USER, BOT]}


def read(wrong: str | bytes, right: str | bytes, says: str, suffix: str = ".jsonl") -> Case:
    """A file of rows with this content."""
    return given(lambda w, content: read_rows(w.file(content, suffix)), wrong, right, says)


def _under(world: World, content: str, suffix: str, **limits: int) -> None:
    """With limits that no file of a test has to reach."""
    before = {name: getattr(files, name) for name in limits}
    try:
        for name, limit in limits.items():
            setattr(files, name, limit)
        read_rows(world.file(content, suffix))
    finally:
        for name, limit in before.items():
            setattr(files, name, limit)


def _table(world: World, names: list[str], *, whole: bool = True) -> None:
    path = world.new(".parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * len(names), names=names), path)
    Path(path).write_bytes(Path(path).read_bytes()[: None if whole else 30])
    read_rows(path)


def _named(world: World, row: Mapping[str, Any]) -> None:
    """A dataset that Hone knows by name, in a folder of its own."""
    folder = Path(world.new())
    (folder / "gsm8k").mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        (folder / "gsm8k" / name).write_text(json.dumps(row))
    _in_data(world, str(folder), "gsm8k")


def _in_data(world: World, folder: str, name: str) -> None:
    before = os.environ.pop(FOLDER, None)
    os.environ.update({FOLDER: folder} if folder else {})
    try:
        prepared(world, "sft", f"data={name}", "read.overlong=drop", "train.prompts=1")
    finally:
        os.environ.pop(FOLDER, None)
        os.environ.update({FOLDER: before} if before is not None else {})


def resumed(make: Callable[[World], Any], change: Mapping[str, Any], says: str) -> Case:
    """A feed that goes on from a state that was changed, and from the one that was saved."""

    def loaded(world: World, changes: Mapping[str, Any]) -> None:
        feed = make(world)
        state = feed.state()
        make(world).load({**state, **changes})

    return given(loaded, change, {}, says)


def _source(world: World) -> Source[int]:
    return Source([1, 2, 3], seed=0)


def _mixed(world: World) -> Mixture[int]:
    return Mixture({"a": _source(world), "b": _source(world)}, [1, 2])


def _text_rows(world: World) -> RowStore:
    return RowStore(place=files.File(path=Path(world / "text.jsonl")))


def _stream(world: World) -> Stream[str]:
    path = Path(world / "streamed.jsonl")
    path.write_text(ROW + "\n" + ROW)
    return Stream([RowStore(place=files.File(path=path))], lambda read, store: [read.row["prompt"]], seed=0)


def _budgeted(world: World) -> TokenBatches:
    return TokenBatches(Source([()], seed=0), tokens=9, seed=0)


def _groups(world: World, rows: list[dict[str, Any]]) -> Any:
    return feeds.groups(rows, tokenizer(world), context=9, how=Reading(overlong="drop"))


def _kto(world: World, count: int) -> None:
    made = _groups(world, [{"prompt": "a", "completion": "b", "label": True}] * 2)
    mismatched_pairs([row for group in made for row in group][:count])


def _worded(unknown: str) -> Tokenizer:
    """A tokenizer of one word, which needs a token for all others."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1}, unk_token=unknown))
    return Tokenizer(inner=inner, eos="<eos>")


def _sized(world: World, size: int) -> None:
    folder = world.folder_of("tokenizer")
    if size:
        os.truncate(folder / "tokenizer.json", size)  # holes take no room
    Tokenizer.load(folder)


def _config(world: World, change: Mapping[str, Any], name: str = "tokenizer_config.json") -> None:
    folder = world.folder_of("tokenizer")
    path = folder / name
    was = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**was, **change}.items() if value is not None}))
    Tokenizer.load(folder)


def _tokenizer_json(world: World, content: str) -> None:
    folder = world.folder_of("chat")
    if content:
        (folder / "tokenizer.json").write_text(content)
    Tokenizer.load(folder)


CONTENT = [
    read(b"\xff\n", ROW, "save the file as UTF-8"),
    read('{"prompt": "\\ud800"}', ROW, "half of a surrogate pair"),
    read("{", ROW, "is not valid JSON"),
    read("3", ROW, "write one row as {column: value}"),
    read('{"a": ' + "[" * 70 + "]" * 70 + "}", ROW, "write it flatter"),
    read('{"a": ' + "1" * 5000 + "}", ROW, "write it as text"),
    read(f'{{"a": "{"b" * 2**23}"}}', f'{{"a": "{"b" * 2**22}"}}', "cut it into several rows"),
    read("{", f"[{ROW}]", "correct it", ".json"),
    read("a,a\n1,2\n", "a,b\n1,2\n", "rename one", ".csv"),
    read(b"\x1f\x8bxx", gzip.compress(ROW.encode()), "copy it again", ".jsonl.gz"),
    call(
        lambda w: read_rows(w.file(gzip.compress(b" " * 2**26), ".jsonl.gz")),
        lambda w: read_rows(w.file(ROW, ".jsonl")),
        "give the file unpacked",
    ),
    given(
        lambda w, suffix: _under(w, f"[{ROW}]" if suffix == ".json" else ROW, suffix, WHOLE=9),
        ".json",
        ".jsonl",
        "write it as",
    ),
    given(
        lambda w, text: _under(w, text, ".txt", LIMIT=4, LONGEST_LINE=8),
        "a" * 99,
        "a\n\na\n",
        "give a file of text lines",
    ),
    given(lambda w, name: read_rows(w / name), "none.jsonl", "answers.jsonl", "give the path of a dataset file"),
    given(
        lambda w, name: files.File(path=Path(w / name)).size, "none.jsonl", "text.jsonl", "give the path of a dataset"
    ),
    given(_table, ["a", "a"], ["a", "b"], 'has the column "a" twice: rename one'),
    call(lambda w: _table(w, ["a"], whole=False), lambda w: _table(w, ["a"]), "is not a whole parquet file"),
    lacks("pyarrow", lambda w: _table(w, ["a"]), 'pip install "hone[data]"'),
    lacks("datasets", lambda w: prepared(w, "sft", f"data=hf:{_hub(w)}:train"), "needs the datasets package"),
    given(lambda w, name: prepared(w, "sft", f"data=hf:{_hub(w)}{name}:train"), "/none", "", "cannot read hf:"),
    given(lambda w, data: prepared(w, "sft", f"data={data}"), "zzzzzz", "hf:WORLD/hub:train", "hf:OWNER/NAME:SPLIT"),
    call(lambda w: _in_data(w, "", "hh_harmless"), lambda w: prepared(w, "sft"), "is read from a folder: set"),
    given(
        _named, {"question": "a", "answer": 3}, {"question": "a", "answer": "b #### 3"}, "use the dataset's own file"
    ),
    given(lambda w, text: answer_of_gsm8k(text), "3", "#### 3", "write it there"),
    given(
        lambda w, path: read_object(Path(path(w))),
        lambda w: w.file(b" " * (2**25 + 1), ".json"),
        lambda w: w.file("{}", ".json"),
        "which no such file needs: copy it again",
    ),
]
ROWS = [
    rows("sft", {"conversations": 3}, GOOD, "expected a list of turns", "model.path=WORLD/chat"),
    rows("sft", {"conversations": [3]}, GOOD, "expected from and value", "model.path=WORLD/chat"),
    rows("sft", {"conversations": [USER, {**BOT, "value": 3}]}, GOOD, "fill it or remove", "model.path=WORLD/chat"),
    rows("sft", {"instruction": "a", "output": 3}, {"instruction": "a", "output": "3"}, "expected text: fill it"),
    rows("sft", {"instruction": " ", "output": "b"}, {"instruction": "a", "output": "b"}, '"instruction" is empty'),
    given(lambda w, text: transcript(text), "a", "Human: a", "begin it with Human: or Assistant:"),
    rows("sft", [json.loads(ROW), {**json.loads(ROW), "label": True}], [json.loads(ROW)], "split the dataset"),
    given(
        lambda w, name: prepared(w, "sft", f"read.columns.prompt={name}"),
        "ask",
        "prompt",
        "use one of prompt, completion",
    ),
    rows("sft", {"prompt": "a" * 90, "completion": "b"}, json.loads(ROW), "shorten them", "read.overlong=drop"),
    rows("grpo", {"prompt": "a" * 90}, {"prompt": "a"}, "shorten them", "read.overlong=drop"),
    rows(
        "grpo",
        {"prompt": "a", "answer": "1", "test_list": ["assert 1 == 1"]},
        {"prompt": "a", "answer": "1", "test_list": ["assert add(1, 2) == 3"]},
        "as in assert add(1, 2) == 3",
    ),
    given(_groups, [], [json.loads(ROW)], "it needs at least one row"),
    given(
        _groups, [{"prompt": "a" * 9, "completion": "b"}], [json.loads(ROW)], "all 1 rows exceed 9 tokens: shorten them"
    ),
    given(_kto, 1, 2, "use at least 2 rows in a step"),
    given(lambda w, unknown: _worded(unknown).encode("b"), "absent", "a", "use another tokenizer"),
    given(lambda w, text: tokenizer(w).encode(text), "\ud800", "a", "half of a surrogate pair"),
]
FEEDS = [
    given(lambda w, weight: Mixture({"a": _source(w)}, [weight]), -1, 1, "needs a weight above 0"),
    given(
        lambda w, data: locate([(w / data, 0.5), (w / "text.jsonl", 0.5)], Reading()),
        "text.jsonl*0.5",
        "text.jsonl",
        "give each of its parts one in that list",
    ),
    resumed(_source, {"seed": 1}, "resume with the same dataset and seed"),
    resumed(_source, {"position": 9}, "is no place in 3 rows: resume from another checkpoint"),
    resumed(_mixed, {"names": ["a"]}, "resume with the same data"),
    resumed(_mixed, {"taken": [-1, 0]}, "the state of the mix is damaged"),
    resumed(_stream, {"buffer": 7}, "resume with the same files and settings"),
    resumed(_stream, {"epoch": "x"}, "the state of the data is damaged"),
    resumed(_stream, {"position": 99}, "is no place in the data: start a new run"),
    resumed(_budgeted, {"tokens": 8}, "resume with the same settings"),
    resumed(_budgeted, {"window": -1}, "is no place in the data: resume from another checkpoint"),
    given(
        lambda w, item: Stream([_text_rows(w)], lambda *_: item, seed=0).take(1),
        [],
        [1],
        "mend the rows that were skipped",
    ),
]
TOKENIZERS = [
    given(_config, {"eos_token": None}, {}, "add the stop token"),
    given(_config, {"added_tokens_decoder": 3}, {}, "not an object of tokens by id"),
    given(_config, {"added_tokens_decoder": {"0": {}}}, {"added_tokens_decoder": {}}, "has no content: correct it"),
    given(
        _config,
        {"added_tokens_decoder": {"9": {"content": "<eos>"}}},
        {"added_tokens_decoder": {"1": {"content": "<eos>"}}},
        "correct one",
    ),
    given(
        lambda w, i: _config(w, {"eos_token_id": i}, "generation_config.json"),
        9999,
        1,
        "is not a token of this tokenizer",
    ),
    given(_sized, 2**28 + 1, 0, "more than any tokenizer"),
    given(_tokenizer_json, "{", "", "save the tokenizer there again"),
    call(lambda w: _older(w, converted=False), lambda w: _older(w, converted=True), "or save it again with"),
]


def _older(world: World, *, converted: bool) -> None:
    folder = world.folder_of("chat")
    if not converted:
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    Tokenizer.load(folder)


def _hub(world: World) -> str:
    """A dataset as `datasets` finds it on a disk."""
    folder = Path(world / "hub")
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text(ROW + "\n")
    return str(folder)


READ: list[Case] = [*CONTENT, *ROWS, *FEEDS, *TOKENIZERS]
