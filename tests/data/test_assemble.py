"""From what a recipe calls its data to a feed: found, joined, mixed, skipped, streamed."""

import json
from dataclasses import replace

import pytest

from hone.data.feed import assemble
from hone.data.feed.assemble import Mixture
from hone.data.feed.locate import Reading, locate
from hone.data.feed.source import Source
from hone.data.feed.stream import Stream
from hone.data.rows.convert import Grouper, RowCounts, Tasker
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError
from hone.types import Task

TOK = replace(train_bpe(["ab\n"], vocab_size=262, specials=CHAT_SPECIALS), chat_template=DEFAULT_TEMPLATE)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(prefix, n):
    return [{"text": f"{prefix}{i}"} for i in range(n)]


def load(data, how=Reading(), seed=0, **limits):  # noqa: B008
    make = lambda: Grouper(tokenizer=TOK, skip_bad=how.skip_bad, overlong=how.overlong, **limits)  # noqa: E731
    return assemble.load(data, how, make, seed=seed)


def said(groups):
    return [TOK.decode(list(g[0].tokens)[:-1]) for g in groups]


def test_a_pattern_reads_its_files_in_order_of_name(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", texts(name, 2))
    (part,) = locate(f"{tmp_path}/*.jsonl", Reading())
    assert [store.place.name[-7:] for store in part.stores] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    feed = load(f"{tmp_path}/*.jsonl").feed
    assert sorted(said(feed.take(6))) == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_the_separator_of_steps_is_told_where_the_rows_agree():
    row = {"prompt": "a", "steps": ["b "], "step_labels": [1]}
    written = {**row, "separator": ""}  # as labels are: what ended the steps is in them, or not known
    for rows, separator in (
        ([row], "\n"),
        ([{**row, "separator": ";"}], ";"),
        ([written], ""),
        ([{**written, "step_end": " "}, written], " "),
        ([{**written, "step_end": " "}, row], ""),
        (texts("a", 2), ""),
    ):
        assert load(rows).separator == separator


def test_parts_without_weights_are_one_dataset_and_with_weights_a_mix(tmp_path):
    a, b = write(tmp_path / "a.jsonl", texts("a", 3)), write(tmp_path / "b.jsonl", texts("b", 9))
    joined = load(f"{a}+{b}").feed
    assert isinstance(joined, Source)
    assert len({*said(joined.take(12))}) == 12
    mixed = load(f"{a}*0.25 + {b}*0.75").feed
    assert isinstance(mixed, Mixture)
    assert sum(text[0] == "a" for text in said(mixed.take(100))) == 25
    assert mixed.progress() == {f"epoch/{a}": 25 / 3, f"epoch/{b}": 75 / 9}
    with pytest.raises(HoneError, match="some parts have a weight and some have none"):
        load(f"{a}*0.25+{b}")


def test_a_file_whose_name_has_a_plus_or_a_star_is_a_file(tmp_path):
    for name in ("a+b.jsonl", "c*2.jsonl"):
        path = write(tmp_path / name, texts("x", 2))
        assert len(load(path).feed) == 2


def test_in_python_rows_and_lists_of_data_with_weights(tmp_path):
    path = write(tmp_path / "a.jsonl", texts("a", 3))
    assert said(load(texts("m", 1)).feed.take(1)) == ["m0"]
    mixed = load([(path, 1), (texts("m", 2), 1.0)]).feed
    assert sorted(text[0] for text in said(mixed.take(10))) == ["a"] * 5 + ["m"] * 5
    with pytest.raises(HoneError, match="data row 2 is str"):
        load([{"text": "a"}, "b"])
    for inner in (f"{path}*0.9", [(path, 0.1), (path, 0.9)]):
        with pytest.raises(HoneError, match="has weights inside a list of weights"):
            load([(inner, 0.5), (texts("m", 2), 0.5)])


def test_columns_are_renamed_before_the_shape_is_told(tmp_path):
    how = Reading(columns={"chosen": "rejected", "rejected": "chosen"})
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    ((better, worse),) = load([row], how).feed.take(1)
    assert (better.text, worse.text) == ("b", "a")
    (alpaca,) = load([{"q": "a", "r": "b"}], Reading(chat=True, columns={"instruction": "q", "output": "r"})).feed.take(
        1
    )
    (plain,) = load([{"instruction": "a", "output": "b"}], Reading(chat=True)).feed.take(1)
    assert (alpaca[0].tokens, alpaca[0].mask) == (plain[0].tokens, plain[0].mask)
    with pytest.raises(HoneError, match=r"data row 1: read.columns.text is t, which is no column: use one of q, r"):
        load([{"q": "a", "r": "b"}], Reading(columns={"text": "t"}))


def test_a_column_of_a_table_that_is_read_as_a_label_holds_truth(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion,good\na,b,true\na,c,False\n")
    feed = load(str(tmp_path / "a.csv"), Reading(columns={"label": "good"})).feed
    assert sorted((group[0].text, group[0].label) for group in feed.take(2)) == [("b", 1.0), ("c", 0.0)]


def test_a_bad_row_that_lacks_a_mapped_column_is_skipped_and_named_tasks_are_left_alone():
    how = Reading(skip_bad=True, columns={"text": "t"})
    loaded = load([{"x": "a"}, {"t": "b"}], how)
    assert said(loaded.feed.take(1)) == ["b"]
    assert "1 bad row skipped: data row 1: read.columns.text is t" in loaded.notes[0]
    make = lambda: Tasker(tokenizer=TOK)  # noqa: E731
    tasks = assemble.load([Task(prompt="a")], Reading(columns={"prompt": "q"}), make, seed=0)
    assert tasks.feed.take(1)[0].prompt == "a"


def test_two_parts_of_one_file_do_not_go_in_step(tmp_path):
    path = write(tmp_path / "a.jsonl", texts("a", 50))
    rows = said(load([(path, 1), (path, 1)]).feed.take(40))
    assert rows[::2] != rows[1::2]


BAD = ['{"text": "good"}', '{"text": ', '{"text": null}', '{"text": ""}', '{"other": 1}', '{"messages": [1]}', "[]"]


def test_a_bad_row_is_refused_with_file_line_and_the_row(tmp_path):
    path = tmp_path / "a.jsonl"
    for bad in BAD[1:]:
        path.write_text(BAD[0] + "\n\n" + bad + "\n")
        with pytest.raises(HoneError) as caught:
            load(str(path))
        message = str(caught.value)
        assert message.startswith(f"{path} line 3")
        assert "\n" not in message
        assert "the row: " in message or "not valid JSON" in message or "not an object" in message


def test_bad_rows_are_skipped_counted_and_the_first_few_listed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*BAD, BAD[0]]))
    for stream in ("never", "always"):
        loaded = load(str(path), Reading(skip_bad=True, stream=stream))
        assert said(loaded.feed.take(2)) == ["good", "good"]
        (converter,) = loaded.converters.values()
        assert converter.tally.skipped == 6
        assert len(converter.tally.reasons) == 3
    (note,) = load(str(path), Reading(skip_bad=True)).notes
    assert "6 bad rows skipped: " in note
    assert "line 2 is not valid JSON" in note
    assert note.endswith("; ...")
    path.write_text("\n".join(BAD[1:]))
    for stream in ("never", "always"):
        with pytest.raises(HoneError, match=r"has no good row: .* line 1 is not valid JSON"):
            load(str(path), Reading(skip_bad=True, stream=stream))


