"""Ctrl-C, SIGTERM and a kill at any moment: the run stops, says how to go on, and what it saved is whole."""

import contextlib
import io
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience
from small import (
    Wire,
    World,
    arguments,
    assert_same_run,
    contents,
    interrupt,
    metrics,
    recipe,
    start_hone,
    temporary,
    watched,
)

import hone
from hone.cli import main
from hone.errors import Interrupted
from hone.launch.signals import Stopper
from hone.storage.files import checkpoints, latest

torch.set_num_threads(1)


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read stderr until the text comes."""
    assert process.stderr is not None
    read = ""
    while text not in read:
        line = process.stderr.readline()
        assert line, f"the process ended before {text!r}: {read}"
        read += line
    return read


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    assert process.stderr is not None
    err = process.stderr.read()  # communicate would lose what readline has read ahead
    return process.wait(), err.splitlines()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command; ends it with the test, whatever happened."""
    with ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[str]:
            process = stack.enter_context(start_hone(*command))
            stack.callback(process.kill)
            return process

        yield start


# --- a process of its own ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_says_how_to_resume(number: signal.Signals, start, world: World, tmp_path: Path):
    out = tmp_path / "run"
    command = arguments(recipe(world, "grpo", out, "train.steps=100000"), world)
    process = start(*command)
    wait_for(process, " 3/100000")
    process.send_signal(number)
    code, err = finish(process)
    assert code == 130
    assert err[-1] == f"hone: interrupted; the run is saved: continue it with `hone resume {out}`"
    again = {signal.SIGINT: "Ctrl-C again", signal.SIGTERM: "a second signal"}[number]
    assert err.count(f"stopping: saves after this step; {again} ends at once") == 1
    assert process.stdout is not None
    assert "stopping" not in process.stdout.read()
    saved = latest(out / "checkpoints")
    assert saved is not None
    assert temporary(out) == []
    step = metrics(out)[-1]["step"]
    assert saved.name == f"step-{step:06d}"

    longer = recipe(world, "grpo", out, f"train.steps={step + 2}")
    assert main([*arguments(longer, world), "--resume"]) == 0
    hone.run(recipe(world, "grpo", tmp_path / "whole", f"train.steps={step + 2}"))
    assert_same_run(tmp_path / "whole", out, step=step + 2)


def test_two_signals_at_once_break_nothing(start, world: World, tmp_path: Path):
    out = tmp_path / "run"
    command = [*arguments(recipe(world, "sft", out, "train.steps=100000"), world), "save.every=1"]
    process = start(*command)
    wait_for(process, " 5/100000")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, err = finish(process)
    assert code == 130
    assert err[-1].endswith(f"continue it with `hone resume {out}`")
    assert "Traceback" not in "\n".join(err)
    assert all(latest(out / "checkpoints") == path for path in list(checkpoints(out / "checkpoints").values())[-1:])
    assert temporary(out) == []


def test_a_kill_leaves_a_run_that_goes_on(start, world: World, tmp_path: Path):
    out = tmp_path / "run"
    command = arguments(recipe(world, "dpo", out, "train.steps=100000"), world)
    process = start(*command, "save.every=2", "save.keep=2")
    wait_for(process, " 6/100000")
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    saved = latest(out / "checkpoints")
    assert saved is not None
    steps = int(saved.name.removeprefix("step-")) + 3
    longer = recipe(world, "dpo", out, f"train.steps={steps}")
    assert main([*arguments(longer, world), "--resume"]) == 0
    assert temporary(out) == []
    hone.run(recipe(world, "dpo", tmp_path / "whole", f"train.steps={steps}"))
    assert_same_run(tmp_path / "whole", out, step=steps)


# --- in this process, at chosen moments ---


def run_with(wire: Wire, monkeypatch: pytest.MonkeyPatch, *command: str) -> tuple[int, list[str]]:
    code = watched(lambda: main(command), wire, monkeypatch)
    return code, wire.getvalue().splitlines()


def twice() -> None:
    interrupt()
    interrupt()


