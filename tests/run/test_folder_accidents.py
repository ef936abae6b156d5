"""What happens to a run's folder while the run goes on: it ends with a line that says so, or all it needs is there."""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Wire, World, arguments, assert_same_run, contents, recipe, temporary, watched

import hone
from hone.cli import main
from hone.errors import HoneError
from hone.log import sinks
from hone.log.sinks import read
from hone.storage import names
from hone.storage.files import checkpoints

torch.set_num_threads(1)
GONE = "was removed, renamed or replaced while the run went on"


def gone(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)  # a checkpoint may be written there at the same time


def emptied(out: Path) -> None:
    gone(out)
    out.mkdir(exist_ok=True)


def renamed(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))


def a_copy(out: Path) -> None:
    """In its place, with all of its files."""
    renamed(out)
    shutil.copytree(out.with_name("elsewhere"), out)


def a_link(out: Path) -> None:
    renamed(out)
    shutil.copytree(out.with_name("elsewhere"), out.with_name("copy"))
    out.symlink_to(out.with_name("copy"))


def a_file(out: Path) -> None:
    renamed(out)
    out.write_text("")


@pytest.mark.parametrize("accident", [gone, emptied, renamed, a_copy, a_link, a_file], ids=lambda f: f.__name__)
def test_a_folder_that_is_no_longer_the_runs_ends_it(
    accident: Callable[[Path], None], world: World, tmp_path, monkeypatch
):
    for algo, step, settings in (("sft", 2, ("save.every=1",)), ("grpo", 4, ())):
        out = tmp_path / f"{algo}{step}" / "run"
        made = [*arguments(recipe(world, algo, out, "train.steps=5"), world), *settings]
        wire = Wire(step, 5, lambda out=out: accident(out))
        code = watched(lambda made=made: main(made), wire, monkeypatch)
        said = wire.getvalue().splitlines()[-1]
        assert (code, said.startswith("hone: error: "), "a bug in Hone" in said) == (2, True, False), said
        assert GONE in said or "could not save" in said, said
        assert not (out / "checkpoints/step-000005").exists()
        assert_saved_elsewhere(said, world, tmp_path / f"{algo}{step}" / "new")


def assert_saved_elsewhere(said: str, world: World, new: Path) -> None:
    """What the line names can be gone on from, and has the recipe beside it."""
    named = re.search(r"model\.path=(\S+)", said)
    assert named, said
    assert (Path(named[1]).parents[1] / "recipe.json").is_file()
    assert main([*arguments(recipe(world, "sft", new, "train.steps=1"), world), f"model.path={named[1]}"]) == 0


@pytest.mark.parametrize("step", [4, 5])
def test_a_renamed_run_goes_on_where_it_is(step: int, world: World, tmp_path: Path, monkeypatch):
    out, new = tmp_path / "run", tmp_path / "elsewhere"
    hone.run(recipe(world, "sft", tmp_path / "whole", "train.steps=5"))
    made = recipe(world, "sft", out, "train.steps=5", "save.every=1")
    with pytest.raises(HoneError):
        watched(lambda: hone.run(made), Wire(step, 5, lambda: renamed(out)), monkeypatch)
    hone.resume(new)
    assert_same_run(tmp_path / "whole", new, step=5)
    assert temporary(new) == []


def test_the_last_step_is_looked_at_too(world: World, tmp_path: Path, monkeypatch):
    """The folder goes when the last line is printed: the save that follows must not make one without settings."""
    out = tmp_path / "run"
    made = arguments(recipe(world, "sft", out), world)
    wire = Wire(4, 4, lambda: gone(out))
    assert watched(lambda: main(made), wire, monkeypatch) == 2
    assert "error: " in wire.getvalue().splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize(
    "names", [("config.json",), ("recipe.json",), ("config.json", "recipe.json"), ("metrics.jsonl",)]
)
def test_files_that_are_removed_are_written_again(names: tuple[str, ...], world: World, tmp_path: Path, monkeypatch):
    out, whole = tmp_path / "run", tmp_path / "whole"
    hone.run(recipe(world, "sft", whole, "train.steps=6"))

    def remove() -> None:
        for name in names:
            (out / name).unlink()

    made = recipe(world, "sft", out, "train.steps=5")
    wire = Wire(2, 5, remove)
    watched(lambda: hone.run(made), wire, monkeypatch)
    for name in names:
        assert f"step 3: {name} was removed" in wire.getvalue()
    if "metrics.jsonl" in names:
        assert [row["step"] for row in read(out / "metrics.jsonl")] == [3, 4, 5]
        return
    hone.resume(out, settings=["train.steps=6"])
    assert_same_run(whole, out, step=6)


