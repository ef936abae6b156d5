"""hone corpus, as typed."""

import json

import pytest
from prose import kept, prose, write

from hone.cli import main


def test_clean_and_overlap(tmp_path, capsys):
    question = prose(9000, 24).replace("\n", " ")
    source = write(tmp_path / "a.jsonl", [prose(0), prose(1), prose(0), f"{prose(2)} {question}", "It was short."])
    evals = write(tmp_path / "e.jsonl", [question])
    out = tmp_path / "out"
    words = ["corpus", "clean", source, "--out", str(out), "--eval", evals, "--drop-overlap", "--workers", "1"]
    assert main([*words, "--rule", "min_words=20", "--rule", "min_stop_words=off"]) == 0
    shown = capsys.readouterr()
    assert "duplicate:exact" in shown.out
    assert "filter: 1 of 1 shards" in shown.err
    assert kept(out) == [prose(0), prose(1)]
    assert json.loads((out / "manifest.json").read_text())["settings"]["rules"]["min_stop_words"] is None
    assert main(words) == 2  # other rules, same folder
    assert "other settings (rules.min_stop_words, rules.min_words): " in capsys.readouterr().err
    assert main([*words, "--near", "off"]) == 2  # a step less needs a library less
    assert "other settings (near, " in capsys.readouterr().err
    assert main(["corpus", "overlap", source, "--eval", evals, "--workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(p["overlap"], p["items"]) for p in found["pairs"]] == [(1, 1)]
    assert main(["corpus", "overlap", source, "--eval", evals, "--workers", "1"]) == 0
    assert "100.00%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--rule", "nonsense=1"],
        ["--rule", "min_words"],
        ["--rule", "min_words=x"],
        ["--near", "x"],
        ["--languages", "xx"],
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, capsys, words):
    source = write(tmp_path / "a.jsonl", [prose(0)])
    assert main(["corpus", "clean", source, "--out", str(tmp_path / "out"), *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_overlap_needs_a_worker(tmp_path, capsys):
    sources = [write(tmp_path / name, [prose(0)]) for name in ("a.jsonl", "b.jsonl")]
    assert main(["corpus", "overlap", *sources, "--eval", sources[0], "--workers", "0"]) == 2
    assert "workers is 0: give at least 1" in capsys.readouterr().err


def test_help_needs_no_torch(tmp_path):
    import subprocess
    import sys

    code = "import sys; from hone.data.corpus import pipeline, compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