def test_long_rows_are_cut_or_dropped_and_said_so(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "b" * 30}, {"text": "c"}])
    with pytest.raises(HoneError, match="line 1 has 31 tokens, the limit is 9"):
        load(path, max_tokens=9)
    cut = load(path, Reading(overlong="truncate"), max_tokens=9)
    assert cut.notes == (f"{path}: 1 row cut to 9 tokens",)
    assert sorted(len(g[0].tokens) for g in cut.feed.take(2)) == [2, 9]
    dropped = load(path, Reading(overlong="drop"), max_tokens=9)
    assert dropped.notes == (f"{path}: 1 row of more than 9 tokens dropped",)
    with pytest.raises(HoneError, match="all 2 rows exceed 1 tokens"):
        load(path, Reading(overlong="drop"), max_tokens=1)


def test_converted_rows_are_said_so_once(tmp_path):
    rows = [{"instruction": f"do {i}", "input": "", "output": "ok"} for i in range(4)]
    loaded = load(write(tmp_path / "a.jsonl", rows))
    assert loaded.notes == (f"{tmp_path}/a.jsonl: 4 rows converted from Alpaca",)
    assert load(texts("a", 2)).notes == ()


def test_a_stream_and_memory_have_the_same_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", texts("a", 30))
    held, streamed = load(path).feed, load(path, Reading(stream="always", buffer=7)).feed
    assert isinstance(held, Source)
    assert isinstance(streamed, Stream)
    assert sorted(said(held.take(30))) == sorted(said(streamed.take(30)))


def test_what_is_large_is_streamed(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts("a", 30))
    monkeypatch.setattr(assemble, "IN_MEMORY", 100)
    assert isinstance(load(path).feed, Stream)
    assert isinstance(load(path, Reading(stream="never")).feed, Source)


def test_a_stream_whose_first_rows_are_wrong_is_refused_before_the_run(tmp_path):
    how = Reading(stream="always")
    with pytest.raises(HoneError, match="line 1: columns question are no shape"):
        load(write(tmp_path / "a.jsonl", [{"question": "a"}]), how)
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(HoneError, match="is empty"):
        load(str(tmp_path / "b.jsonl"), how)