def test_without_its_start_a_run_ends_with_what_it_learned_and_says_so(world: World, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    made = arguments(recipe(world, "sft", out), world)
    wire = Wire(2, 4, lambda: shutil.rmtree(out / "start"))
    assert watched(lambda: main(made), wire, monkeypatch) == 2
    said = wire.getvalue()
    assert said.count("without which the run cannot be resumed: copy it back\n") == 1
    assert "hone: error: the run is done, but " in said.splitlines()[-1]
    remedy = f"model.path={out / 'checkpoints/step-000004'}"
    assert main([*arguments(recipe(world, "sft", tmp_path / "new"), world), remedy]) == 0


def test_a_lock_that_was_removed_is_taken_again(world: World, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    seen = list[bool]()

    def remove() -> None:
        os.unlink(out / names.LOCK)

    def look() -> None:
        seen.append((out / names.LOCK).exists())

    wires = [Wire(2, 4, remove), Wire(4, 4, look)]

    class Both(Wire):
        def write(self, s: str, /) -> int:
            for wire in wires:
                wire.write(s)
            return super().write(s)

    watched(lambda: hone.run(recipe(world, "sft", out)), Both(99, 4, remove), monkeypatch)
    assert seen == [True]
    assert not (out / names.LOCK).exists()


def a_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def a_loose_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.with_name("nowhere") / "at all")


def a_full_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/full")


@pytest.mark.parametrize("accident", [a_pipe, a_folder, a_loose_link, a_full_device], ids=lambda f: f.__name__)
def test_what_takes_the_place_of_a_file_is_put_aside(
    accident: Callable[[Path], None], world: World, tmp_path: Path, monkeypatch
):
    hone.run(recipe(world, "grpo", tmp_path / "whole"))
    for name in ("metrics.jsonl", "samples.jsonl", "invalid.jsonl", "config.json", "recipe.json", names.LOCK):
        out = tmp_path / name / "run"
        wire = Wire(2, 4, lambda out=out, name=name: accident(out / name))
        watched(lambda out=out: hone.run(recipe(world, "grpo", out, "save.every=1")), wire, monkeypatch)
        assert f"warn: {name} is no file any more: what is there in its place is now {name}.aside-1" in wire.getvalue()
        assert contents(out / "checkpoints/step-000004") == contents(tmp_path / "whole/checkpoints/step-000004"), name
        hone.resume(out, settings=["train.steps=5"])
        assert read(out / "metrics.jsonl")[-1]["step"] == 5, name


def test_what_takes_the_place_of_the_checkpoints_is_put_aside(world: World, tmp_path: Path, monkeypatch):
    for accident in (a_pipe, a_loose_link, a_full_device, Path.touch):
        for step in (2, 4):  # 4: just before the only save
            out = tmp_path / f"{accident.__name__}{step}" / "run"
            wire = Wire(step, 4, lambda out=out, accident=accident: accident(out / "checkpoints"))
            watched(lambda out=out: hone.run(recipe(world, "sft", out)), wire, monkeypatch)
            assert "checkpoints is no folder any more" in wire.getvalue()
            hone.resume(out, settings=["train.steps=5"])


def test_a_step_that_cannot_be_logged_is_saved(world: World, tmp_path: Path, monkeypatch):
    """A log may be put out of reach between the look at the folder and the write."""
    out = tmp_path / "run"
    write = sinks.append

    def late(path: Path, row: Mapping[str, Any]) -> None:
        if row["step"] == 3:
            a_pipe(path)
        write(path, row)

    monkeypatch.setattr(sinks, "append", late)
    wire = Wire(9, 9, lambda: None)
    assert watched(lambda: main(arguments(recipe(world, "sft", out), world)), wire, monkeypatch) == 2
    assert "step 3 could not be logged; it is saved\n" in wire.getvalue()
    assert "No such device or address" in wire.getvalue().splitlines()[-1]
    assert list(checkpoints(out / "checkpoints")) == [3]


def test_a_start_that_was_emptied_is_as_good_as_gone(world: World, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    wire = Wire(2, 4, lambda: emptied(out / "start"))
    assert watched(lambda: main(arguments(recipe(world, "sft", out), world)), wire, monkeypatch) == 2
    assert "hone: error: the run is done, but " in wire.getvalue().splitlines()[-1]


def test_a_lock_that_is_no_file_is_an_error_at_once(world: World, tmp_path: Path, capsys):
    for accident in (a_pipe, a_folder, a_loose_link):
        out = tmp_path / accident.__name__
        out.mkdir()
        accident(out / names.LOCK)
        assert main(arguments(recipe(world, "sft", out), world)) == 2
        assert f"{out / names.LOCK} is no file" in capsys.readouterr().err.splitlines()[-1]
