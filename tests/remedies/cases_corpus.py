"""Corpora, evaluations and servers' options that commands refuse, and what each message asks for."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remedy_world import Case, World, call, command, given, lacks, typed

from hone.data.corpus import filters, language
from hone.data.corpus.atomic import locked
from hone.data.corpus.duplicates import _minhash
from hone.data.corpus.pipeline import clean
from hone.data.corpus.settings import CorpusSettings

QUICK = ("--languages", "off", "--toxicity", "off", "--near", "off", "--no-quality", "--workers", "1")


def cleaned(world: World, *words: str, out: str = "") -> str:
    out = out or world.new()
    typed(world, "corpus", "clean", "--out", out, *QUICK, *words)
    return out


def corpus(wrong: Callable[[World], str], right: Callable[[World], str], says: str, *more: str) -> Case:
    """A source of texts."""
    return given(lambda w, source: cleaned(w, source(w), *more), wrong, right, says)


def _folder(world: World, name: str) -> str:
    folder = Path(world.new())
    folder.mkdir()
    (folder / name).write_text('{"text": "a b c"}\n')
    return str(folder)


def _spoilt(world: World, content: str, *more: str) -> None:
    """Clean, spoil what says how it was done, and clean again."""
    out = cleaned(world, world / "text.jsonl")
    Path(out, "manifest.json").write_text(content)
    cleaned(world, world / "text.jsonl", *more, out=out)


def _locked(world: World, *, other: bool) -> None:
    folder = Path(world.new())
    with locked(folder):
        cleaned(world, world / "text.jsonl", out=world.new() if other else str(folder))


def _cached(function: Any) -> Any:
    function.cache_clear()
    return function()


def texts(world: World) -> str:
    return world / "text.jsonl"


CORPORA = [
    corpus(lambda w: _folder(w, "a.pdf"), lambda w: _folder(w, "a.jsonl"), "convert the data to JSON lines"),
    corpus(lambda w: w.file("", ".pdf"), texts, "one document a line"),
    corpus(
        lambda w: w.file(b"\x1f\x8bx", ".jsonl.gz"),
        lambda w: w.file(gzip.compress(b'{"text": "a"}'), ".jsonl.gz"),
        "copy it",
    ),
    given(lambda w, more: cleaned(w, texts(w), *more(w)), lambda w: [texts(w)], lambda w: [], "belongs to one source"),
    corpus(lambda w: w.file("{\n", ".jsonl"), texts, "repair it", "--strict"),
    given(
        lambda w, more: cleaned(w, w.file("{\n" + '{"text": "a b"}', ".jsonl"), *more),
        ["--strict"],
        [],
        "leave out --strict",
    ),
    given(lambda w, name: cleaned(w, texts(w), "--eval", name), "nothing", "WORLD/answers.jsonl", "a name like gsm8k"),
    given(
        lambda w, field: cleaned(w, texts(w), "--eval", w / "answers.jsonl", "--eval-field", field),
        "x",
        "prompt",
        "name another with --eval-field",
    ),
    given(
        lambda w, column: typed(
            w, "corpus", "overlap", w / "problems.jsonl", "--eval", texts(w), "--column", column, "--workers", "1"
        ),
        "text",
        "prompt",
        "name the text's column with --column",
    ),
    given(lambda w, rules: CorpusSettings(rules=rules), {"x": 1}, {"min_words": 1}, "choose from"),
    given(lambda w, near: CorpusSettings(near=near), 2.0, 1.0, "give a number above 0 and up to 1"),
    given(lambda w, n: CorpusSettings(ngram=n), 0, 1, "give a whole number of at least 1"),
    given(lambda w, n: cleaned(w, texts(w), "--workers", n), "0", "1", "give at least 1"),
    call(
        lambda w: clean([], Path(w.new()), CorpusSettings(languages=(), toxicity=None, near=None)),
        lambda w: cleaned(w, texts(w)),
        "name at least one file",
    ),
    call(lambda w: _spoilt(w, "{"), lambda w: _spoilt(w, "{", "--restart"), "start it anew with --restart"),
    call(lambda w: _spoilt(w, "[]"), lambda w: _spoilt(w, "[]", "--restart"), "start it anew with --restart"),
    call(lambda w: _locked(w, other=False), lambda w: _locked(w, other=True), "or choose another folder"),
    lacks("rensa", lambda w: _cached(_minhash), "or --near off"),
    lacks("py3langid", lambda w: _cached(language._identifier), "or --languages off"),
    lacks("profanity_check", lambda w: _cached(filters._toxicity_model), "or --toxicity off"),
    lacks("rensa", lambda w: cleaned(w, texts(w), "--near", "0.9"), "or switch the steps off with --near off"),
]
EVALUATIONS = [
    command(
        "eval WORLD/model WORLD/problems.jsonl --max-tokens 0",
        "eval WORLD/model WORLD/problems.jsonl --max-tokens 1",
        "set it to 1 or more, or leave --max-tokens out",
    ),
    command(
        "eval WORLD/model WORLD/problems.jsonl --judge my.yaml --max-tokens 2",
        "eval WORLD/model WORLD/problems.jsonl --judge WORLD/scorer --max-tokens 2 --samples 2",
        "--judge takes the folder of a reward or process model",
    ),
    command(
        "eval WORLD/model WORLD/problems.jsonl --judge WORLD/scorer --beams 2 --samples 2 --max-tokens 2",
        "eval WORLD/model WORLD/problems.jsonl --judge WORLD/scorer --samples 2 --max-tokens 2",
        "or leave them out",
    ),
    command(
        "eval WORLD/model WORLD/problems.jsonl --judge WORLD/judge --beams 4 --samples 2 --max-tokens 2",
        "eval WORLD/model WORLD/problems.jsonl --judge WORLD/judge --beams 2 --samples 4 --max-tokens 2",
        "set --samples to a multiple of --beams",
    ),
    command(
        "eval WORLD/model WORLD/problems.jsonl --judge WORLD/judge --by best --max-tokens 2",
        "eval WORLD/model WORLD/problems.jsonl --judge WORLD/judge --by mean --max-tokens 2 --samples 2",
        "use one of min",
    ),
    command(
        "eval WORLD/model WORLD/problems.jsonl --max-tokens 2 --reward WORLD/rewards.py:raises",
        "eval WORLD/model WORLD/problems.jsonl --max-tokens 2 --reward WORLD/rewards.py:length",
        "mend the reward function",
    ),
    command(
        "rewards test WORLD/problems.jsonl --reward WORLD/rewards.py:length",
        "rewards test WORLD/problems.jsonl --reward math",
        "correct those, or the reward",
    ),
    command(
        "rewards test WORLD/problems.jsonl --reward model:WORLD/scorer",
        "rewards test WORLD/problems.jsonl --reward math",
        "name a verifier or FILE.py:function",
    ),
]
CORPUS: list[Case] = [*CORPORA, *EVALUATIONS]
