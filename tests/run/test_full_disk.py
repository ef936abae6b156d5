"""A disk that fills up while a run saves: the checkpoint before survives, and nothing half-written stays."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small import World, arguments, assert_same_run, contents, metrics, recipe, temporary

import hone
from hone.cli import main
from hone.errors import HoneError
from hone.model.formats.folder import load_decoder
from hone.storage.files import checkpoints, latest

torch.set_num_threads(1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; only root can have one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system, and not in every container")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, *, leave: int) -> None:
    """One large file, so that `leave` bytes are free."""
    free = shutil.disk_usage(disk).free
    (disk / "large").write_bytes(bytes(max(0, free - leave)))


def size_of(folder: Path) -> int:
    """In whole pages, as a file system counts."""
    return sum(-(-len(data) // 4096) * 4096 for data in contents(folder).values())


def test_a_full_disk_keeps_the_checkpoint_before(world: World, disk: Path, tmp_path: Path, capsys):
    whole, out = tmp_path / "whole", disk / "run"
    hone.run(recipe(world, "sft", whole, "train.steps=3", "save.every=1"))
    hone.run(recipe(world, "sft", out, "train.steps=2", "save.every=1"))
    saved = contents(out / "checkpoints")
    command = [*arguments(recipe(world, "sft", out, "train.steps=3"), world), "--resume"]
    need = size_of(out / "checkpoints/step-000002")
    for leave in (0, 4096 * 2, need // 3, need - 4096 * 6):
        (disk / "large").unlink(missing_ok=True)
        fill(disk, leave=leave + 4096 * 4)  # room for the log and the settings, not for a checkpoint
        capsys.readouterr()
        assert main(command) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert err.startswith("hone: error: could not save ")
        assert "No space left on device; free some space or set out= to another disk" in err
        assert contents(out / "checkpoints") == saved
        assert temporary(out) == []
        assert latest(out / "checkpoints") == out / "checkpoints/step-000002"
        load_decoder(out / "checkpoints/step-000002")
    (disk / "large").unlink()
    assert main(command) == 0
    assert_same_run(whole, out, step=3)


def test_a_disk_full_from_the_start_leaves_nothing(world: World, disk: Path, capsys):
    for leave in (0, 4096, 4096 * 4, 4096 * 20):
        (disk / "large").unlink(missing_ok=True)
        fill(disk, leave=leave)
        assert main(arguments(recipe(world, "sft", disk / "run"), world)) == 2
        err = capsys.readouterr().err.splitlines()
        assert "for checkpoints and the start need" in err[-1]  # refused before anything is written
        assert "free some space" in err[-1]
        assert [p.name for p in disk.iterdir()] == ["large"]


def test_a_log_that_cannot_grow_is_said_and_mended(world: World, disk: Path, tmp_path: Path, capsys):
    whole, out = tmp_path / "whole", disk / "run"
    hone.run(recipe(world, "sft", whole, "train.steps=40", "save.every=20"))
    hone.run(recipe(world, "sft", out, "train.steps=20"))
    longer = recipe(world, "sft", out, "train.steps=40")
    fill(disk, leave=4096 * 4)
    assert main([*arguments(longer, world), "--resume"]) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    (disk / "large").unlink()
    hone.run(longer, resume=True)
    assert_same_run(whole, out, step=40)


def test_a_file_that_may_not_grow_is_an_error_without_root(world: World, tmp_path: Path):
    """A limit on the size of files fails the writes that a full disk would fail, on every machine."""
    out = tmp_path / "run"
    hone.run(recipe(world, "sft", out, "train.steps=2"))
    before = contents(out / "checkpoints")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(HoneError, match=r"could not save .*File too large; .*what was saved before is untouched"):
            hone.run(recipe(world, "sft", out, "train.steps=3"), resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(out / "checkpoints") == before
    assert temporary(out) == []
    hone.run(recipe(world, "sft", out, "train.steps=3"), resume=True)
    assert list(checkpoints(out / "checkpoints")) == [2, 3]
    assert metrics(out)[-1]["step"] == 3
