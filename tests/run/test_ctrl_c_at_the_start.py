"""A signal while a command starts: one line and exit code 128 + its number, whatever is being imported just then."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patience
from small import World, arguments, recipe

LINE = "hone: interrupted; nothing new was saved"
# `hone`, struck when it begins to import a module; some libraries swallow what is raised there
STRUCK = """
import os, signal, sys
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.{number})
from hone.__main__ import main
sys.meta_path.insert(0, Strike())
sys.argv = ["hone", *sys.argv[1:]]
sys.exit(main())
"""
POINTS = ("hone.cli", "yaml", "torch.nn")
LATER = (
    "hone.commands.corpus", "torch", "torch._C", "numpy", "torch.distributed", "safetensors", "tokenizers",
    "hone.launch.train", "hone.model.decoder", "hone.engine.engine", "hone.check.suite",
)  # fmt: skip


def started(*words: str, program: str = "") -> subprocess.Popen[str]:
    begin = ["-c", program] if program else ["-m", "hone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *begin, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def test_ctrl_c_during_an_import_is_one_line(world: World, tmp_path: Path):
    struck_at(POINTS, world, tmp_path)


@pytest.mark.slow
def test_ctrl_c_during_later_imports_is_one_line(world: World, tmp_path: Path):
    struck_at(LATER, world, tmp_path)


def test_sigterm_and_a_closed_terminal_at_the_start_are_one_line(world: World, tmp_path: Path):
    for number in (signal.SIGTERM, signal.SIGHUP):
        struck_at(("hone.cli", "torch.nn", "hone.engine.engine"), world, tmp_path, number=number)


def test_nohup_is_kept_to(world: World, tmp_path: Path):
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + STRUCK.format(
        name="yaml", number="SIGHUP"
    )
    process = started("algos", program=program)
    assert process.communicate(timeout=patience(60))[1] == ""
    assert process.returncode == 0


def struck_at(names: tuple[str, ...], world: World, folder: Path, *, number: signal.Signals = signal.SIGINT) -> None:
    command = arguments(recipe(world, "grpo", folder / "new" / "run", "train.steps=100000"), world)
    for name in names:
        process = started(*command, program=STRUCK.format(name=name, number=number.name))
        out, err = process.communicate(timeout=patience(60))
        assert (process.returncode, out) == (128 + number, ""), (name, err)
        assert [line for line in err.splitlines() if not line.startswith("small: ")] == [LINE], name
        assert not (folder / "new").exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "eval", "check", "algos"])
def test_ctrl_c_at_any_time_of_the_first_seconds(command: str, world: World, tmp_path: Path):
    made = arguments(recipe(world, "grpo", tmp_path / "new" / "run", "train.steps=100000"), world)
    words = {"run": made, "check": ["check", *made[1:]], "algos": ["algos"]}
    words["eval"] = ["eval", world / "model", world.data("problems")]
    for point in range(20):
        process = started(*words[command])
        time.sleep(0.15 * (point + 1))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=patience(60))
        if "hone" not in err and process.returncode not in (0, 130):  # Python itself has not started yet
            continue
        assert process.returncode in (130, 0), (point, err)
        assert "Traceback" not in err, (point, err)
        assert process.returncode == 0 or err.splitlines()[-1].startswith("hone: interrupted; "), (point, err)
