"""Every parser of outside bytes, for a second each: the corpus, then inputs made from it by chance.

`make fuzz` goes on for a minute each, guided by coverage.
"""

import time

import pytest

from tests.fuzz.run import CORPUS, by_chance
from tests.fuzz.targets import TARGETS

SEVEN = ("gguf", "safetensors", "jsonl", "tokenizer", "template", "maths", "sandbox")


@pytest.mark.parametrize("name", TARGETS)
def test_only_what_is_documented_comes_out_of(name):
    assert by_chance(name, 1.0 if name in SEVEN else 0.5) > 0


def test_every_target_has_a_corpus_of_small_files():
    assert {path.name for path in CORPUS.iterdir()} == {*TARGETS}
    for path in CORPUS.rglob("*"):
        assert path.is_dir() or 0 < path.stat().st_size < 100_000, f"{path} is no small input"


def test_a_fault_is_told_with_the_input_that_caused_it(monkeypatch, tmp_path):
    def broken(data: bytes) -> None:
        if b"\xff" in data:
            raise ZeroDivisionError("a byte too large")

    monkeypatch.setitem(TARGETS, "jsonl", broken)
    monkeypatch.setattr("tests.fuzz.run.BROKEN", tmp_path)
    with pytest.raises(AssertionError, match="ZeroDivisionError: a byte too large") as caught:
        by_chance("jsonl", 30.0)
    (found,) = tmp_path.iterdir()
    assert str(found) in str(caught.value)
    assert b"\xff" in found.read_bytes()


def test_an_input_that_takes_for_ever_is_a_fault(monkeypatch, tmp_path):
    monkeypatch.setitem(TARGETS, "jsonl", lambda data: time.sleep(60))
    monkeypatch.setattr("tests.fuzz.run.BROKEN", tmp_path)
    monkeypatch.setattr("tests.fuzz.run.PATIENCE", 1)
    with pytest.raises(AssertionError, match="TooSlow"):
        by_chance("jsonl", 1.0)
