"""A checkpoint is whole or absent, whatever happens while it is written; what is read back is what was saved."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from hone.errors import HoneError
from hone.storage import files as checkpoint
from hone.storage.files import load_optimizer, load_tensors, optimizer_tensors, save_tensors
from hone.train import optim

torch.set_num_threads(1)


def writer(text: str, *, files: int = 3) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        for i in range(files):
            (folder / f"file{i}").write_text(f"{text} {i}")
        (folder / "inner/deep").write_text(text)

    return write


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- folders ---


def test_a_folder_is_written_with_the_hash_of_every_file(tmp_path: Path):
    folder = checkpoint.save_folder(tmp_path / "a/b", writer("x"))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest) == ["file0", "file1", "file2", "inner/deep"]
    # printf x | sha256sum
    assert manifest["inner/deep"] == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    checkpoint.verify(folder)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


class Crash(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(28, "No space left on device"), HoneError),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), HoneError),
        (Exception("No space left on device (os error 28)"), HoneError),  # as tokenizers says it
        (RuntimeError("a bug"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (Crash(), Crash),
    ],
    ids=["disk", "safetensors", "tokenizers", "bug", "ctrl-c", "anything"],
)
def test_a_write_that_fails_midway_leaves_the_old_folder_and_nothing_else(error, seen, tmp_path: Path):
    def half(folder: Path) -> None:
        (folder / "file0").write_text("half")
        raise error

    with pytest.raises(seen) as caught:
        checkpoint.save_folder(tmp_path / "new", half)
    assert list(tmp_path.iterdir()) == []
    if seen is HoneError:
        assert "new: No space left on device; free some space or set out= to another disk" in str(caught.value)

    checkpoint.save_folder(tmp_path / "old", writer("old"))
    before = contents(tmp_path)
    with pytest.raises(seen):
        checkpoint.save_folder(tmp_path / "old", half)
    assert contents(tmp_path) == before


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path: Path, monkeypatch):
    checkpoint.save_folder(tmp_path / "it", writer("old"))
    before, replace = contents(tmp_path), os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(target).name == "it" and not str(source).endswith("old.tmp"):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(HoneError, match="Input/output error"):
        checkpoint.save_folder(tmp_path / "it", writer("new"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("call", range(1, 14))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(call: int, tmp_path: Path):
    """In a child that dies at the call-th time it makes a file safe or renames one: no `finally` runs there."""
    checkpoint.save(tmp_path, 1, writer("one"))
    if not (pid := os.fork()):
        left = [call]
        for name in ("fsync", "replace"):
            real = getattr(os, name)

            def dying(*arguments, real=real):
                left[0] -= 1
                if not left[0]:
                    os._exit(9)
                return real(*arguments)

            setattr(os, name, dying)
        checkpoint.save(tmp_path, 2, writer("two"))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (9 if call <= 12 else 0)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.name in ("step-000001", "step-000002")
    assert (found / "file0").read_text() == {"step-000001": "one 0", "step-000002": "two 0"}[found.name]
    checkpoint.sweep(tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    checkpoint.save(tmp_path, 3, writer("three"))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000003"


def dying_at(call: int, names: tuple[str, ...], do: Callable[[], object]) -> int:
    """The exit code of a child that is killed instead of making its call-th call of these functions of os."""
    if not (pid := os.fork()):
        left = [call]
        for name in names:
            real = getattr(os, name)

            def dying(*arguments, real=real, **options):
                left[0] -= 1
                if not left[0]:
                    os._exit(9)
                return real(*arguments, **options)

            setattr(os, name, dying)
        do()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("call", range(1, 6))
def test_a_kill_while_one_is_replaced_loses_neither(call: int, tmp_path: Path):
    """A run that goes back writes a step again: between two renames neither folder has its name."""
    checkpoint.save(tmp_path, 1, writer("one"))
    checkpoint.save(tmp_path, 2, writer("old"))
    code = dying_at(call, ("replace",), lambda: checkpoint.save(tmp_path, 2, writer("new")))
    assert code == (9 if call <= 2 else 0)
    checkpoint.sweep(tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002"
    assert (tmp_path / "step-000002/file0").read_text() == ("old 0" if call <= 2 else "new 0")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("call", range(1, 9))
def test_a_kill_while_an_old_one_goes_leaves_nothing_half(call: int, tmp_path: Path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, writer(str(step)), keep=2)
    dying_at(call, ("unlink", "rmdir"), lambda: checkpoint.save(tmp_path, 3, writer("3"), keep=1))
    said = list[str]()
    for folder in checkpoint.checkpoints(tmp_path).values():
        checkpoint.verify(folder)
    assert checkpoint.latest(tmp_path, note=said.append) == tmp_path / "step-000003"
    assert said == []
    checkpoint.sweep(tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_folders_inside_and_around_are_synced_and_the_manifest_is_last(tmp_path: Path, monkeypatch):
    order, sync = list[str](), checkpoint.sync
    monkeypatch.setattr(checkpoint, "sync", lambda path: (order.append(path.name), sync(path)))
    folder = checkpoint.save_folder(tmp_path / "it", writer("x"))
    assert order[:5] == ["file0", "file1", "file2", "deep", "manifest.json"]
    assert order[5:] == ["inner", f".it.{os.getpid()}.tmp", tmp_path.name]
    checkpoint.point(tmp_path, "latest", folder)
    assert order[-1] == tmp_path.name, "the new name of a small file is safe too"


def test_what_is_called_between_two_files_can_end_it(tmp_path: Path):
    for call in range(1, 6):
        left = [call]

        def stop(left=left) -> None:
            left[0] -= 1
            if not left[0]:
                raise Crash

        with pytest.raises(Crash):
            checkpoint.save_folder(tmp_path / "it", writer("x"), between=stop)
        assert list(tmp_path.iterdir()) == []


def test_those_to_spare_stay_and_are_chosen_when_the_new_one_is_there(tmp_path: Path):
    seen = list[list[int]]()

    def spare(steps) -> set[int]:
        seen.append(list(steps))
        return {1, 3}

    for step in range(1, 6):
        checkpoint.save(tmp_path, step, writer(str(step)), keep=1, spare=spare)
    assert list(checkpoint.checkpoints(tmp_path)) == [1, 3, 5]
    assert seen == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 3, 4, 5]]


def test_every_bit_that_flips_is_seen(tmp_path: Path):
    """All of a small checkpoint, its manifest too: JSON that still reads has another hash or name in it."""
    folder = checkpoint.save_folder(tmp_path / "it", writer("x", files=1))
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        data = path.read_bytes()
        for place in range(len(data)):
            for bit in range(8) if place % 7 == 0 else (place % 8,):
                path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
                with pytest.raises(HoneError):
                    checkpoint.verify(folder)
        path.write_bytes(data)
    checkpoint.verify(folder)


def test_tensors_that_were_read_outlive_their_file(tmp_path: Path):
    save_tensors(tmp_path / "t", {"x": torch.arange(2000.0)})
    found = load_tensors(tmp_path / "t")
    (tmp_path / "t").write_bytes(bytes(8000))
    os.truncate(tmp_path / "t", 0)
    assert torch.equal(found["x"], torch.arange(2000.0))


def test_what_a_dead_process_of_the_same_number_left_is_no_part_of_the_new_one(tmp_path: Path):
    aside = tmp_path / f".it.{os.getpid()}.tmp"
    aside.mkdir()
    (aside / "rubbish").write_text("from before")
    folder = checkpoint.save_folder(tmp_path / "it", writer("x"))
    assert "rubbish" not in contents(folder)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["file0", "inner/deep", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda p: p.write_bytes(b"")], ids=["flip", "remove", "empty"])
def test_any_damage_is_seen(name: str, damage, tmp_path: Path):
    folder = checkpoint.save_folder(tmp_path / "it", writer("x"))
    damage(folder / name)
    with pytest.raises(HoneError, match="earlier"):
        checkpoint.verify(folder)


@pytest.mark.parametrize("text", ["{}", "[]", "3", "null", '{"file0": 3}', "\xff"])
def test_a_manifest_of_another_shape_is_no_manifest(text: str, tmp_path: Path):
    folder = checkpoint.save_folder(tmp_path / "it", writer("x"))
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(HoneError, match="earlier"):
        checkpoint.verify(folder)


def test_a_folder_that_is_not_there_is_not_whole(tmp_path: Path):
    with pytest.raises(HoneError, match="not a complete checkpoint"):
        checkpoint.verify(tmp_path / "absent")


# --- small files ---


def test_a_small_file_is_replaced_or_left(tmp_path: Path, monkeypatch):
    path = tmp_path / "it"
    checkpoint.write_atomically(path, "one")
    checkpoint.write_atomically(path, "two")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(HoneError, match="it: No space left on device"):
        checkpoint.write_atomically(path, "three")
    assert contents(tmp_path) == {"it": b"two"}


# --- which one ---


def test_the_newest_whole_one_is_found_and_the_others_are_said(tmp_path: Path):
    assert checkpoint.latest(tmp_path / "absent") is None
    for step in (9, 10, 11):
        checkpoint.save(tmp_path, step, writer(str(step)), keep=9)
    flip(tmp_path / "step-000011/file0")
    (tmp_path / "step-000010/manifest.json").unlink()
    said = list[str]()
    assert checkpoint.latest(tmp_path, note=said.append) == tmp_path / "step-000009"
    assert [text.partition(":")[0] for text in said] == ["passed over step-000011", "passed over step-000010"]
    shutil.rmtree(tmp_path / "step-000009")
    assert checkpoint.latest(tmp_path) is None


def test_steps_are_compared_as_numbers(tmp_path: Path):
    for step in (999_999, 1_000_000):
        checkpoint.save(tmp_path, step, writer(str(step)), keep=1)
    assert list(checkpoint.checkpoints(tmp_path)) == [1_000_000]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"


def test_what_only_looks_like_a_checkpoint_is_left_alone(tmp_path: Path):
    (tmp_path / "step-final").mkdir()
    (tmp_path / "step-000007").write_text("a file")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, writer(str(step)), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000003", "step-000007", "step-final"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000003"


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5]), (0, [5])])
def test_only_the_newest_are_kept(keep: int, left: list[int], tmp_path: Path):
    for step in range(1, 6):
        folder = checkpoint.save(tmp_path, step, writer(str(step)), keep=keep)
        assert (tmp_path / "latest").read_text() == folder.name == checkpoint.name_of(step)
    assert list(checkpoint.checkpoints(tmp_path)) == left


def test_a_new_one_outlives_a_later_damaged_one(tmp_path: Path):
    for step in (4, 5, 6):
        checkpoint.save(tmp_path, step, writer(str(step)), keep=9)
    flip(tmp_path / "step-000006/file0")
    checkpoint.save(tmp_path, 5, writer("again"), keep=1)
    assert list(checkpoint.checkpoints(tmp_path)) == [5]
    assert (tmp_path / "step-000005/file0").read_text() == "again 0"


def test_a_save_that_fails_removes_no_old_one(tmp_path: Path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, writer(str(step)), keep=2)
    before = contents(tmp_path)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(HoneError):
        checkpoint.save(tmp_path, 3, full, keep=1)
    assert contents(tmp_path) == before


# --- tensors ---


def test_tensors_come_back_bit_for_bit(tmp_path: Path):
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "plain": base,
        "transposed": base.T,
        "view": base[1:3, ::2],
        "shared": base,
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "scalar": torch.tensor(3.0),
        "half": base.bfloat16(),
        "whole": torch.tensor([2**53 + 1]),
        "empty": torch.zeros(0, 3),
    }
    save_tensors(tmp_path / "t", tensors)
    found = load_tensors(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        assert found[name].shape == x.shape
        same = found[name].contiguous().view(torch.uint8) == x.contiguous().view(torch.uint8) if x.ndim else None
        assert bool(same.all()) if same is not None else torch.equal(found[name], x)


def test_no_tensors_are_a_file_too(tmp_path: Path):
    save_tensors(tmp_path / "t", {})
    assert load_tensors(tmp_path / "t") == {}


def test_a_torn_file_of_tensors_is_said(tmp_path: Path):
    save_tensors(tmp_path / "t", {"x": torch.zeros(9)})
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-1])
    with pytest.raises(HoneError, match="cannot be read"):
        load_tensors(tmp_path / "t")
    with pytest.raises(HoneError, match="cannot be read"):
        load_tensors(tmp_path / "absent")
    (tmp_path / "j").write_text("{")
    with pytest.raises(HoneError, match="cannot be read"):
        checkpoint.read_json(tmp_path / "j")


# --- the optimiser ---


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parameters = list(model.parameters())
    return model, optim.adamw(parameters[:2], parameters[2:], lr=0.1, critic_lr=0.01, weight_decay=0.1)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, start: int = 0) -> None:
    for step in range(start, start + steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optim.set_rate(optimizer, 1 / (1 + step))
        optimizer.step()


def test_an_optimiser_goes_on_bit_for_bit(tmp_path: Path):
    model, optimizer = model_and_optimizer(0)
    descend(model, optimizer, 5)
    save_tensors(tmp_path / "moments", optimizer_tensors(optimizer))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    other, fresh = model_and_optimizer(1)
    other.load_state_dict(weights)
    load_optimizer(fresh, load_tensors(tmp_path / "moments"))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[a].keys() == fresh.state[b].keys()
        for key, x in optimizer.state[a].items():
            y = fresh.state[b][key]
            assert (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape)
            assert torch.equal(x, y)

    descend(model, optimizer, 5, start=5)
    descend(other, fresh, 5, start=5)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_optimiser_that_has_not_stepped_has_nothing_to_save(tmp_path: Path):
    _, optimizer = model_and_optimizer(0)
    assert optimizer_tensors(optimizer) == {}
    load_optimizer(optimizer, {})


def test_moments_of_a_larger_model_are_refused():
    model, optimizer = model_and_optimizer(0)
    descend(model, optimizer, 1)
    small = optim.adamw([nn.Parameter(torch.zeros(4, 3))], lr=0.1)
    with pytest.raises(HoneError, match="this model has 1"):
        load_optimizer(small, optimizer_tensors(optimizer))
