import os
import re
import resource
import subprocess
import sys

import pytest

from hone.cli import main
from hone.config.load import load_recipe

RECIPE = "from hone.config.recipe import ModelSpec, Recipe\n\ndef recipe():\n    {body}\n"
VALID = 'return Recipe(data="d.jsonl", model=ModelSpec(path="m"), reward="math")'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def hone(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_recipe(folder, body=VALID):
    (folder / "r.py").write_text(RECIPE.format(body=body))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["help"], ["help", "run"], ["run", "--help"], ["demo", "--help"]])
def test_help_does_not_import_torch(arguments):
    code = f"import sys; from hone.cli import main\ntry: main({arguments})\nfinally: print('torch' in sys.modules)"
    done = run_python(code)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("usage: hone")
    assert done.stdout.splitlines()[-1] == "False"


def test_help_is_there_in_three_tenths_of_a_second():
    def seconds() -> float:
        """Of the processor: those of the clock are others' too."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "hone", "run", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3


def test_listing_and_refusing_do_not_import_torch(folder):
    code = (
        "import sys; from hone.cli import main\n"
        "codes = main(['recipes']), main(['run', 'absent.py']), main(['resume', 'absent'])\n"
        "print(codes, 'torch' in sys.modules)"
    )
    assert run_python(code).stdout.splitlines()[-1] == "(0, 2, 2) False"


def test_no_command_shows_the_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "hone demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["run"],
        ["run", "r.py", "--resum"],
        ["run", "r.py", "--steps=3"],
        ["eval", "m"],
        ["eval", "m", "d", "x=1"],
        ["eval", "m", "d", "--samples", "many"],
        ["recipes", "grpo", "extra"],
    ],
)
def test_a_wrong_command_line_exits_with_two(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "arguments", "says"),
    [
        (VALID, ["train.stpes=3"], "did you mean 'train.steps'"),
        (VALID, ["train.steps=many"], "expected a whole number"),
        (VALID, ["--config", "absent.yaml"], "no file absent.yaml"),
        (VALID, ["train.steps=0"], "at least 1"),
        (VALID, ["seed=1", "--resume", "sead=2"], "did you mean 'seed'"),
        ("return Recipe()", [], "there is no data"),
        ("return 3", [], "returned int"),
        ("raise OSError(28, 'No space left on device', 'runs/x')", [], "runs/x: No space left on device; free some"),
        ("raise PermissionError(13, 'Permission denied', 'runs')", [], "runs: Permission denied; choose a folder"),
        ("raise OSError('strange')", [], "strange"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_exit_two(folder, capsys, body, arguments, says):
    write_recipe(folder, body)
    code, out, err = hone(capsys, "run", "r.py", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("hone: error: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_bug_is_one_line_and_exit_one(folder, capsys):
    write_recipe(folder, "raise RuntimeError('two\\nlines')")
    code, _, err = hone(capsys, "run", "r.py")
    assert code == 1
    assert "RuntimeError: two lines" in err
    assert "--debug" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "run", "r.py"], ["run", "r.py", "--debug"]])
def test_debug_shows_the_traceback_as_well(folder, capsys, arguments):
    write_recipe(folder, "raise KeyError('x')")
    code, _, err = hone(capsys, *arguments)
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("hone: error: KeyError")


def test_an_interrupted_run_says_how_to_resume(folder, capsys):
    write_recipe(folder, "from hone.errors import Interrupted; raise Interrupted('runs/x')")
    code, _, err = hone(capsys, "run", "r.py")
    assert code == 130
    assert "`hone resume runs/x`" in err
    assert "error" not in err


def test_ctrl_c_before_the_run_is_no_traceback(folder, capsys):
    write_recipe(folder, "raise KeyboardInterrupt")
    code, _, err = hone(capsys, "run", "r.py")
    assert (code, err.count("\n")) == (130, 1)


def test_settings_come_after_the_file_and_may_stand_anywhere(folder, capsys):
    write_recipe(folder, "return Recipe()")
    (folder / "s.yaml").write_text("data: d.jsonl\nmodel.path: m\nseed: 1\n")
    code, _, err = hone(capsys, "run", "r.py", "seed=-7", "--config", "s.yaml", "name=x")
    assert code == 2
    assert "seed is -7" in err


def test_the_algorithms_are_listed_from_their_signatures(capsys):
    from hone.algo import ALGORITHMS
    from hone.config.overrides import settings_of

    code, out, _ = hone(capsys, "algos")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[: len(ALGORITHMS)]] == list(ALGORITHMS)
    for name, factory in ALGORITHMS.items():
        code, out, _ = hone(capsys, "algos", name)
        assert code == 0
        assert out.splitlines()[0].removeprefix(f"{name}: ")
        shown = [line.partition("=")[0].strip() for line in out.splitlines() if line.startswith("  algo.")]
        assert shown == [f"algo.{setting}" for setting in settings_of(factory)]
        assert shown or "(no settings)" in out


def test_a_misspelt_algorithm_is_suggested(capsys):
    code, _, err = hone(capsys, "algos", "dappo")
    assert code == 2
    assert "did you mean 'dapo'" in err


def test_the_recipes_of_the_folder_are_listed(folder, capsys):
    (folder / "recipes").mkdir()
    (folder / "recipes" / "one.py").write_text('"""The first."""\n')
    code, out, _ = hone(capsys, "recipes")
    assert code == 0
    assert re.search(r"(?m)^one +The first\.$", out)
    assert re.search(r"(?m)^grpo +GRPO", out)


def test_a_recipe_is_printed_to_begin_ones_own_with(folder, capsys):
    code, out, _ = hone(capsys, "recipes", "sft-lora")
    assert code == 0
    (folder / "mine.py").write_text(out)
    assert load_recipe("mine.py")().name == "sft_lora"


def test_a_closed_pipe_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "hone", "algos"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
