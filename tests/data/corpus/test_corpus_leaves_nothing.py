"""What a cleaning run that did not end well leaves: nothing, or what it goes on from, never half a corpus."""

import json
import sys
from pathlib import Path

import pytest
from prose import files, prose, write

from hone.cli import main
from hone.data.corpus.pipeline import clean
from hone.data.corpus.settings import CorpusSettings
from hone.errors import HoneError

MODULES = {"--languages": "py3langid", "--toxicity": "profanity_check", "--near": "rensa"}


def test_a_missing_package_is_said_before_anything_is_written(tmp_path: Path, monkeypatch, capsys):
    source = write(tmp_path / "a.jsonl", [prose(0), prose(1)])
    out = tmp_path / "deep" / "out"
    for option, module in MODULES.items():
        words = ["corpus", "clean", source, "--out", str(out), "--workers", "1"]
        words += [] if option == "--toxicity" else ["--toxicity", "off"]  # whose package takes seconds to import
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert main(words) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert 'pip install "hone[corpus]", or switch the steps off with ' + f"{option} off" in line
            assert not (tmp_path / "deep").exists(), option
            assert main([*words, option, "off"]) == 0  # the other half of the remedy
            capsys.readouterr()
            assert (out / "report.json").exists()
        for path in sorted((tmp_path / "deep").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (tmp_path / "deep").rmdir()


def test_all_missing_packages_are_named_at_once(tmp_path: Path, monkeypatch):
    for module in MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HoneError, match="cleaning needs py3langid, alt-profanity-check, rensa: pip install"):
        clean([write(tmp_path / "a.jsonl", [prose(0)])], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_its_input_stopped_leaves_nothing_and_its_remedy_works_at_once(tmp_path: Path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"body": prose(0)}) + "\nnot JSON\n" + json.dumps({"body": prose(1)}) + "\n")
    out = tmp_path / "out"
    words = ["corpus", "clean", str(source), "--out", str(out), "--workers", "1", "--no-quality", "--toxicity", "off"]
    assert main(words) == 2
    assert "name its column with --column" in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--column", "body", "--strict"]) == 2
    assert "or leave out --strict" in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--column", "body"]) == 0


def test_a_folder_with_other_files_is_left_as_it_was(tmp_path: Path):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data" / "mine.txt").write_text("mine")
    with pytest.raises(HoneError, match="holds other files: choose an empty folder"):
        clean([write(tmp_path / "a.jsonl", [prose(0)])], out)
    assert [path.name for path in out.rglob("*")] == ["data", "mine.txt"]


def test_a_wrong_source_makes_no_folder(tmp_path: Path):
    for source in ("absent", str(tmp_path / "a.pdf")):
        (tmp_path / "a.pdf").write_text("x")
        with pytest.raises(HoneError):
            clean([source], tmp_path / "out")
        assert not (tmp_path / "out").exists()


class Stopped(BaseException):
    """Ends the run where it stands."""


def test_a_run_that_was_stopped_while_writing_has_no_data_folder_yet_and_goes_on(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [prose(k) for k in range(30)])
    settings, out = CorpusSettings(shard_bytes=4_000, toxicity=None), tmp_path / "out"

    def stop(message: str) -> None:
        if message.startswith("write: 2 of"):
            raise Stopped

    with pytest.raises(Stopped):
        clean([source], out, settings, say=stop)
    assert (out / "manifest.json").exists()
    assert not (out / "data").exists()
    assert not (out / "report.json").exists()
    clean([source], out, settings)
    clean([source], tmp_path / "whole", settings)
    assert files(out) == files(tmp_path / "whole")