def test_the_second_signal_ends_the_run_at_the_last_checkpoint(world: World, tmp_path: Path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, "grpo", whole))
    command = arguments(recipe(world, "grpo", cut), world)
    code, err = run_with(Wire(3, 4, twice), monkeypatch, *command, "save.every=2")
    assert (code, err[-1]) == (130, f"hone: interrupted; the run is saved: continue it with `hone resume {cut}`")
    assert list(checkpoints(cut / "checkpoints")) == [2]
    hone.resume(cut)
    assert_same_run(whole, cut, step=4)


def test_the_second_signal_before_any_checkpoint_says_that_nothing_is_saved(world: World, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    code, err = run_with(Wire(3, 4, twice), monkeypatch, *arguments(recipe(world, "sft", out), world))
    assert (code, err[-1]) == (130, "hone: interrupted; nothing new was saved")
    assert hone.run(recipe(world, "sft", out)).is_dir()


@pytest.mark.parametrize("call", range(1, 12))
def test_the_second_signal_while_saving_leaves_the_one_before(call: int, world: World, tmp_path: Path, monkeypatch):
    """The first one asks for a checkpoint; the second comes at the call-th file that is made safe on the disk."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, "sft", whole))
    made = recipe(world, "sft", cut, "save.every=2")
    synced, armed, fsync = [0], [False], os.fsync

    def arm() -> None:
        armed[0] = True
        interrupt()

    def impatient(handle: int) -> None:
        fsync(handle)
        synced[0] += armed[0]
        if synced[0] == call:
            interrupt()

    monkeypatch.setattr(os, "fsync", impatient)
    with pytest.raises(Interrupted):
        watched(lambda: hone.run(made), Wire(3, 4, arm), monkeypatch)
    monkeypatch.setattr(os, "fsync", fsync)
    assert synced[0] >= call
    assert temporary(cut) == []
    kept = checkpoints(cut / "checkpoints")
    assert list(kept) in ([2], [2, 3])
    assert latest(cut / "checkpoints") == list(kept.values())[-1]
    hone.resume(cut)
    assert_same_run(whole, cut, step=4)


def test_a_signal_in_the_last_step_is_the_end_of_the_run(world: World, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    code, _ = run_with(Wire(4, 4, interrupt), monkeypatch, *arguments(recipe(world, "sft", out), world))
    assert code == 0
    assert list(checkpoints(out / "checkpoints")) == [4]


def test_ctrl_c_in_the_first_step_twice_leaves_nothing(world: World, tmp_path: Path, capsys):
    out = tmp_path / "new" / "run"
    (tmp_path / "rude.py").write_text(
        "import os, signal\n\ndef rude(completion):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    command = arguments(recipe(world, "grpo", out, f"reward={tmp_path / 'rude.py'}:rude"), world)
    assert main([*command, "train.reward_apart=never"]) == 130  # in a process of its own it would end that one
    assert capsys.readouterr().err.splitlines()[-1] == "hone: interrupted; nothing new was saved"
    assert not (tmp_path / "new").exists()


# --- the stopper alone ---


def test_handlers_are_put_back(monkeypatch):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with Stopper() as stopper:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with stopper.gently():
            assert not stopper.asked
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopper.asked
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # what is tidied up is tidied up
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_first_signal_is_answered_at_once(capfd):
    with Stopper() as stopper, stopper.gently():
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == "stopping: saves after this step; Ctrl-C again ends at once\n"
    with Stopper(says=False) as stopper, stopper.gently():
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.asked
    assert capfd.readouterr().err == ""


def test_a_signal_that_is_told_twice_is_one():
    with Stopper(patience=60.0) as stopper, stopper.gently():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):  # by the terminal, and by torchrun
            os.kill(os.getpid(), number)
        assert stopper.asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "place",
    [
        "hone.launch.train.prepare",
        "hone.launch.job.write_settings",
        "hone.launch.job.files.save_folder",
    ],
)
def test_a_signal_before_the_first_step_leaves_nothing(place: str, number, world: World, tmp_path: Path, capsys):
    out = tmp_path / "new" / "run"
    target, name = place.rsplit(".", 1)
    owner = pkgutil.resolve_name(target)
    function = getattr(owner, name)

    def struck(*arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        os.kill(os.getpid(), number)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, struck)
        assert main(arguments(recipe(world, "sft", out), world)) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == "hone: interrupted; nothing new was saved"
    assert not (tmp_path / "new").exists()


def test_a_run_whose_removal_was_cut_short_can_be_started(world: World, tmp_path: Path, monkeypatch):
    """A first step that fails leaves nothing; where the process is killed while it tidies up, something."""
    out, made = tmp_path / "run", recipe(world, "sft", tmp_path / "run")
    rmtree = shutil.rmtree

    def killed(path: Path, **named: Any) -> None:
        if path.name == "start":
            raise KeyboardInterrupt
        rmtree(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr("hone.launch.train._train", fails)
        patch.setattr("hone.checkpoint.run_folder.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            hone.run(made)
    assert (out / "start").is_dir()
    hone.run(made)
    hone.run(recipe(world, "sft", tmp_path / "whole"))
    assert_same_run(tmp_path / "whole", out, step=4)


def fails(*_: Any) -> Path:
    raise RuntimeError("the cable")


def test_a_run_in_a_thread_needs_no_handlers(world: World, tmp_path: Path):
    done = list[Path]()
    thread = threading.Thread(target=lambda: done.append(hone.run(recipe(world, "sft", tmp_path / "run"))))
    thread.start()
    thread.join(timeout=patience(60))
    assert len(contents(done[0])) > 5


# --- nobody at the other end ---


def test_a_terminal_that_is_closed_saves_the_run(start, world: World, tmp_path: Path):
    out = tmp_path / "run"
    process = start(*arguments(recipe(world, "sft", out, "train.steps=100000"), world))
    wait_for(process, " 3/100000")
    process.send_signal(signal.SIGHUP)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait() == 130
    (saved,) = checkpoints(out / "checkpoints")
    assert saved == metrics(out)[-1]["step"]
    assert temporary(out) == []


def test_a_pipe_that_nobody_reads_saves_the_run(world: World, tmp_path: Path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, s: str, /) -> int:
            if " 2/4 " in s:
                raise BrokenPipeError(32, "Broken pipe")
            return len(s)

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(Interrupted):
        hone.run(recipe(world, "sft", tmp_path / "run"))
    assert list(checkpoints(tmp_path / "run/checkpoints")) == [2]


def test_an_error_that_a_library_made_of_ctrl_c_is_ctrl_c(world: World, tmp_path: Path, monkeypatch, capsys):
    def imports(*_: Any) -> Any:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise AttributeError("module 'numpy' has no attribute 'multiply'") from None

    monkeypatch.setattr("hone.launch.train.join_ranks", imports)
    assert main(arguments(recipe(world, "sft", tmp_path / "run"), world)) == 130
    assert capsys.readouterr().err == "hone: interrupted; nothing new was saved\n"


def test_ctrl_c_that_a_library_has_swallowed_ends_the_command_before_it_begins(
    world: World, tmp_path: Path, monkeypatch, capsys
):
    def swallows(*_: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            interrupt()
        return contextlib.nullcontext()

    monkeypatch.setattr("hone.launch.train.join_ranks", swallows)
    assert main(arguments(recipe(world, "sft", tmp_path / "run"), world)) == 130
    assert capsys.readouterr().err == "hone: interrupted; nothing new was saved\n"
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    hone.run(recipe(world, "sft", tmp_path / "run"))


def test_a_forked_process_is_ended_by_a_signal_as_any_other():
    read, write = os.pipe()
    with Stopper() as stopper, stopper.gently():
        child = os.fork()
        if not child:
            os.write(write, b".")
            time.sleep(20)
            os._exit(0)
        os.read(read, 1)  # Python forgets what comes while it forks
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stopper.asked
