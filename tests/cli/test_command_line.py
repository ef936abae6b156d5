"""What every command shares: help whose examples can be typed, suggestions, and streams of any kind."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from each import each

from hone.cli import _parse, build_parser, explain, main
from hone.commands.command import EXAMPLES, Parser
from hone.config.overrides import from_yaml
from hone.config.recipe import Recipe
from hone.data.corpus.overlap import read_items
from hone.data.feed.source import read_rows
from hone.errors import HoneError
from hone.reward.verify.structure import grammar, schema


def parsers(parser: Parser) -> Iterator[Parser]:
    """It and all commands and actions under it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from parsers(sub)


ALL = list(parsers(build_parser()))


@each("parser", ALL, ids=lambda parser: parser.prog)
def test_each_help_describes_itself_and_all_it_takes(parser: Parser):
    text = parser.format_help()
    assert parser.description
    assert parser.description[0].isupper()
    assert "--debug" in text
    assert not parser.allow_abbrev
    for action in parser._actions:
        assert action.help or action.metavar in ("COMMAND", "ACTION"), f"{parser.prog}: {action.dest} has no help"
        if action.nargs != 0 and action.option_strings and action.choices is None:
            assert action.metavar, f"{parser.prog}: {action.dest} has no name for its value"


@each("parser", [p for p in ALL if "hone " in p.prog], ids=lambda parser: parser.prog)
def test_the_examples_of_a_help_can_be_typed(parser: Parser):
    lines = [line for line in (parser.epilog or "").partition(EXAMPLES)[2].splitlines() if line.strip()]
    leaf = not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    assert bool(lines) == leaf
    for line in lines:
        words = shlex.split(line)
        assert _parse(words[words.index("hone") + 1 :]).parser.prog == parser.prog
        assert line.rstrip() in parser.format_help()


def test_examples_stay_on_their_lines_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = build_parser().format_help()
    assert "  hone run grpo train.steps=200               a recipe with one setting changed\n" in text
    options = text.partition(EXAMPLES)[0].splitlines()
    assert max(map(len, options)) <= 40


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chta", "m"], "hone: error: no command 'chta'; did you mean 'chat'? there are demo, run"),
        (
            ["chat", "m", "--temprature", "0"],
            "hone chat: error: no option '--temprature'; did you mean '--temperature'?",
        ),
        (["chat", "m", "--temp=0"], "no option '--temp'; did you mean '--temperature'"),
        (["--versoin"], "hone: error: no option '--versoin'; did you mean '--version'? hone has --help, --debug"),
        (["corpus", "clena"], "hone corpus: error: no action 'clena'; did you mean 'clean'? there are clean, overlap"),
        (
            ["corpus", "clean", "x", "--out", "y", "--naer", "1"],
            "hone corpus clean: error: no option '--naer'; did you",
        ),
        (["serve", "m", "--dtype", "bfloat61"], "no value 'bfloat61'; did you mean 'bfloat16'"),
        (["run", "grpo", "--train.steps=3"], "no option '--train.steps'; hone run has --help, --debug, --config"),
        (["run", "grpo", "--train.steps=3"], "; a setting is written train.steps=3"),
        (["recipes", "grpo", "extra"], "hone recipes: error: 'extra' is one argument too many"),
        (["run"], "the following arguments are required: RECIPE\n"),
    ],
)
def test_a_name_that_does_not_exist_is_told_the_nearest(capsys, arguments: list[str], says: str):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_debug_may_stand_behind_an_action(capsys, tmp_path: Path):
    assert main(["plan", "scaling", "--flops", "1e21", "--law", "none", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def shell(line: str, **environment: str) -> tuple[int, str, str]:
    """Of `hone` in a shell: exit code, stdout, stderr."""
    env = {**os.environ, **environment, "HONE": f"{sys.executable} -m hone"}
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_streams_that_are_closed_or_full():
    assert shell("$HONE recipes <&- >&- 2>&-")[0] == 0
    assert shell("$HONE algos nothing 2>&-") == (2, "", "")
    code, _, err = shell("$HONE recipes >/dev/full")
    assert (code, err) == (
        2,
        "hone: error: the output cannot be written (No space left on device): send it elsewhere\n",
    )
    code, _, err = shell("$HONE plan scaling --flops 1e21 >/dev/full")
    assert (code, err.count("\n"), "elsewhere" in err) == (2, 1, True)


def test_an_encoding_without_a_character_shows_it_escaped(tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "one.py").write_text('"""Größe."""\n', encoding="utf-8")
    plain = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    code, out, err = shell(f"cd {tmp_path} && $HONE recipes", **plain)
    assert (code, err) == (0, "")
    assert re.search(r"(?m)^one +Gr\\xf6\\xdfe\.$", out)


def test_the_remedy_of_a_full_disk_is_the_commands_own():
    full = OSError(28, "No space left on device", "x")
    assert explain(full, run=False) == (2, "error: x: No space left on device; free some space, then try again")
    assert "continue with `hone resume RUN_DIR`" in explain(full)[1]


@pytest.mark.parametrize(
    "read",
    [
        lambda path: from_yaml(path, Recipe()),
        schema,
        grammar,
        lambda path: read_items(str(path)),
        lambda path: read_rows(path.rename(path.with_suffix(".json"))),
    ],
)
def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, read: Callable[[Path], object]):
    path = tmp_path / "one.txt"
    path.write_bytes(b"one\ntwo\nthr\xffee")
    with pytest.raises(HoneError, match=r"one\.(txt|json) (line 3 )?is not UTF-8( \(line 3\))?: save the file as"):
        read(path)


def test_a_report_leaves_out_a_line_that_a_crash_cut(tmp_path: Path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "note": "caf\xc3')
    assert main(["report", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "report.html"