def test_tasks_keep_their_columns_and_their_numbers(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": i, "level": i} for i in range(3)]
    for data in (
        write(tmp_path / "a.jsonl", rows),
        rows,
        [Task(prompt=f"p{i}", answer=str(i), extra={"level": i}) for i in range(3)],
    ):
        (part,) = locate(data, Reading())
        tasks = assemble.convert_rows(part, Reading(), Tasker(tokenizer=TOK))
        assert [(t.prompt, t.answer, t.extra["level"], t.id) for t in tasks] == [
            (f"p{i}", str(i), i, str(i + 1)) for i in range(3)
        ]


def test_a_folder_that_the_datasets_package_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", texts("a", 5))
    for stream in ("never", "always"):
        fresh = lambda how: load(f"hf:{folder}:train", how).feed  # noqa: E731
        how = Reading(stream=stream, buffer=2)
        whole = said(fresh(how).take(14))
        assert sorted(whole[:5]) == [f"a{i}" for i in range(5)]
        for position in range(8):
            feed, again = fresh(how), fresh(how)
            feed.take(position)
            again.load(json.loads(json.dumps(feed.state())))
            assert said(again.take(6)) == whole[position : position + 6]
    with pytest.raises(HoneError, match=r"cannot read hf:.*:dev"):
        load(f"hf:{folder}:dev")


def test_hub_names():
    place = locate("hf:owner/name/main:test", Reading())[0].stores[0].place
    assert (place.path, place.config, place.split) == ("owner/name", "main", "test")
    place = locate("hf:owner/name", Reading())[0].stores[0].place
    assert (place.path, place.config, place.split) == ("owner/name", None, "train")


def test_a_slice_takes_the_first_rows_of_every_kind_of_data(tmp_path, monkeypatch):
    a, b = write(tmp_path / "a.jsonl", texts("a", 9)), write(tmp_path / "b.jsonl", texts("b", 9))
    for spec, expected in {
        f"{a}[:2]": ["a0", "a1"],
        f"{a}[:99]": [f"a{i}" for i in range(9)],
        f"{a}[:1]+{b}[:2]": ["a0", "b0", "b1"],
        f"{tmp_path}/*.jsonl[:11]": [*(f"a{i}" for i in range(9)), "b0", "b1"],
        f"{tmp_path}/*.jsonl[:9]": [f"a{i}" for i in range(9)],
        f"{tmp_path}/[a].jsonl[:1]": ["a0"],
    }.items():
        for stream in ("never", "always"):
            feed = load(spec, Reading(stream=stream)).feed
            assert len(feed) == len(expected)
            assert sorted(said(feed.take(2 * len(expected)))) == sorted(2 * expected)
    mixed = load(f"{a}[:1]*0.5+{b}[:1]*0.5").feed
    assert sorted(said(mixed.take(4))) == ["a0", "a0", "b0", "b0"]
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "test.jsonl", [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(5)])
    monkeypatch.setenv("HONE_DATA", str(tmp_path))
    (part,) = locate("gsm8k:test[:3]", Reading())
    assert [row["answer"] for row, _ in assemble.plain_rows(part, Reading(), RowCounts())] == ["0", "1", "2"]


def test_a_slice_of_a_file_with_blank_lines_resumes_in_a_stream(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in texts("a", 9)))
    how = Reading(stream="always", buffer=2)
    whole = said(load(f"{path}[:5]", how).feed.take(23))
    assert set(whole) == {f"a{i}" for i in range(5)}
    for before in range(1, 12):
        first, again = load(f"{path}[:5]", how).feed, load(f"{path}[:5]", how).feed
        first.take(before)
        again.load(json.loads(json.dumps(first.state())))
        assert said(again.take(23 - before)) == whole[before:]
    with pytest.raises(HoneError, match="cannot resume"):
        load(f"{path}[:6]", how).feed.load(first.state())


def test_a_few_rows_of_a_large_file_are_held_in_memory(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts("a", 99))
    monkeypatch.setattr(assemble, "IN_MEMORY", 200)
    assert isinstance(load(path).feed, Stream)
    assert isinstance(load(f"{path}[:9]").feed, Source)


@pytest.mark.parametrize("cut", ["[:0]", "[3:5]", "[5:]", "[:-1]", "[:]", "[:10%]"])
def test_other_slices_are_refused_with_the_one_there_is(tmp_path, cut):
    path = write(tmp_path / "a.jsonl", texts("a", 3))
    with pytest.raises(HoneError, match=r"only the first rows can be taken: write .*a.jsonl\[:N\]"):
        load(path + cut)
    named = write(tmp_path / f"b{cut}.jsonl".replace("/", ""), texts("b", 2))
    assert len(load(named).feed) == 2
