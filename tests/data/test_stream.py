"""Streams: every row once an epoch, in an order that any place resumes exactly; a changed file is refused."""

import json
from copy import copy

import pytest

from hone.data.feed.files import File
from hone.data.feed.row_store import Memory, RowStore
from hone.data.feed.stream import Stream
from hone.errors import HoneError


def stores(folder, sizes=(7, 1, 12)):
    made = []
    for k, size in enumerate(sizes):
        path = folder / f"{k}.jsonl"
        path.write_text("".join(json.dumps({"n": 100 * k + i}) + "\n" for i in range(size)))
        made.append(RowStore(place=File(path=path)))
    return made


def numbers(read, store):
    return [read.row["n"]]


def stream(folder, *, buffer=5, seed=3, **rest):
    return Stream(stores(folder), numbers, seed=seed, buffer=buffer, **rest)


ALL = sorted([*range(7), 100, *range(200, 212)])


@pytest.mark.parametrize("buffer", [1, 2, 5, 19, 20, 21, 1000])
@pytest.mark.parametrize("batch", [1, 3, 20, 50])
def test_every_epoch_has_every_row_once(tmp_path, buffer, batch):
    source, taken = stream(tmp_path, buffer=buffer), []
    while len(taken) < 100:
        taken += source.take(batch)
    epochs = [taken[i : i + 20] for i in range(0, 100, 20)]
    assert all(sorted(epoch) == ALL for epoch in epochs)
    assert len({tuple(e) for e in epochs}) > 2  # with a buffer of one row only the files change places
    assert taken == stream(tmp_path, buffer=buffer).take(len(taken))
    assert taken != stream(tmp_path, buffer=buffer, seed=4).take(len(taken))


@pytest.mark.parametrize("buffer", [1, 4, 5, 100])
def test_killed_at_any_position_it_goes_on_as_if_it_had_not_been(tmp_path, buffer):
    whole = stream(tmp_path, buffer=buffer).take(70)
    for position in range(60):
        first = stream(tmp_path, buffer=buffer)
        first.take(position)
        state = json.loads(json.dumps(first.state()))
        again = stream(tmp_path, buffer=buffer)
        again.take(position % 7)  # wherever it stood
        again.load(state)
        assert again.state() == state
        assert again.take(10) == whole[position : position + 10] == first.take(10)
        assert again.state() == first.state()


def test_rows_of_different_windows_meet_in_other_epochs(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(40)))
    source = Stream([RowStore(place=File(path=path))], numbers, seed=0, buffer=10)
    epochs = [source.take(40) for _ in range(30)]
    swapped = [sum(epoch.index(k) < epoch.index(k - 1) for epoch in epochs) for k in range(1, 40)]
    assert min(swapped) > 3  # every two neighbours change places now and then: no window border stays
    assert all(abs(epoch.index(n) - n) < 10 for epoch in epochs for n in range(40))  # no further than the buffer


@pytest.mark.parametrize("change", ["head", "tail", "longer", "shorter", "file gone", "another file"])
def test_a_changed_file_is_refused(tmp_path, change):
    source = stream(tmp_path)
    source.take(8)
    state = source.state()
    path = tmp_path / "2.jsonl"
    text = path.read_text()
    if change == "another file":
        again = Stream(stores(tmp_path, sizes=(7, 1, 12, 2)), numbers, seed=3, buffer=5)
    elif change == "file gone":
        again = Stream(stores(tmp_path)[:2], numbers, seed=3, buffer=5)
    else:
        path.write_text(
            {
                "head": text.replace("200", "999"),
                "tail": text.replace("211", "999"),
                "longer": text + '{"n": 1}\n',
                "shorter": text[: text.rindex("{")],
            }[change]
        )
        missing = [RowStore(place=File(path=tmp_path / f"{k}.jsonl")) for k in range(3)]
        again = Stream(missing, numbers, seed=3, buffer=5)
    with pytest.raises(HoneError, match="cannot resume: the data's content has changed"):
        again.load(state)


def test_another_seed_or_buffer_and_a_damaged_state_are_refused(tmp_path):
    state = stream(tmp_path).state()
    for other in (stream(tmp_path, seed=4), stream(tmp_path, buffer=6)):
        with pytest.raises(HoneError, match="cannot resume"):
            other.load(state)
    for name, value in (("epoch", -1), ("place", None), ("place", [1, 2]), ("position", True), ("position", 99)):
        with pytest.raises(HoneError, match="cannot resume"):
            stream(tmp_path).load({**state, name: value})


def test_a_copy_does_not_move_the_stream(tmp_path):
    source, whole = stream(tmp_path), stream(tmp_path).take(40)
    for done in range(0, 30, 3):
        assert copy(source).take(10) == whole[done : done + 10]
        assert source.take(3) == whole[done : done + 3]


def test_rows_may_be_skipped_but_not_all_of_them(tmp_path):
    even = Stream(stores(tmp_path), lambda r, s: [r.row["n"]] if r.row["n"] % 2 == 0 else [], seed=1, buffer=3)
    kept = [n for n in ALL if n % 2 == 0]
    assert sorted(even.take(len(kept))) == sorted(even.take(len(kept))) == kept
    with pytest.raises(HoneError, match="no row to train on"):
        Stream(stores(tmp_path), lambda r, s: [], seed=1, buffer=3).take(1)


def test_the_length_is_an_estimate_that_becomes_exact(tmp_path):
    source = stream(tmp_path)
    assert len(source) == 20  # small files are counted
    path = tmp_path / "big.jsonl"
    path.write_text("".join(json.dumps({"n": i, "pad": "x" * (50 + i % 9)}) + "\n" for i in range(5000)))
    big = Stream([RowStore(place=File(path=path))], numbers, seed=0, buffer=500)
    assert abs(len(big) - 5000) < 250
    big.take(5001)
    assert len(big) == 5000
    assert big.epoch == pytest.approx(1 + 1 / 5000)
    assert big.progress() == {"epoch": big.epoch}
    listed = tmp_path / "big.json"
    listed.write_text(json.dumps([{"n": i} for i in range(5000)]))
    assert len(Stream([RowStore(place=File(path=listed))], numbers, seed=0)) == 5000


def test_only_the_buffer_is_in_memory(tmp_path):
    class Counted:
        alive = most = 0

        def __init__(self):
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)

        def __del__(self):
            Counted.alive -= 1

    place = Memory(rows=[{"n": i} for i in range(1000)])
    source = Stream([RowStore(place=place)], lambda r, s: [Counted()], seed=0, buffer=50)
    for _ in range(3000):
        source.take(1)
    assert Counted.most <= 101  # a window, and the one before it until it is dropped
